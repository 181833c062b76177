"""A step's inputs: numbers gathered on the host, sent in one copy, and made into what kernels read, on the device.

What a sequence keeps from step to step has a row on the device: its block table, the token sampled last, how it is sampled.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.request import SamplingParams
from kvrelay.engine.batch import Scheduled
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.tables import BlockTables
from kvrelay.kernels.ops import SampleParams


class Draw(enum.Enum):
    """What the rows of a step need of the sampler: one is as much as all of them."""

    GREEDY = enum.auto()
    PLAIN = enum.auto()
    """No top-k, no top-p."""
    CUT = enum.auto()

    @classmethod
    def of(cls, sampled: Iterable[SamplingParams]) -> "Draw":
        drawn = [params for params in sampled if params.temperature != 0.0 and params.top_k != 1]
        if not drawn:
            return cls.GREEDY
        return cls.CUT if any(params.top_k > 0 or params.top_p < 1.0 for params in drawn) else cls.PLAIN


UNKNOWN = -1
"""A token that the step before samples."""
NOWHERE = -1
"""The slot of a token that stands for none."""
DECODE_WORDS = 11
"""Of a sequence that computes one token and samples the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """Of a step: tokens `start` to `end` are one sequence's."""

    start: int
    end: int
    context: int
    """Tokens that the last of them attends to, itself included."""

    @property
    def whole(self) -> bool:
        """Nothing comes before them."""
        return self.context == self.end - self.start


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeviceInputs:
    """Of a step of T tokens of S sequences' parts that samples R tokens, on the device."""

    token_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T]"""
    slots: torch.Tensor
    """int64 [T]"""
    query_starts: torch.Tensor
    """int32 [S + 1]"""
    context_lens: torch.Tensor
    """int32 [S]; 0 where a row stands for no sequence."""
    block_tables: torch.Tensor
    """int32 [S, max_blocks]"""
    last: torch.Tensor | None
    """int64 [R]: which of the tokens each sampled one follows; None: each token, in order."""
    feed_rows: torch.Tensor
    """int64 [R]: whose row each sampled token goes to."""
    sampling: SampleParams
    num_decodes: int
    """The first parts have one token each."""
    prompts: tuple[Prompt, ...] | None = ()
    """On the host: the other parts, in order. None in a padded step (see `padded`): they are where `query_starts` has them, from
    entry `num_decodes` on."""


class HostRows:
    """What the host knows of the sequences in rows."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.tables = BlockTables(max_num_seqs, max_blocks)
        self.nobody = max_num_seqs
        """The row of what stands for no sequence."""
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.changes: list[tuple[int, int, int]] = []
        """Row, first block, end: of the tables, not yet on the device."""
        self._floats = np.zeros((3, max_num_seqs + 1), np.float64)
        self._integers = np.zeros((2, max_num_seqs + 1), np.int64)

    def update(self, seqs: list[Sequence]) -> None:
        """The sequences have rows, up to date here."""
        for seq in seqs:
            if seq.num_tabled != len(seq.blocks):
                known = self.tables.update(seq)
                self.changes.append((seq.row, known, len(seq.blocks)))
                if known == 0:
                    self._set_sampling(seq)

    def _set_sampling(self, seq: Sequence) -> None:
        params = seq.request.sampling
        self._floats[:, seq.row] = params.temperature, params.top_p, params.min_p
        seed = (params.seed or 0) & (1 << 64) - 1
        self._integers[:, seq.row] = max(0, params.top_k), seed - (seed >> 63 << 64)

    def take_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in the flat tables, and what."""
        changes, self.changes = self.changes, []
        table, width = self.tables.table, self.max_blocks
        at = [np.arange(row * width + first, row * width + end) for row, first, end in changes]
        values = [table[row, first:end] for row, first, end in changes]
        return np.concatenate(at), np.concatenate(values).astype(np.int64)

    def floats(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """[3, R]: temperature, top_p, min_p."""
        return self._floats[:, rows]

    def integers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[2, R]: top_k, seed."""
        return self._integers[:, rows]


