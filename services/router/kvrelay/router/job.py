"""What the fronts (HTTP, gRPC) hand to the router, and what they get back. No protobuf, no HTTP here.

A front builds a `GenerateInput` (types checked, ranges not), awaits `prepare`, which raises before any pod is touched, and then
iterates `generate`: one `PromptEvent`, any number of `ChoiceEvent`s, one `UsageEvent`.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from kvrelay.common.ids import Fingerprint, RequestId
from kvrelay.common.request import EngineRequest, FinishReason, SamplingParams


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str
    name: str = ""


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True


class GenerateInput(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client wrote it.

    `timeout_ms` None: the router's default. `add_special_tokens` counts for a prompt of text only. `echo`: the client wants the
    prompt's text back: `PromptEvent.text` is set.
    """

    request_id: RequestId
    model: str
    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""
    session: str = ""
    """The client's key of what belongs together, as long as it likes; empty: none."""
    timeout_ms: int | None = None
    add_special_tokens: bool = True
    echo: bool = False
    traceparent: str = ""
    """W3C's, of the trace that it is a part of; empty: none."""


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Validated and tokenized: `request.sampling` has its `max_tokens` and its `seed`."""

    input: GenerateInput
    request: EngineRequest
    deadline: float
    """On the clock of `time.monotonic`."""
    arrival: float
    """On the same clock."""
    created: int
    """Unix seconds: what OpenAI's answers call so."""

    @property
    def request_id(self) -> RequestId:
        """The client's. Pods know the request by `request.request_id`, which no client can choose."""
        return self.input.request_id


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    fingerprint: Fingerprint
    created: int
    """Unix seconds at which this router started to serve it."""


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A token, and how likely it was. `utf8` are its bytes, which may be a part of a character; `text` is their reading."""

    token_id: int
    text: str
    utf8: bytes
    logprob: float
    rank: int


class PositionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The token that stands at a position, and the most likely ones there, best first."""

    chosen: TokenEntry
    top: tuple[TokenEntry, ...]
    text_offset: int
    """In characters, in the choice's text (or the prompt's, for prompt log-probabilities)."""


class PromptEvent(msgspec.Struct, frozen=True, kw_only=True):
    """First, once. `prompt_logprobs`, where asked for, has an entry a prompt token but the first."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int
    text: str = ""
    prompt_logprobs: tuple[PositionEntry, ...] = ()


class ChoiceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one choice gained. Text that may turn out to be a stop string or a part of a character is held back, its tokens are not.

    `stop_reason`: the stop string or the stop token's id that ended the choice, where it was one.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionEntry, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Last, once. `cached_tokens`: prompt tokens that no pod computed for this request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Event = PromptEvent | ChoiceEvent | UsageEvent


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    reason: str
    """Why not; or, of what is ready."""
    num_prefill: int = 0
    num_decode: int = 0
    """Usable pods; those of role both count as decode pods."""


class Inference(Protocol):
    """The router as the fronts see it; `kvrelay.router.core.Router` is the one implementation that serves."""

    def models(self) -> tuple[ModelInfo, ...]: ...

    def model_info(self, model: str = "") -> ModelInfo:
        """Of the named model, or of the only one. Raises ModelNotFound."""
        ...

    def ready(self) -> Readiness: ...

    async def prepare(self, source: GenerateInput) -> PreparedRequest:
        """Raises InvalidRequest (with `param`), ModelNotFound, RequestTooLarge. No pod is touched."""
        ...

    def generate(self, prepared: PreparedRequest) -> AsyncGenerator[Event, None]:
        """Raises a KvrelayError, at the first event or later. Closing it, or cancelling the task that iterates it, frees what
        the request holds on every pod."""
        ...

    async def abort(self, request_id: RequestId) -> bool:
        """Ends a running request: its iterator raises Cancelled. False: no such request."""
        ...

    async def tokenize(
        self, model: str, prompt: str | Chat, *, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """`add_special_tokens` None: true for text, false for a chat, whose template writes them. Raises InvalidRequest."""
        ...

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        ...
