"""What passes between a pod's front process (RPC, no torch) and its engine process: msgspec structs, tagged by name.

One message is a 4-byte little-endian length and its MessagePack. Either side refuses a message over MAX_MESSAGE_BYTES.
"""

import msgspec

from kvrelay.common.ids import Epoch, Fingerprint, PodId, RequestId, RouterId
from kvrelay.common.kvevents import Event
from kvrelay.common.layout import KvLayout
from kvrelay.common.request import ChoiceDelta, EngineRequest, PositionLogprobs, Ticket
from kvrelay.engine.config import KvStoreOptions

MAX_MESSAGE_BYTES = 64 << 20


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


# Front → engine. `call` numbers an answer that the front waits for.


class Start(Message, frozen=True, kw_only=True):
    """First. `config` is `EngineConfig.to_wire()`."""

    config: dict[str, str | int | float | bool | None]
    pod_id: PodId
    kvstore: KvStoreOptions | None = None


class Submit(Message, frozen=True, kw_only=True):
    """Compute prompt and tokens here. Outputs come as StepOutput."""

    request: EngineRequest
    router_id: RouterId = RouterId("")


class Prefill(Message, frozen=True, kw_only=True):
    """Compute the prompt, sample each choice's first token, push the KV to where the ticket says."""

    request: EngineRequest
    ticket: Ticket


class Reserve(Message, frozen=True, kw_only=True):
    """Answered by Reserved or Failed. Idempotent by (request, attempt)."""

    call: int
    request: EngineRequest
    attempt: int
    router_id: RouterId
    local_prefill: bool = False


class Abort(Message, frozen=True, kw_only=True):
    request_ids: tuple[RequestId, ...]


class AbortChoice(Message, frozen=True, kw_only=True):
    """One choice is over; with the last of them the request."""

    request_id: RequestId
    choice: int


class AbortRouter(Message, frozen=True, kw_only=True):
    """A router is gone: abort what it asked for."""

    router_id: RouterId


class Inspect(Message, frozen=True, kw_only=True):
    call: int


class SetHold(Message, frozen=True, kw_only=True):
    call: int
    point: str
    after_frames: int = 0


class Shutdown(Message, frozen=True, kw_only=True):
    pass


# Engine → front.


class Progress(Message, frozen=True, kw_only=True):
    """While starting: what is being done, and how far it is."""

    what: str
    done: int
    total: int


class Ready(Message, frozen=True, kw_only=True):
    info: "EngineInfo"


class StepOutput(Message, frozen=True, kw_only=True):
    """One engine step's tokens and news, for all requests."""

    deltas: tuple[ChoiceDelta, ...] = ()
    notices: tuple["Notice", ...] = ()
    cache: tuple[Event, ...] = ()
    """What the prefix cache gained and lost since the last output, in order; the rest of a long list comes in further ones."""
    stats: "EngineStats"


class Reserved(Message, frozen=True, kw_only=True):
    call: int
    ticket: Ticket | None
    num_cached_tokens: int


class Done(Message, frozen=True, kw_only=True):
    """The answer to a call that returns nothing."""

    call: int


class Inspected(Message, frozen=True, kw_only=True):
    call: int
    inspection: "Inspection"


class Failed(Message, frozen=True, kw_only=True):
    """The answer to a call that failed: a `KvrelayError` by code."""

    call: int
    code: str
    message: str


# Parts.


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    pod_id: PodId
    epoch: Epoch
    model: str
    fingerprint: Fingerprint
    layout: KvLayout
    max_model_len: int
    num_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    transport: str
    attention: str


class KvStoreCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of the pod's use of the KV store."""

    attached: bool = False
    lookups: int = 0
    hits: int = 0
    """Look-ups of which something was loaded."""
    declined: int = 0
    """Look-ups that found what would have taken longer than to compute it, or what there was no room for."""
    loaded_tokens: int = 0
    bytes_loaded: int = 0
    load_seconds: float = 0.0
    corrupt: int = 0
    timeouts: int = 0
    stored_tokens: int = 0
    bytes_stored: int = 0
    waiting_blocks: int = 0
    dropped_blocks: int = 0
    """Not stored: the cache lost them first, or they waited too long."""
    refused: int = 0
    """Batches for parts of which the store had no room."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state after a step; counters count from the start."""

    num_running: int = 0
    num_waiting: int = 0
    num_reservations: int = 0
    num_pushes: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    credits: int = 0
    num_steps: int = 0
    step_ms: float = 0.0
    host_seconds: float = 0.0
    """Of all steps: to schedule, launch and update them. On a CPU, to launch is to compute."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_preemptions: int = 0
    transfer: "TransferCounters"
    store: KvStoreCounters = KvStoreCounters()
    links: tuple["LinkStats", ...] = ()


class LinkStats(msgspec.Struct, frozen=True, kw_only=True):
    """An open link to a pod that KV is pushed to."""

    pod_id: PodId
    transport: str
    """What it goes by, with commas."""
    bytes_per_second: float
    """As measured before its first push; 0: it was not."""


class TransferCounters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counted at the calls into the transport; see the proto message of the same name."""

    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    transfers_completed: int = 0
    transfers_failed: int = 0
    seconds: float = 0.0
    payload_bytes_overlapped: int = 0
    checksum_errors: int = 0
    transfers_cancelled: int = 0
    links_lost: int = 0


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    violations: tuple[str, ...]
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    num_requests: int
    num_reservations: int
    num_pushes: int
    staging_bytes: int
    num_preemptions: int
    transfer: TransferCounters


class NoticeKind(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class PrefillStarted(NoticeKind, frozen=True, kw_only=True):
    """The first chunk enters a step."""

    num_cached_tokens: int


class PromptComputed(NoticeKind, frozen=True, kw_only=True):
    num_cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


class PushCompleted(NoticeKind, frozen=True, kw_only=True):
    payload_bytes: int
    seconds: float


class PushFailed(NoticeKind, frozen=True, kw_only=True):
    code: str
    message: str


class TicketRevoked(NoticeKind, frozen=True, kw_only=True):
    pass


class RecomputeStarted(NoticeKind, frozen=True, kw_only=True):
    pass


class RequestFailed(NoticeKind, frozen=True, kw_only=True):
    """The request is over, with this error."""

    code: str
    message: str


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Some tokens that were ready at a time."""

    at: float
    num_tokens: int


class Phase(msgspec.Struct, frozen=True, array_like=True):
    name: str
    start: float
    end: float
    chunks: tuple[Chunk, ...] = ()


class Timeline(NoticeKind, frozen=True, kw_only=True):
    """Of a traced request, last: when it was in which phase here, in seconds of this host's monotonic clock."""

    phases: tuple[Phase, ...]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    request_id: RequestId
    attempt: int = 0
    kind: (
        PrefillStarted
        | PromptComputed
        | PushCompleted
        | PushFailed
        | TicketRevoked
        | RecomputeStarted
        | RequestFailed
        | Timeline
    )


ToEngine = Start | Submit | Prefill | Reserve | Abort | AbortChoice | AbortRouter | Inspect | SetHold | Shutdown
FromEngine = Progress | Ready | StepOutput | Reserved | Done | Inspected | Failed
