"""What pods and the router itself tell a running request; read by `kvrelay.router.attempt`."""

from dataclasses import dataclass

from kvrelay.common.errors import Internal, KvrelayError, TransferFailed
from kvrelay.common.request import ChoiceDelta, PositionLogprobs
from kvrelay.common.wire import delta_from_proto, logprobs_from_proto
from kvrelay.router.load import Load
from kvrelay.v1 import decode_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """On the prefill pod."""

    attempt: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The prefill pod sampled them; the decode pod will name them again."""

    attempt: int
    deltas: tuple[ChoiceDelta, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class PushCompleted:
    attempt: int


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    attempt: int
    error: KvrelayError


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """By the decode pod itself."""

    attempt: int
    num_cached_tokens: int
    prompt_logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RecomputeStarted:
    """The decode pod no longer waits for a push."""

    attempt: int


@dataclass(frozen=True, slots=True)
class TicketVoid:
    """Revoked, or its transfer failed: the decode pod keeps what was reserved until the next attempt."""

    attempt: int
    error: KvrelayError


@dataclass(frozen=True, slots=True)
class PodLost:
    pod: Load
    error: KvrelayError


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The deadline passed, or the client asked for an end."""

    error: KvrelayError


OfAttempt = (
    PrefillStarted | FirstTokens | PushCompleted | PrefillFailed | PromptComputed | RecomputeStarted | TicketVoid
)
News = ChoiceDelta | OfAttempt | PodLost | Interrupted


def from_prefill(event: prefill_pb2.PrefillEvent, attempt: int) -> OfAttempt:
    """Raises InvalidRequest, or Internal, for what no prefill pod of this version says."""
    match event.WhichOneof("event"):
        case "started":
            return PrefillStarted(attempt, event.started.num_cached_tokens)
        case "first_tokens":
            deltas = tuple(delta_from_proto(delta) for delta in event.first_tokens.deltas)
            return FirstTokens(attempt, deltas, logprobs_from_proto(event.first_tokens.prompt_logprobs))
        case "push_completed":
            return PushCompleted(attempt)
        case other:
            raise Internal(f"a prefill pod said {other}")


def from_notice(notice: decode_pb2.RequestNotice) -> OfAttempt:
    """Raises InvalidRequest, or Internal, for what no decode pod of this version says."""
    attempt = notice.attempt
    match notice.WhichOneof("notice"):
        case "prompt":
            prompt = notice.prompt
            return PromptComputed(attempt, prompt.num_cached_tokens, logprobs_from_proto(prompt.prompt_logprobs))
        case "recompute":
            return RecomputeStarted(attempt)
        case "revoked":
            return TicketVoid(attempt, TransferFailed("the decode pod took the reservation back"))
        case "transfer_failed":
            return TicketVoid(attempt, TransferFailed(notice.transfer_failed.reason))
        case other:
            raise Internal(f"a decode pod said {other}")
