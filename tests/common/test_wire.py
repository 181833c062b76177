"""Core types survive the wire; what cannot be one is refused by name; errors come back as what they were."""

import math

import grpc
import grpc.aio
import pytest

from kvrelay.common import wire
from kvrelay.common.errors import (
    STATUS,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    KvrelayError,
    NoCapacity,
    Overloaded,
    RequestTooLarge,
    Unavailable,
    Unsupported,
)
from kvrelay.common.ids import Epoch, Fingerprint, PodId, RequestId
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from kvrelay.common.request import (
    ChoiceDelta,
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    ResumedChoice,
    SamplingParams,
    Ticket,
    TicketTarget,
    TokenLogprob,
)
from kvrelay.common.rpc import from_rpc_error, to_status
from kvrelay.v1 import types_pb2

pytestmark = pytest.mark.unit

SAMPLING = SamplingParams(
    n=3,
    max_tokens=7,
    min_tokens=2,
    temperature=0.0,
    top_p=0.5,
    top_k=-1,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=-2.0,
    frequency_penalty=2.0,
    logit_bias={5: -1.5, 0: 100.0},
    seed=-(2**63),
    logprobs=0,
    prompt_logprobs=3,
    stop=("a", "\n"),
    stop_token_ids=(1, 2),
    include_stop_str_in_output=True,
    ignore_eos=True,
    skip_special_tokens=False,
)
LAYOUT = KvLayout(
    fingerprint=Fingerprint("f" * 32),
    groups=(
        KvGroup(
            kind=KvGroupKind.SLIDING,
            layers=(0, 3),
            block_size=32,
            dtype=KvDtype.BFLOAT16,
            num_kv_heads=4,
            head_dim=64,
            sliding_window=128,
            first_head=2,
            shard_heads=2,
        ),
    ),
    tp_rank=1,
    tp_size=2,
)
TICKET = Ticket(
    request_id=RequestId("r"),
    attempt=2,
    pod_id=PodId("d"),
    epoch=Epoch("e"),
    generation=9,
    timeout_ms=30_000,
    targets=(
        TicketTarget(rank=0, group=0, address=b"\0\xff", ticket_bits=(1 << 40) - 1, first_token=16, end_token=40),
    ),
    layout=LAYOUT,
)
LOGPROBS = PositionLogprobs(
    chosen=TokenLogprob(token_id=3, logprob=-0.5, rank=2), top=(TokenLogprob(token_id=4, logprob=-0.25, rank=1),)
)


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(), SamplingParams(seed=0, max_tokens=1, logprobs=20)])
def test_requests_survive(sampling: SamplingParams) -> None:
    request = EngineRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(0, 1, 2**32 - 1),
        sampling=sampling,
        priority=-4,
        cache_salt="salt",
        timeout_ms=1234,
        resume=(ResumedChoice(choice=1, token_ids=(8, 9), finished=True), ResumedChoice(choice=2, token_ids=())),
    )
    sent = wire.request_to_proto(request).SerializeToString()
    assert wire.request_from_proto(types_pb2.EngineRequest.FromString(sent)) == request


def test_unset_fields_keep_their_defaults() -> None:
    request = wire.request_from_proto(types_pb2.EngineRequest(request_id="r", prompt_token_ids=[1]))
    assert request == EngineRequest(request_id=RequestId("r"), prompt_token_ids=(1,), sampling=SamplingParams())


def test_no_time_left_is_not_the_default_time() -> None:
    request = EngineRequest(request_id=RequestId("r"), prompt_token_ids=(1,), sampling=SamplingParams(), timeout_ms=0)
    assert wire.request_from_proto(wire.request_to_proto(request)).timeout_ms == 1


def test_nan_passes_the_wire_and_not_the_validation() -> None:
    sampling = wire.sampling_from_proto(types_pb2.SamplingParams(temperature=math.nan))
    with pytest.raises(InvalidRequest) as caught:
        sampling.validate(100)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_deltas_survive(reason: FinishReason | None) -> None:
    delta = ChoiceDelta(
        request_id=RequestId("r"),
        choice=1,
        index=5,
        token_ids=(3, 0),
        logprobs=(LOGPROBS, LOGPROBS),
        finish_reason=reason,
        stop_token_id=0,
        error="internal: why",
        attempt=3,
    )
    sent = wire.delta_to_proto(delta).SerializeToString()
    assert wire.delta_from_proto(types_pb2.ChoiceDelta.FromString(sent)) == delta


