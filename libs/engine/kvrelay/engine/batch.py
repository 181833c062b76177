"""What one step computes, and what comes of it: the contract between scheduler, model runner and sampler."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

from kvrelay.common.request import PositionLogprobs
from kvrelay.engine.sequence import Sequence

LayerHook = Callable[[int], None]
"""Called by the runner's thread with a layer's number when the batch's KV of that layer lies in the cache."""


def no_hook(layer: int) -> None:
    pass


@dataclasses.dataclass(slots=True)
class Scheduled:
    """A sequence's part of a step: `tokens[start : start + num_tokens]`.

    The last of them may be one that the step before samples: it is not in `seq.tokens` when the step is launched.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool = dataclasses.field(init=False)
    """The part reaches the end of the tokens: the next one, at `end`, is sampled."""

    def __post_init__(self) -> None:
        seq = self.seq
        self.samples = self.start + self.num_tokens == len(seq.tokens) + seq.num_unknown

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def take_off(self) -> None:
        """The step is in flight."""
        self.seq.num_ahead += self.num_tokens
        self.seq.num_unknown += self.samples

    def land(self) -> None:
        self.seq.num_ahead -= self.num_tokens
        self.seq.num_unknown -= self.samples


@dataclasses.dataclass(slots=True)
class Batch:
    """Never empty. `copies` (source block, target block) are done before anything is computed; parts of one token come
    first, so that attention may treat them apart."""

    number: int
    parts: list[Scheduled]
    copies: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@dataclasses.dataclass(slots=True)
class Sample:
    """The token drawn for one choice, at the position after the part that it belongs to."""

    seq: Sequence
    choice: int
    token: int
    logprobs: PositionLogprobs | None = None


@dataclasses.dataclass(slots=True)
class StepResult:
    """`samples`: for each part that samples, in the batch's order, one a choice (`num_branches` of them while a sequence
    has no output yet and is to branch). `prompt_logprobs`: by sequence, for the prompt tokens after each computed
    position (position p gives the log-probability of prompt token p + 1)."""

    samples: list[Sample]
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
