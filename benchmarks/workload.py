"""The load that every subject gets, and what is measured of it."""

import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`clients` callers, each of which asks again as soon as it has its answer, until `prompts` are used up."""

    model: str
    dtype: str
    threads: int
    clients: int
    output_tokens: int
    prompts: tuple[tuple[int, ...], ...]
    warmup: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(map(len, self.prompts)) + self.output_tokens


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds; `gaps` between one arrival of tokens and the next."""

    ttft: float
    latency: float
    gaps: tuple[float, ...]
    tokens: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    records: tuple[Record, ...]
    serving_cpu_seconds: float | None = None
    """Of the processor, by router, fronts, Redis and clients: what a stack costs beside its engines."""


@dataclass(frozen=True)
class Shape:
    prompt_tokens: int
    output_tokens: int
    clients: int
    requests: int


def make_workload(model: Path, dtype: str, threads: int, shape: Shape, seed: int) -> Workload:
    """Distinct prompts of whole ASCII words, as token ids: the same for every subject, no shared prefix.

    Raises ValueError for a tokenizer without enough such words.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = sorted(
        id
        for text, id in tokenizer.get_vocab().items()
        if text[:1] == "Ġ" and text[1:].isascii() and text[1:].isalpha()
    )
    if len(words) < 100:
        raise ValueError(f"the tokenizer of {model} has no words to make prompts of")
    draw = random.Random(seed)

    def prompts(count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(draw.choices(words, k=shape.prompt_tokens)) for _ in range(count))

    return Workload(
        model=str(model),
        dtype=dtype,
        threads=threads,
        clients=shape.clients,
        output_tokens=shape.output_tokens,
        prompts=prompts(shape.requests),
        warmup=prompts(shape.clients),
    )


def record_of(sent: float, arrivals: list[float], tokens: int) -> Record:
    gaps = tuple(b - a for a, b in itertools.pairwise(arrivals))
    return Record(ttft=arrivals[0] - sent, latency=arrivals[-1] - sent, gaps=gaps, tokens=tokens)
