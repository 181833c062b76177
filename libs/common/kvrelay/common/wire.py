"""Core types to protobuf and back: with the gRPC services at the edge, the only place that knows both.

`*_to_proto` take validated values. `*_from_proto` take whatever came over the wire: what no core type can hold raises
InvalidRequest, whose `param` names the field; ranges that depend on the model are checked by `SamplingParams.validate`.
An unset optional field keeps the core type's default.
"""

from collections.abc import Iterable

from kvrelay.common.errors import InvalidRequest, Unsupported
from kvrelay.common.ids import Epoch, Fingerprint, PodId, RequestId
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from kvrelay.common.request import (
    DEFAULT_TIMEOUT_MS,
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
from kvrelay.v1 import types_pb2 as pb

_OPTIONAL = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)
_FINISH: dict[FinishReason | None, pb.FinishReason.ValueType] = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}
_KIND = {
    KvGroupKind.FULL: pb.KV_GROUP_KIND_FULL,
    KvGroupKind.SLIDING: pb.KV_GROUP_KIND_SLIDING,
    KvGroupKind.MLA: pb.KV_GROUP_KIND_MLA,
    KvGroupKind.STATE: pb.KV_GROUP_KIND_STATE,
    KvGroupKind.DRAFT: pb.KV_GROUP_KIND_DRAFT,
}
_KIND_BACK = {value: kind for kind, value in _KIND.items()}
_DTYPES = frozenset(dtype.value for dtype in KvDtype)


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return _FINISH[reason]


def finish_from_proto(value: pb.FinishReason.ValueType) -> FinishReason | None:
    if value not in _FINISH_BACK:
        raise InvalidRequest(f"finish_reason {value} is unknown", "finish_reason")
    return _FINISH_BACK[value]


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    """Every field is set that has a value, defaults as well: both ends need not agree on defaults."""
    message = pb.SamplingParams(
        logit_bias=sampling.logit_bias,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        ignore_eos=sampling.ignore_eos,
    )
    for name in _OPTIONAL:
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    return SamplingParams(
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        include_stop_str_in_output=message.include_stop_str_in_output,
        ignore_eos=message.ignore_eos,
        **given,
    )


def resumed_to_proto(resumed: ResumedChoice) -> pb.ResumedChoice:
    return pb.ResumedChoice(choice=resumed.choice, token_ids=resumed.token_ids, finished=resumed.finished)


def resumed_from_proto(message: pb.ResumedChoice) -> ResumedChoice:
    return ResumedChoice(choice=message.choice, token_ids=tuple(message.token_ids), finished=message.finished)


def request_to_proto(request: EngineRequest) -> pb.EngineRequest:
    return pb.EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling_to_proto(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_ms=max(1, request.timeout_ms),  # 0 would read as unset
        resume=[resumed_to_proto(resumed) for resumed in request.resume],
    )


def request_from_proto(message: pb.EngineRequest) -> EngineRequest:
    """Raises InvalidRequest, and Unsupported for a LoRA."""
    if not message.request_id:
        raise InvalidRequest("request_id is empty", "request_id")
    if message.lora:
        raise Unsupported("lora is not supported", "lora")
    return EngineRequest(
        request_id=RequestId(message.request_id),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        priority=message.priority,
        cache_salt=message.cache_salt,
        timeout_ms=message.timeout_ms or DEFAULT_TIMEOUT_MS,
        resume=tuple(resumed_from_proto(resumed) for resumed in message.resume),
    )


def _token_to_proto(entry: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)


def _token_from_proto(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=message.token_id, logprob=message.logprob, rank=message.rank)


def logprobs_to_proto(positions: Iterable[PositionLogprobs]) -> list[pb.PositionLogprobs]:
    return [
        pb.PositionLogprobs(chosen=_token_to_proto(at.chosen), top=[_token_to_proto(entry) for entry in at.top])
        for at in positions
    ]


