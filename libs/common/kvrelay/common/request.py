"""The core types of a request, as the engine, the transfer and the services know them. Protobuf appears only in `wire`."""

import enum
import math

import msgspec

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.ids import Epoch, PodId, RequestId
from kvrelay.common.layout import KvLayout

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 256
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIAS = 1024
DEFAULT_TIMEOUT_MS = 600_000


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen; names, ranges and defaults as in vLLM. `validate` says what is out of range.

    `max_tokens` None means: what is left of the model's length. `top_k` 0 (or -1) means all. `logprobs` k asks for the
    chosen token's log-probability and the k most likely. Log-probabilities are those of the raw logits, before
    temperature, penalties and truncation.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest, whose `param` names the first field that is out of range."""
        _between("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not be over max_tokens", "min_tokens")
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be over 0", "top_p")
        _between("top_k", self.top_k, -1, 2**31 - 1)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty must be over 0", "repetition_penalty")
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias has over {MAX_LOGIT_BIAS} entries", "logit_bias")
        for token, bias in self.logit_bias.items():
            _token("logit_bias", token, vocab_size)
            _between("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _between("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None:
                _between(name, count, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has over {MAX_STOP_STRINGS} strings", "stop")
        for text in self.stop:
            if not text:
                raise InvalidRequest("stop has an empty string", "stop")
            if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                raise InvalidRequest(f"stop has a string of over {MAX_STOP_BYTES} bytes", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(f"stop_token_ids has over {MAX_STOP_TOKENS} entries", "stop_token_ids")
        for token in self.stop_token_ids:
            _token("stop_token_ids", token, vocab_size)


def _between(name: str, value: float, low: float, high: float) -> None:
    if math.isnan(value) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}", name)


def _token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(f"{name} has token id {token}, outside the vocabulary of {vocab_size}", name)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int
    """1 is the most likely."""


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consecutive tokens of one choice, the first at `index` of the choice's output.

    A token that ended the choice (end of sequence, a stop token) is among `token_ids`, last; `stop_token_id` names it, and
    the text of the choice leaves it out.
    """

    request_id: RequestId
    choice: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str = ""
    """With FinishReason.ERROR: `code: message`."""
    attempt: int = 0
    """Of the request: on one pod, tokens of an old attempt must not pass for those of the next. 0: it has no attempts."""


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a choice that a client already has: forced when the request is tried again."""

    choice: int
    token_ids: tuple[int, ...]
    finished: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request as engines see it: token ids and sampling, validated already. `sampling.seed` is set."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower is sooner; equal ones in order of arrival."""
    cache_salt: str = ""
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    """What remains of the deadline, on arrival."""
    resume: tuple[ResumedChoice, ...] = ()
    traced: bool = False
    """The engine is to say when it did what; no pod says so to another."""


class TicketTarget(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    group: int
    address: bytes
    ticket_bits: int
    """40 random bits: the upper part of each tag."""
    first_token: int
    end_token: int

    def __post_init__(self) -> None:
        if not 0 <= self.ticket_bits < 1 << 40:
            raise ValueError("ticket_bits has over 40 bits")
        if not 0 <= self.first_token <= self.end_token:
            raise ValueError("the token range is empty or negative")


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to push one request's KV to a decode pod, until its deadline or until its generation moves on.

    Granted by the decode pod's engine, which owns the blocks; the holder only names them by token range.
    """

    request_id: RequestId
    attempt: int
    pod_id: PodId
    epoch: Epoch
    generation: int
    timeout_ms: int
    targets: tuple[TicketTarget, ...]
    layout: KvLayout
