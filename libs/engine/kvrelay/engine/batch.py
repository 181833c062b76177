"""What one step computes, and what comes of it: the contract between scheduler, model runner and sampler."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvrelay.common.request import PositionLogprobs
from kvrelay.engine.sequence import Sequence

LayerHook = Callable[[int], None]
"""Called by the runner's thread with a layer's number when the batch's KV of that layer lies in the cache."""


def no_hook(layer: int) -> None:
    pass


NO_TOKEN = -1
"""In place of one whose logits were not finite."""


class Scheduled(msgspec.Struct, eq=False, gc=False):
    """A sequence's part of a step: `tokens[start : start + num_tokens]`. A struct, as each step makes one a sequence.

    The last of them may be one that the step before samples: it is not in `seq.tokens` when the step is launched.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: int
    """How many tokens are drawn for the position `end`: none where more are known, else one, or one a choice where the
    choices part, the first for `seq.choice`."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclasses.dataclass(slots=True)
class Batch:
    """Never empty. `copies` (source block, target block) are done before anything is computed; parts of one token come
    first, so that attention may treat them apart."""

    number: int
    parts: list[Scheduled]
    copies: list[tuple[int, int]]
    num_tokens: int
    """Of all the parts."""

    def take_off(self) -> None:
        """The step is in flight."""
        for part in self.parts:
            seq = part.seq
            seq.num_ahead += part.num_tokens
            if part.samples:
                seq.num_unknown += 1

    def land(self) -> None:
        for part in self.parts:
            seq = part.seq
            seq.num_ahead -= part.num_tokens
            if part.samples:
                seq.num_unknown -= 1


@dataclasses.dataclass(slots=True)
class StepResult:
    """`tokens`: for each part in the batch's order, as many as it samples; NO_TOKEN where the logits were not finite.
    `logprobs`: of those of `tokens`, by their index, for which they were asked. `prompt_logprobs`: by sequence, for the
    prompt tokens after each computed position (position p gives the log-probability of prompt token p + 1)."""

    tokens: list[int]
    logprobs: dict[int, PositionLogprobs] = dataclasses.field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[PositionLogprobs]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Running(Protocol):
    """A step that was launched."""

    @property
    def done(self) -> bool:
        """`result` need not wait."""
        ...

    def result(self) -> StepResult:
        """Waits for it. Once. Raises what the step failed with."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """A step that was computed when it was launched."""

    step: StepResult
    done: bool = True

    def result(self) -> StepResult:
        return self.step
