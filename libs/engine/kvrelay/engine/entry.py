"""A request inside the engine: which sequences work on it, what was collected for it, and where its choices begin and end."""

import dataclasses
import time

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.request import ChoiceDelta, EngineRequest, FinishReason, PositionLogprobs
from kvrelay.engine.sequence import Sequence, State


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """`sequences` are those not finished; the first is the one that computes the prompt for the request's answer."""

    request: EngineRequest
    attempt: int
    deadline: float
    """On the monotonic clock."""
    order: int
    limits: "Limits"
    generation: int = 0
    """Of its reservation; what names another one is stale. 0: it never was one."""
    reserved: bool = False
    """Came by `reserve`: its later attempts have numbers."""
    sequences: list[Sequence] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = dataclasses.field(default_factory=list)
    aborted: set[int] = dataclasses.field(default_factory=set)
    """Choices that no one waits for, whether they have a sequence of their own already or not."""
    announced: bool = False
    """The first chunk was in a step."""
    prompt_computed: bool = False
    pushing: bool = False
    """Prefill side, from the first call on until `push_done`: a push may read the blocks."""

    @property
    def lead(self) -> Sequence:
        return self.sequences[0]

    @property
    def is_reservation(self) -> bool:
        """Granted, and neither filled nor recomputed."""
        return self.reserved and bool(self.sequences) and self.sequences[0].state is State.RESERVED

    def sequence(self, choice: int, output: tuple[int, ...], num_branches: int = 1) -> Sequence:
        prompt = self.request.prompt_token_ids
        return Sequence(
            self.request,
            choice,
            [*prompt, *output],
            len(prompt),
            self.order,
            num_branches=num_branches,
            stop_ids=self.limits.stop_ids(self.request),
            max_length=self.limits.max_length(self.request),
            deadline=self.deadline,
        )

    def renew(self, request: EngineRequest, attempt: int) -> None:
        """A reservation that a higher attempt takes over: the same prompt, what was delivered so far, another deadline."""
        self.request, self.attempt = request, attempt
        self.deadline = time.monotonic() + request.timeout_ms / 1000.0
        self.lead.request, self.lead.deadline = request, self.deadline
        self.lead.stop_ids, self.lead.max_length = self.limits.stop_ids(request), self.limits.max_length(request)
        self.aborted.clear()  # what `resume` does not call finished is waited for

    def collect(self, start: int, logprobs: list[PositionLogprobs]) -> None:
        """Prompt logprobs of the tokens after positions `start` …; a prompt that is computed again says them again."""
        if start <= len(self.prompt_logprobs):
            self.prompt_logprobs[start:] = logprobs

    def whole_prompt_logprobs(self) -> tuple[PositionLogprobs, ...]:
        """Of the prompt's second token and all that follow; empty where they were not asked for, or given before."""
        complete = len(self.prompt_logprobs) == len(self.request.prompt_token_ids) - 1
        return tuple(self.prompt_logprobs) if complete else ()


def delivered(request: EngineRequest) -> dict[int, tuple[int, ...]]:
    """The tokens to force, for each choice that is not finished; its sampling goes on after them.

    Raises InvalidRequest where `resume` names a choice twice or one that does not exist, or leaves nothing to do.
    """
    begun = {choice.choice: choice for choice in request.resume}
    n = request.sampling.n
    if len(begun) < len(request.resume) or any(not 0 <= choice < n for choice in begun):
        raise InvalidRequest(f"resume must name each choice once, below {n}", "resume")
    rest = {c: begun[c].token_ids if c in begun else () for c in range(n) if c not in begun or not begun[c].finished}
    if not rest:
        raise InvalidRequest("resume leaves no choice to compute", "resume")
    return rest


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """When a choice ends whatever its request says."""

    max_model_len: int
    """Tokens of prompt and output together."""
    eos_token_ids: frozenset[int]

    def stop_ids(self, request: EngineRequest) -> frozenset[int]:
        """The tokens that end a choice."""
        own = request.sampling.stop_token_ids
        return frozenset(own) if request.sampling.ignore_eos else self.eos_token_ids.union(own)

    def max_length(self, request: EngineRequest) -> int:
        """The tokens, with the prompt's, after which a choice ends."""
        most = request.sampling.max_tokens
        return self.max_model_len if most is None else min(self.max_model_len, len(request.prompt_token_ids) + most)

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest where the prompt leaves no room for an output token, or resumed tokens overrun."""
        num_prompt = len(request.prompt_token_ids)
        if not num_prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if num_prompt + 1 > self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens, and with one more it must fit into {self.max_model_len}", "prompt"
            )
        for choice in delivered(request).values():
            if num_prompt + len(choice) > self.max_model_len:
                raise InvalidRequest("resume goes beyond the model's length", "resume")


def ended(entry: Entry, seq: Sequence, reason: FinishReason, stop_token_id: int | None) -> ChoiceDelta:
    """Of a resumed choice whose forced tokens leave nothing to compute."""
    return ChoiceDelta(
        request_id=entry.request.request_id,
        choice=seq.choice,
        index=seq.num_output,
        token_ids=(),
        finish_reason=reason,
        stop_token_id=stop_token_id,
        attempt=entry.attempt,
    )
