"""Attention of single tokens on paged KV.

The work of a step is one line of tiles: of each sequence each KV head's, in order. A fixed number of programs share it
evenly, each a stretch (Stream-K: Osama et al. 2023), so the grid depends on no length. Where a KV head's tiles fall to several
programs, each leaves what it has, and the one that finishes last merges them all in order: the result does not depend on which
one that was.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from kvrelay.kernels.triton.early import begin as begin_early
from kvrelay.kernels.triton.early import early
from kvrelay.kernels.triton.softmax import LOWEST, absorb, raw_scores, slots_of

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 64


@triton.jit
def _tiles_of(length, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Of a sequence, those that hold what is attended to."""
    tiles = tl.cdiv(length, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    return tiles


@triton.jit(do_not_specialize=["num_seqs"])
def _plan(
    lens, stretches, num_seqs, HKV: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, LEAST: tl.constexpr,
    SEQS: tl.constexpr,
):  # fmt: skip
    """A row of `stretches` [programs, 8] for each program: all that it needs to begin, so that it waits for loads once."""
    program = tl.program_id(0)
    rows = tl.arange(0, SEQS)
    length = tl.load(lens + rows, mask=rows < num_seqs, other=0)
    tiles = _tiles_of(length, TILE, WINDOW)
    ends = tl.cumsum(tiles, 0)
    all_tiles = tl.sum(tiles, 0) * HKV
    share = tl.maximum(tl.cdiv(all_tiles, tl.num_programs(0)), LEAST)
    begin = program * share
    seq = tl.sum((ends * HKV <= begin).to(tl.int32), 0)
    own = rows == seq
    tiles_of_own = tl.sum(tl.where(own, tiles, 0), 0)
    within = begin - tl.sum(tl.where(own, ends - tiles, 0), 0) * HKV
    head = within // tl.maximum(tiles_of_own, 1)
    row = stretches + program * 8
    tl.store(row, seq)
    tl.store(row + 1, head)
    tl.store(row + 2, within - head * tiles_of_own)
    tl.store(row + 3, tl.maximum(tl.minimum(share, all_tiles - begin), 0))
    tl.store(row + 4, share)
    tl.store(row + 5, tl.sum(tl.where(own, length, 0), 0))
    tl.store(row + 6, tl.sum(((rows < num_seqs) & (length == 0)).to(tl.int32), 0))


@triton.jit
def _merge(weighed, partial, first, pieces, rows, dims, GROUP: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr):
    """What the programs from `first` on have left of one KV head: its output [rows, D]."""
    highest = tl.full([rows.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], D], tl.float32)
    for begin in range(0, pieces, PIECES):
        piece = begin + tl.arange(0, PIECES)
        # A program's second place is for a head that begins in it, its first for one that began earlier.
        place = 2 * (first + piece) + (piece == 0)
        # Pieces are the middle axis: it is the one that is not split between warps.
        at = place[None, :] * GROUP + rows[:, None] % GROUP
        mask = (piece < pieces)[None, :]
        # Past the first-level cache, which may hold what lay here before.
        weights = tl.load(weighed + at, mask=mask, other=LOWEST, cache_modifier=".cg")
        values = tl.load(
            partial + at[:, :, None] * D + dims[None, None, :], mask=mask[:, :, None], other=0, cache_modifier=".cg"
        )
        higher = tl.maximum(highest, tl.max(weights, 1))
        weights = tl.exp2(weights - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.sum(values * weights[:, :, None], 1)
        highest = higher
    return acc / total[:, None]


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _decode(
    q, keys, values, tables, lens, out, stretches, weighed, partial, arrivals, num_seqs, q_stride, out_stride, table_stride,
    scale, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr, PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        begin_early()
    program = tl.program_id(0)
    row = stretches + program * 8
    seq = tl.load(row)
    head = tl.load(row + 1)
    at = tl.load(row + 2)
    left = tl.load(row + 3)
    share = tl.load(row + 4)
    length = tl.load(row + 5)
    empties = tl.load(row + 6)
    begin = program * share
    rows = tl.arange(0, ROWS)
    merged = tl.arange(0, MERGED)
    dims = tl.arange(0, D)

    while left > 0:
        tiles = _tiles_of(length, TILE, WINDOW)
        count = tl.minimum(left, tiles - at)
        if count > 0:
            oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
            token = (oldest // TILE + at) * TILE + tl.arange(0, TILE)
            table = tables + seq * table_stride
            slots = slots_of(table, token, length - 1, BLOCK_SIZE)
            heads = head * GROUP + rows
            query = tl.load(
                q + seq * q_stride + heads[:, None] * D + dims[None, :], mask=(rows < GROUP)[:, None], other=0
            )
            highest = tl.full([ROWS], LOWEST, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, D], tl.float32)
            for _ in range(count):
                places = (slots.to(tl.int64) * HKV + head)[:, None] * D + dims[None, :]
                k = tl.load(keys + places)
                v = tl.load(values + places)
                # A tile ahead, so that KV is not waited for twice.
                slots = slots_of(table, token + TILE, length - 1, BLOCK_SIZE)
                raw, factor = raw_scores(query, k, scale, SOFTCAP)
                raw = tl.where(((token >= oldest) & (token < length))[None, :], raw, float("-inf"))
                highest, total, acc = absorb(highest, total, acc, raw, factor, v)
                token += TILE

            mean = acc / total[:, None]
            out_row = out + seq * out_stride + head * GROUP * D
            if count == tiles:
                tl.store(
                    out_row + rows[:, None] * D + dims[None, :],
                    mean.to(out.dtype.element_ty),
                    mask=(rows < GROUP)[:, None],
                )
            else:
                place = (2 * program + (at == 0)) * GROUP + rows
                tl.store(weighed + place, highest + tl.log2(total), mask=rows < GROUP)
                tl.store(partial + place[:, None] * D + dims[None, :], mean, mask=(rows < GROUP)[:, None])
                first = (begin - at) // share
                pieces = (begin - at + tiles - 1) // share - first + 1
                # All threads' stores come before the one thread's count.
                tl.debug_barrier()
                if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == pieces - 1:
                    tl.store(arrivals + first, 0)
                    whole = _merge(weighed, partial, first, pieces, merged, dims, GROUP, D, PIECES)
                    tl.store(
                        out_row + merged[:, None] * D + dims[None, :],
                        whole.to(out.dtype.element_ty),
                        mask=(merged < GROUP)[:, None],
                    )
        left -= count
        begin += count
        at = 0
        head += 1
        if (head == HKV) | (tiles == 0):
            head = 0
            seq += 1
            length = tl.load(lens + seq, mask=seq < num_seqs, other=0)

    if empties > 0:
        # From the last program on, which has no tiles where there is little to do.
        width = tl.arange(0, triton.next_power_of_2(HKV * GROUP * D))
        for none in range(tl.num_programs(0) - 1 - program, num_seqs, tl.num_programs(0)):
            empty = (tl.load(lens + none) == 0) & (width < HKV * GROUP * D)
            tl.store(out + none * out_stride + width, tl.zeros_like(width).to(out.dtype.element_ty), mask=empty)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and launched."""

    tile: int
    """Tokens a program takes at a time; a power of two, 16 or more."""
    warps: int
    stages: int
    """Tiles in work: one is computed on, the others are on their way."""
    programs: int
    """For each multiprocessor."""
    least: int = 1
    """Tiles of a program, where there are few."""


def decode_config(head_dim: int, group: int, dtype: torch.dtype) -> DecodeConfig:
    """What was fastest on an H200, of what fits: all programs have to run at once."""
    if dtype is torch.float32:
        return DecodeConfig(tile=16, warps=4, stages=2, programs=2)
    wide = group > 32
    if head_dim == 256:
        # Queries of 32 heads lie in the shared memory as well.
        stages = 3 if group > 16 and not wide else 4
        return DecodeConfig(tile=32, warps=8 if wide else 4, stages=stages, programs=1 if wide else 2)
    programs = 4 if head_dim == 64 or group <= 16 else 2 if wide else 3
    return DecodeConfig(tile=32, warps=4, stages=4, programs=programs, least=2)


class PagedDecode:
    """The kernel for one shape of heads, with its workspace: one step at a time, on one stream.

    Capturable in a CUDA graph: what is launched depends on the number of sequences alone.
    """

    def __init__(
        self,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        config: DecodeConfig | None = None,
    ) -> None:
        """`window`: the last tokens that are attended to, the query's own with them; `scale` of scores, D^-½ if not given.

        Raises ValueError for shapes that there is no kernel for.
        """
        self.group = check_heads(num_heads, num_kv_heads, head_dim)
        self.num_kv_heads, self.head_dim, self.block_size = num_kv_heads, head_dim, block_size
        self.max_seqs, self.dtype = max_seqs, dtype
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window, self.softcap = window or 0, softcap or 0.0
        self.config = config or decode_config(head_dim, self.group, dtype)
        device = torch.device(device)
        # Without a GPU the interpreter runs programs one after the other, and a few show as much as many.
        units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        self.programs = units * self.config.programs
        self._stretches = torch.zeros(self.programs, 8, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(self.programs, dtype=torch.int32, device=device)
        self._weighed = torch.empty(self.programs, 2, self.group, dtype=torch.float32, device=device)
        self._partial = torch.empty(self.programs, 2, self.group, head_dim, dtype=torch.float32, device=device)

    def plan(self, lens: torch.Tensor) -> None:
        """Shares out a step's work: once for all its layers. `lens` int32 [S], a sequence's tokens, the new one with them; 0
        for a row that stands for none."""
        if lens.shape[0] > self.max_seqs:
            raise ValueError(f"{lens.shape[0]} sequences are more than {self.max_seqs}")
        _plan[(self.programs,)](
            lens, self._stretches, lens.shape[0],
            HKV=self.num_kv_heads, TILE=self.config.tile, WINDOW=self.window, LEAST=self.config.least,
            SEQS=triton.next_power_of_2(self.max_seqs),
        )  # fmt: skip

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        lens: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`q` [S, Hq, D], of which a sequence's heads are contiguous, on the `lens` that were planned; cached `keys` and
        `values` [slots, Hkv, D], `block_tables` int32 [S, …]. Into `out` [S, Hq, D]: zeros where a length is 0."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        rows = max(16, triton.next_power_of_2(self.group))
        merged = triton.next_power_of_2(self.group)
        _decode[(self.programs,)](
            q, keys, values, block_tables, lens, out,
            self._stretches, self._weighed, self._partial, self._arrivals,
            q.shape[0], q.stride(0), out.stride(0), block_tables.stride(0), self.scale,
            HKV=self.num_kv_heads, GROUP=self.group, D=self.head_dim, BLOCK_SIZE=self.block_size, TILE=self.config.tile,
            WINDOW=self.window, SOFTCAP=self.softcap, ROWS=rows, MERGED=merged,
            PIECES=max(1, 4096 // (merged * self.head_dim)),
            num_warps=self.config.warps, num_stages=self.config.stages, **early(q),
        )  # fmt: skip
        return out


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """How many query heads share a KV head. Raises ValueError where the kernels do not serve that."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"no attention kernel for heads of {head_dim}: they must be one of {', '.join(map(str, HEAD_DIMS))}"
        )
    group, rest = divmod(num_heads, num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"no attention kernel for {num_heads} query heads on {num_kv_heads} KV heads")
    return group
