"""Requests of a Mooncake-format trace: one a line, with the ids of its prompt's blocks of 512 tokens."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvrelay.common.blocks import SPAN
from kvrelay.common.ids import BlockId, Fingerprint

BLOCK = 512
_SPANS = BLOCK // SPAN
_HALF = _SPANS // 2
_UNUSED = BlockId(b"\xff" * 16)


class Line(msgspec.Struct):
    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


class Request:
    """One request of the trace, or of one of its copies, which share no blocks."""

    __slots__ = ("_ids", "arrival", "blocks", "first_token", "num_cached", "num_output", "num_prompt", "session")

    def __init__(self, line: Line, copy: int, arrival: float) -> None:
        self.arrival = arrival
        """Seconds."""
        self.num_prompt = line.input_length
        self.num_output = line.output_length
        self.blocks = [copy << 40 | number for number in line.hash_ids]
        # All prompts of the trace begin with one block: the second one tells conversations apart.
        self.session = str(self.blocks[:2][-1])
        self.first_token = float("inf")
        self.num_cached = 0
        self._ids: list[BlockId] = []

    def ids(self, fingerprint: Fingerprint) -> Sequence[BlockId]:
        """As `kvrelay.router.policy.Prompt`. Pods of the simulation have blocks of 512 tokens, and half of that is what the
        policy keeps of what it has sent: ids between are never looked at."""
        if not self._ids:
            for block in self.blocks:
                self._ids += [_UNUSED] * (_HALF - 1)
                self._ids.append(BlockId((block << 1).to_bytes(16, "little")))
                self._ids += [_UNUSED] * (_HALF - 1)
                self._ids.append(key_of(block))
        return self._ids

    def forget_ids(self) -> None:
        self._ids = []


def key_of(block: int) -> BlockId:
    return BlockId((block << 1 | 1).to_bytes(16, "little"))


def read(trace: Path, limit: int | None = None) -> list[Line]:
    lines = msgspec.json.Decoder(Line).decode_lines(trace.read_bytes())
    return sorted(lines[:limit], key=lambda line: line.timestamp)


def requests(lines: Sequence[Line], *, copies: int, rate: float) -> list[Request]:
    """In order of arrival. `rate`: how much faster than recorded; each of several copies starts a little later than the one
    before."""
    shift = _granularity(lines) / copies
    found = [
        Request(line, copy, (line.timestamp + copy * shift) / 1000 / rate) for line in lines for copy in range(copies)
    ]
    found.sort(key=lambda request: request.arrival)
    return found


def _granularity(lines: Sequence[Line]) -> float:
    """Milliseconds between recorded times: traces are rounded."""
    times = sorted({line.timestamp for line in lines})
    return min((b - a for a, b in itertools.pairwise(times)), default=1.0)


def infinite_hit_rate(lines: Sequence[Line]) -> float:
    """Share of prompt tokens that one shared cache without a limit has."""
    seen: set[int] = set()
    hits = 0
    for line in lines:
        held = 0
        for block in line.hash_ids:
            if block not in seen:
                break
            held += 1
        hits += min(held * BLOCK, line.input_length - 1)
        seen.update(line.hash_ids)
    return hits / sum(line.input_length for line in lines)