class DeviceRows:
    """What the device keeps of the sequences in rows; the last row is nobody's."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        self.nobody = max_num_seqs
        self.tables = torch.zeros(max_num_seqs + 1, max_blocks, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        """Sampled last."""
        self.starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)


def sampling_words(
    rows: NDArray[np.int64], choices: NDArray[np.int64], positions: NDArray[np.int64], host: HostRows
) -> NDArray[np.int64]:
    """[7, R]"""
    return np.concatenate((host.integers(rows), choices[None], positions[None], host.floats(rows).view(np.int64)))


def unpack_sampling(words: torch.Tensor) -> SampleParams:
    top_k, seed, choice, position = words[:4]
    temperature, top_p, min_p = words[4:].view(torch.float64).to(torch.float32)
    return SampleParams(temperature, top_k.to(torch.int32), top_p, min_p, seed, choice.to(torch.int32), position)


def step_words(parts: list[Scheduled], rows: NDArray[np.int64], host: HostRows) -> list[NDArray[np.int64]]:
    """Of any step. See `unpack_step`."""
    counts = np.fromiter((part.num_tokens for part in parts), np.int64, len(parts))
    starts = np.fromiter((part.start for part in parts), np.int64, len(parts))
    ends = counts.cumsum()
    tokens = [_tokens(part) for part in parts]
    token_ids = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, int(ends[-1]))
    positions = np.arange(len(token_ids)) + np.repeat(starts - ends + counts, counts)
    token_rows = np.repeat(rows, counts)
    blocks = host.tables.table[token_rows, positions // host.block_size].astype(np.int64)
    slots = blocks * host.block_size + positions % host.block_size
    sampled = [
        (end - 1, row, part.seq.choice + branch, part.end, branch)
        for part, row, end in zip(parts, rows.tolist(), ends.tolist(), strict=True)
        for branch in range(part.samples)
    ]
    last, sampled_rows, choices, places, branch = np.array(sampled, np.int64).reshape(-1, 5).T
    # Of choices that part here, only the first goes on in the sequence's row.
    feed_rows = np.where(branch == 0, sampled_rows, host.nobody)
    return [
        np.stack((token_ids, token_rows, positions, slots)),
        np.concatenate(([0], ends)),
        np.stack((starts + counts, rows)),
        np.stack((last, feed_rows)),
        sampling_words(sampled_rows, choices, places, host),
    ]


def _tokens(part: Scheduled) -> list[int]:
    known = part.seq.tokens[part.start : part.end]
    return known if len(known) == part.num_tokens else [*known, UNKNOWN]


def prompts_of(parts: list[Scheduled], num_decodes: int) -> tuple[Prompt, ...]:
    """Of those behind the first `num_decodes`, which have one token each."""
    ends = itertools.accumulate(part.num_tokens for part in parts)
    prompts = (Prompt(end - part.num_tokens, end, part.end) for part, end in zip(parts, ends, strict=True))
    return tuple(itertools.islice(prompts, num_decodes, None))


def unpack_step(
    words: list[torch.Tensor], rows: DeviceRows, num_decodes: int, prompts: tuple[Prompt, ...] | None
) -> DeviceInputs:
    """What `step_words` or `padded_words` gave, on the device. Capturable in a CUDA graph."""
    (tokens, token_rows, positions, slots), query_starts, (lens, seq_rows), (last, feed_rows), sampling = words
    return DeviceInputs(
        token_ids=torch.where(tokens < 0, rows.tokens[token_rows], tokens),
        positions=positions,
        slots=slots,
        query_starts=query_starts.to(torch.int32),
        context_lens=lens.to(torch.int32),
        block_tables=rows.tables[seq_rows],
        last=last,
        feed_rows=feed_rows,
        sampling=unpack_sampling(sampling),
        num_decodes=num_decodes,
        prompts=prompts,
    )


def unpack_decodes(words: torch.Tensor, rows: DeviceRows) -> DeviceInputs:
    """The words of a step of single tokens (see `crew`), [11, S] on the device. Capturable in a CUDA graph."""
    row, positions, tokens, slots = words[:4]
    return DeviceInputs(
        token_ids=torch.where(tokens < 0, rows.tokens[row], tokens),
        positions=positions.clamp(min=0),
        slots=slots,
        query_starts=rows.starts[: len(row) + 1],
        context_lens=(positions + 1).to(torch.int32),
        block_tables=rows.tables[row],
        last=None,
        feed_rows=row,
        sampling=unpack_sampling(words[4:]),
        num_decodes=len(row),
    )