def logprobs_from_proto(messages: Iterable[pb.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(chosen=_token_from_proto(at.chosen), top=tuple(_token_from_proto(entry) for entry in at.top))
        for at in messages
    )


def delta_to_proto(delta: ChoiceDelta) -> pb.ChoiceDelta:
    return pb.ChoiceDelta(
        request_id=delta.request_id,
        choice=delta.choice,
        index=delta.index,
        token_ids=delta.token_ids,
        logprobs=logprobs_to_proto(delta.logprobs),
        finish_reason=_FINISH[delta.finish_reason],
        stop_token_id=delta.stop_token_id,
        error=delta.error,
        attempt=delta.attempt,
    )


def delta_from_proto(message: pb.ChoiceDelta) -> ChoiceDelta:
    logprobs = message.logprobs
    if logprobs and len(logprobs) != len(message.token_ids):
        raise InvalidRequest("logprobs are not as many as token_ids", "logprobs")
    return ChoiceDelta(
        request_id=RequestId(message.request_id),
        choice=message.choice,
        index=message.index,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs_from_proto(logprobs) if logprobs else (),
        finish_reason=finish_from_proto(message.finish_reason),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        error=message.error,
        attempt=message.attempt,
    )


def _group_to_proto(group: KvGroup) -> pb.KvGroup:
    return pb.KvGroup(
        kind=_KIND[group.kind],
        layers=group.layers,
        block_size=group.block_size,
        dtype=group.dtype.value,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        sliding_window=group.sliding_window,
        first_head=group.first_head,
        shard_heads=group.shard_heads,
    )


def _group_from_proto(message: pb.KvGroup) -> KvGroup:
    if message.kind not in _KIND_BACK:
        raise InvalidRequest(f"KV group kind {message.kind} is unknown", "layout.groups.kind")
    if message.dtype not in _DTYPES:
        raise InvalidRequest(f"KV dtype {message.dtype!r} is unknown", "layout.groups.dtype")
    try:
        return KvGroup(
            kind=_KIND_BACK[message.kind],
            layers=tuple(message.layers),
            block_size=message.block_size,
            dtype=KvDtype(message.dtype),
            num_kv_heads=message.num_kv_heads,
            head_dim=message.head_dim,
            sliding_window=message.sliding_window,
            first_head=message.first_head,
            shard_heads=message.shard_heads,
        )
    except ValueError as error:
        raise InvalidRequest(str(error), "layout.groups") from error


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    return pb.KvLayout(
        fingerprint=layout.fingerprint,
        groups=[_group_to_proto(group) for group in layout.groups],
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        pp_rank=layout.pp_rank,
        pp_size=layout.pp_size,
        dp_rank=layout.dp_rank,
        dp_size=layout.dp_size,
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    return KvLayout(
        fingerprint=Fingerprint(message.fingerprint),
        groups=tuple(_group_from_proto(group) for group in message.groups),
        tp_rank=message.tp_rank,
        tp_size=message.tp_size,
        pp_rank=message.pp_rank,
        pp_size=message.pp_size,
        dp_rank=message.dp_rank,
        dp_size=message.dp_size,
    )


def _target_from_proto(message: pb.TicketTarget) -> TicketTarget:
    try:
        return TicketTarget(
            rank=message.rank,
            group=message.group,
            address=message.address,
            ticket_bits=message.ticket_bits,
            first_token=message.first_token,
            end_token=message.end_token,
        )
    except ValueError as error:
        raise InvalidRequest(str(error), "ticket.targets") from error


def ticket_to_proto(ticket: Ticket) -> pb.Ticket:
    targets = (
        pb.TicketTarget(
            rank=target.rank,
            group=target.group,
            address=target.address,
            ticket_bits=target.ticket_bits,
            first_token=target.first_token,
            end_token=target.end_token,
        )
        for target in ticket.targets
    )
    return pb.Ticket(
        request_id=ticket.request_id,
        attempt=ticket.attempt,
        pod_id=ticket.pod_id,
        epoch=ticket.epoch,
        generation=ticket.generation,
        timeout_ms=ticket.timeout_ms,
        targets=targets,
        layout=layout_to_proto(ticket.layout),
    )


def ticket_from_proto(message: pb.Ticket) -> Ticket:
    if not message.request_id:
        raise InvalidRequest("the ticket names no request", "ticket.request_id")
    return Ticket(
        request_id=RequestId(message.request_id),
        attempt=message.attempt,
        pod_id=PodId(message.pod_id),
        epoch=Epoch(message.epoch),
        generation=message.generation,
        timeout_ms=message.timeout_ms,
        targets=tuple(_target_from_proto(target) for target in message.targets),
        layout=layout_from_proto(message.layout),
    )
