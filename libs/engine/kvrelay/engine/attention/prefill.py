"""Which kernel attends to which of a step's prompts: whole ones on keys and values as they are at hand, others in the cache."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvrelay.engine.gpu.inputs import DeviceInputs, Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """Of one layer, for a step of T tokens, whose keys and values are in the cache already."""

    q: torch.Tensor
    """[≥ T, Hq, D]; behind the tokens' rows there may be anything."""
    at_hand: torch.Tensor | None
    """[2, T, Hkv, D]: the tokens' keys and values once more, where a part asks for them."""
    keys: torch.Tensor
    """[slots, Hkv, D]"""
    values: torch.Tensor
    """[slots, Hkv, D]"""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Of prompts one after the other."""

    first: int
    """The first of them, among all of the step."""
    prompts: tuple[Prompt, ...]
    whole: bool
    """Nothing comes before any of them."""

    @property
    def tokens(self) -> slice:
        """Of the step's."""
        return slice(self.prompts[0].start, self.prompts[-1].end)


def divide(prompts: Sequence[Prompt], from_tokens: float) -> list[Run]:
    """In turn, runs of whole ones of at least `from_tokens`, and of all others."""

    def taken(prompt: Prompt) -> bool:
        return prompt.whole and prompt.end - prompt.start >= from_tokens

    runs, first = [], 0
    for whole, run in itertools.groupby(prompts, taken):
        runs.append(Run(first, tuple(run), whole))
        first += len(runs[-1].prompts)
    return runs


class Part(Protocol):
    """What attends to a run's prompts in one step."""

    tokens: slice
    """The run's."""
    rows: int
    """The first row of the queries that it does not read, at least the tokens' end."""
    at_hand: bool
    """Whether it takes keys and values from there."""

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        """The run's tokens mixed, [T', Hq, D]: `out` or, where that saves a copy, a tensor that lay elsewhere."""
        ...


class Pages:
    """Of a run, what kernels on the device read; the base of most parts."""

    at_hand = False

    def __init__(self, inputs: DeviceInputs, run: Run) -> None:
        first = inputs.num_decodes + run.first
        end = first + len(run.prompts)
        self.tokens = run.tokens
        self.rows = run.tokens.stop
        self.tables = inputs.block_tables[first:end]
        """int32 [S', max_blocks]"""
        self.starts = inputs.query_starts[first : end + 1] - run.tokens.start
        """int32 [S' + 1], from 0 on."""
        self.lens = inputs.context_lens[first:end]
        """int32 [S']"""


MakePart = Callable[[DeviceInputs, Run], Part]
"""Once a step, for a run of it. Does not wait for the device."""


class Prefill:
    def __init__(
        self, name: str, pages: MakePart, whole: MakePart | None = None, from_tokens: float = math.inf
    ) -> None:
        """Whole prompts of at least `from_tokens` by `whole`, all else by `pages`."""
        self.name = name
        self._pages = pages
        self._whole = whole
        self._from_tokens = from_tokens if whole is not None else math.inf

    def plan(self, inputs: DeviceInputs) -> list[Part]:
        """Of a step that is not padded."""
        assert inputs.prompts is not None
        return [
            self._whole(inputs, run) if run.whole and self._whole is not None else self._pages(inputs, run)
            for run in divide(inputs.prompts, self._from_tokens)
        ]


def attend(parts: Sequence[Part], given: Operands, out: torch.Tensor) -> torch.Tensor:
    """All of a step's prompts: `out` [T, Hq, D] with the rows of theirs written, or where one is all there is, what it came to."""
    for part in parts:
        into = out[part.tokens]
        mixed = part.attend(given, into)
        if mixed is into:
            continue
        if len(mixed) == len(out):
            return mixed
        into.copy_(mixed)
    return out
