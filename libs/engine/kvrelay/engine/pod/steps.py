"""An engine's outputs to protobuf: here core messages of the engine meet the wire, as `kvrelay.common.wire` is torch- and engine-free."""

from collections.abc import Iterable, Sequence

from kvrelay.common.request import ChoiceDelta, PositionLogprobs
from kvrelay.common.wire import delta_to_proto, layout_to_proto, logprobs_to_proto
from kvrelay.engine import messages as m
from kvrelay.v1 import decode_pb2, pod_pb2, prefill_pb2

ROLES = {"prefill": pod_pb2.ROLE_PREFILL, "decode": pod_pb2.ROLE_DECODE, "both": pod_pb2.ROLE_BOTH}


def step_to_proto(deltas: Iterable[ChoiceDelta], notices: Iterable[m.Notice]) -> decode_pb2.StepTokens:
    """Notices that only a prefill pod's callers know are left out."""
    told = (notice_to_proto(notice) for notice in notices)
    return decode_pb2.StepTokens(
        deltas=[delta_to_proto(delta) for delta in deltas],
        notices=[notice for notice in told if notice is not None],
    )


def joined(waiting: Sequence[decode_pb2.StepTokens]) -> decode_pb2.StepTokens:
    """Several steps in one message; changes the first of them. A receiver takes a message's notices before its tokens, and in that
    order they come of any one attempt."""
    first, *others = waiting
    for step in others:
        first.MergeFrom(step)
    return first


def notice_to_proto(notice: m.Notice) -> decode_pb2.RequestNotice | None:
    message = decode_pb2.RequestNotice(request_id=notice.request_id, attempt=notice.attempt)
    match notice.kind:
        case m.TicketRevoked():
            message.revoked.SetInParent()
        case m.RecomputeStarted():
            message.recompute.SetInParent()
        case m.PushFailed(code=code, message=text):
            message.transfer_failed.reason = f"{code}: {text}"
        case m.PromptComputed(num_cached_tokens=count, prompt_logprobs=logprobs):
            message.prompt.num_cached_tokens = count
            message.prompt.prompt_logprobs.extend(logprobs_to_proto(logprobs))
        case _:
            return None
    return message


def started_to_proto(num_cached_tokens: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(num_cached_tokens=num_cached_tokens))


def first_to_proto(deltas: Sequence[ChoiceDelta], logprobs: Sequence[PositionLogprobs]) -> prefill_pb2.PrefillEvent:
    first = prefill_pb2.FirstTokens(
        deltas=[delta_to_proto(delta) for delta in deltas], prompt_logprobs=logprobs_to_proto(logprobs)
    )
    return prefill_pb2.PrefillEvent(first_tokens=first)


def completed_to_proto(end: m.PushCompleted) -> prefill_pb2.PrefillEvent:
    completed = prefill_pb2.PushCompleted(payload_bytes=end.payload_bytes, seconds=end.seconds)
    return prefill_pb2.PrefillEvent(push_completed=completed)


def info_to_proto(info: m.EngineInfo, role: str, version: str) -> pod_pb2.PodInfo:
    return pod_pb2.PodInfo(
        pod_id=info.pod_id,
        epoch=info.epoch,
        role=ROLES[role],
        model=info.model,
        layout=layout_to_proto(info.layout),
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        transport=info.transport,
        version=version,
    )


def status_to_proto(info: m.EngineInfo, stats: m.EngineStats, *, ready: bool, draining: bool) -> pod_pb2.PodStatus:
    return pod_pb2.PodStatus(
        pod_id=info.pod_id,
        epoch=info.epoch,
        ready=ready,
        draining=draining,
        credits=stats.credits,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        waiting_tokens=stats.waiting_tokens,
        free_blocks=stats.free_blocks,
        num_blocks=stats.num_blocks,
    )


def inspection_to_proto(seen: m.Inspection) -> pod_pb2.InspectResponse:
    counters = seen.transfer
    return pod_pb2.InspectResponse(
        violations=seen.violations,
        num_blocks=seen.num_blocks,
        free_blocks=seen.free_blocks,
        cached_blocks=seen.cached_blocks,
        num_requests=seen.num_requests,
        num_reservations=seen.num_reservations,
        num_pushes=seen.num_pushes,
        staging_bytes=seen.staging_bytes,
        num_preemptions=seen.num_preemptions,
        transfer=pod_pb2.TransferCounters(
            **{name: getattr(counters, name) for name in m.TransferCounters.__struct_fields__}
        ),
    )