def test_tickets_survive() -> None:
    sent = wire.ticket_to_proto(TICKET).SerializeToString()
    assert wire.ticket_from_proto(types_pb2.Ticket.FromString(sent)) == TICKET


def _bad_ticket(**changes: object) -> types_pb2.Ticket:
    ticket = wire.ticket_to_proto(TICKET)
    for path, value in changes.items():
        *parents, name = path.split("__")
        place: object = ticket
        for parent in parents:
            place = getattr(place, parent)
            place = place[0] if parent in ("targets", "groups") else place  # type: ignore[index]
        setattr(place, name, value)
    return ticket


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"request_id": ""}, "ticket.request_id"),
        ({"targets__ticket_bits": 1 << 40}, "ticket.targets"),
        ({"targets__first_token": 41}, "ticket.targets"),
        ({"layout__groups__kind": 0}, "layout.groups.kind"),
        ({"layout__groups__kind": 77}, "layout.groups.kind"),
        ({"layout__groups__dtype": "int3"}, "layout.groups.dtype"),
        ({"layout__groups__block_size": 0}, "layout.groups"),
        ({"layout__groups__first_head": 3}, "layout.groups"),
    ],
)
def test_bad_tickets_are_refused_by_name(change: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.ticket_from_proto(_bad_ticket(**change))
    assert caught.value.param == param


def test_bad_requests_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as nameless:
        wire.request_from_proto(types_pb2.EngineRequest(prompt_token_ids=[1]))
    assert nameless.value.param == "request_id"
    with pytest.raises(Unsupported) as lora:
        wire.request_from_proto(types_pb2.EngineRequest(request_id="r", lora="x"))
    assert lora.value.param == "lora"
    with pytest.raises(InvalidRequest) as uneven:
        wire.delta_from_proto(types_pb2.ChoiceDelta(token_ids=[1, 2], logprobs=[types_pb2.PositionLogprobs()]))
    assert uneven.value.param == "logprobs"
    with pytest.raises(InvalidRequest) as finish:
        wire.finish_from_proto(99)  # type: ignore[arg-type]
    assert finish.value.param == "finish_reason"


def _sent(error: KvrelayError) -> KvrelayError:
    status = to_status(error)
    metadata = grpc.aio.Metadata(*status.metadata)
    return from_rpc_error(grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), metadata, status.details))


@pytest.mark.parametrize("kind", list(STATUS))
def test_errors_come_back_as_they_were(kind: type[KvrelayError]) -> None:
    back = _sent(kind("what happened: ümlaut"))
    assert type(back) is kind
    assert back.message == "what happened: ümlaut"


def test_errors_keep_their_field_and_their_delay() -> None:
    invalid, busy = _sent(InvalidRequest("no", "top_p")), _sent(NoCapacity("full", 2.5))
    assert isinstance(invalid, InvalidRequest)
    assert invalid.param == "top_p"
    assert isinstance(busy, Overloaded)
    assert busy.retry_after_seconds == 2.5


def test_long_and_broken_messages_fit_into_the_trailers() -> None:
    status = to_status(InvalidRequest("\ud800" + "→" * 10_000, "x" * 10_000))
    assert sum(len(value) for _, value in status.metadata) < 5000
    assert len(status.details.encode()) < 2000


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "connection refused", Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", Cancelled),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)", RequestTooLarge),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "quota", Overloaded),
        (grpc.StatusCode.UNIMPLEMENTED, "", Internal),
    ],
)
def test_errors_of_grpc_itself(code: grpc.StatusCode, message: str, kind: type[KvrelayError]) -> None:
    details = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff garbage"))
    for metadata in (grpc.aio.Metadata(), details):
        assert type(from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, message))) is kind
