"""What a case is: a name, what it shows, and a function that fails or gives figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Figure = int | float | str | Mapping[str, "Figure"] | Sequence["Figure"]
Figures = Mapping[str, Figure]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how hard. The defaults are the full counts."""

    model: Path
    scratch: Path
    """For logs and state of stacks."""
    threads: int = 0
    """Of each engine; 0: the cores, split between a stack's pods."""
    requests: int = 2000
    """In a row, while memory is looked at."""
    repeats: int = 20
    """Of each fault."""
    kills: int = 1000
    """Of a KV store."""
    prompts: int = 0
    """Of the exactness cases, how many at most; 0: all."""


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    run: Callable[[Plan], Figures]
    """Raises whatever shows that the case failed, AssertionError as a rule."""
