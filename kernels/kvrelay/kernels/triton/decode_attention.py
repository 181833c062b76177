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

from kvrelay.kernels.triton.softmax import LOWEST, absorb, raw_scores, slots_of

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 64


@triton.jit(do_not_specialize=["num_seqs"])
def _plan(
    lens, bounds, starts, num_seqs, HKV: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SEQS: tl.constexpr
):
    """`bounds` [S + 1]: a KV head's tiles in the sequences before each; `starts` [programs]: the sequence each one begins in."""
    program = tl.program_id(0)
    rows = tl.arange(0, SEQS)
    length = tl.load(lens + rows, mask=rows < num_seqs, other=0)
    tiles = tl.cdiv(length, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    ends = tl.cumsum(tiles, 0)
    share = tl.cdiv(tl.sum(tiles, 0) * HKV, tl.num_programs(0))
    tl.store(starts + program, tl.sum((ends * HKV <= program * share).to(tl.int32), 0))
    if program == 0:
        tl.store(bounds + rows, ends - tiles, mask=rows < num_seqs)
        tl.store(bounds + num_seqs, tl.sum(tiles, 0))


@triton.jit
def _merge(sums, partial, first, pieces, rows, dims, GROUP: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr):
    """What the programs from `first` on have left of one KV head: its output [rows, D]."""
    highest = tl.full([rows.shape[0]], LOWEST, tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    acc = tl.zeros([rows.shape[0], D], tl.float32)
    for begin in range(0, pieces, PIECES):
        piece = begin + tl.arange(0, PIECES)
        # A program's second place is for a head that begins in it, its first for one that began earlier.
        place = 2 * (first + piece) + (piece == 0)
        at = place[:, None] * GROUP + rows[None, :] % GROUP
        mask = (piece < pieces)[:, None]
        # Past the first-level cache, which may hold what lay here before.
        tops = tl.load(sums + 2 * at, mask=mask, other=LOWEST, cache_modifier=".cg")
        parts = tl.load(sums + 2 * at + 1, mask=mask, other=0, cache_modifier=".cg")
        values = tl.load(
            partial + at[:, :, None] * D + dims[None, None, :], mask=mask[:, :, None], other=0, cache_modifier=".cg"
        )
        higher = tl.maximum(highest, tl.max(tops, 0))
        weights = tl.exp2(tops - higher[None, :])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(parts * weights, 0)
        acc = acc * fade[:, None] + tl.sum(values * weights[:, :, None], 0)
        highest = higher
    return acc / total[:, None]


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _decode(
    q, keys, values, tables, lens, out, bounds, starts, sums, partial, arrivals, num_seqs, q_stride, out_stride, table_stride,
    scale, HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, MERGED: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # Sequences of nothing; from the last program on, which has no tiles where there is little to do.
    width = tl.arange(0, triton.next_power_of_2(HKV * GROUP * D))
    for none in range(programs - 1 - program, num_seqs, programs):
        empty = (tl.load(lens + none) == 0) & (width < HKV * GROUP * D)
        tl.store(out + none * out_stride + width, tl.zeros_like(width).to(out.dtype.element_ty), mask=empty)

    all_tiles = tl.load(bounds + num_seqs) * HKV
    seq = tl.load(starts + program)
    share = tl.cdiv(all_tiles, programs)
    tile = program * share
    end = tl.minimum(tile + share, all_tiles)
    rows = tl.arange(0, ROWS)
    merged = tl.arange(0, MERGED)
    dims = tl.arange(0, D)
    offsets = tl.arange(0, TILE)

    while tile < end:
        before = tl.load(bounds + seq)
        tiles = tl.load(bounds + seq + 1) - before
        length = tl.load(lens + seq)
        head = (tile - before * HKV) // tl.maximum(tiles, 1)
        head_begin = before * HKV + head * tiles
        head_end = head_begin + tiles
        stop = tl.minimum(end, head_end)
        if tiles > 0:
            oldest = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
            token = (oldest // TILE + tile - head_begin) * TILE + offsets
            table = tables + seq * table_stride
            heads = head * GROUP + rows
            query = tl.load(
                q + seq * q_stride + heads[:, None] * D + dims[None, :], mask=(rows < GROUP)[:, None], other=0
            )
            highest = tl.full([ROWS], LOWEST, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, D], tl.float32)
            for _ in range(tile, stop):
                slots = slots_of(table, token, length - 1, BLOCK_SIZE)
                at = (slots * HKV + head)[:, None] * D + dims[None, :]
                k = tl.load(keys + at)
                v = tl.load(values + at)
                raw, factor = raw_scores(query, k, scale, SOFTCAP)
                raw = tl.where(((token >= oldest) & (token < length))[None, :], raw, float("-inf"))
                highest, total, acc = absorb(highest, total, acc, raw, factor, v)
                token += TILE

            out_row = out + seq * out_stride + head * GROUP * D
            if stop - tile == tiles:
                tl.store(
                    out_row + rows[:, None] * D + dims[None, :],
                    (acc / total[:, None]).to(out.dtype.element_ty),
                    mask=(rows < GROUP)[:, None],
                )
            else:
                place = (2 * program + (tile == head_begin)) * GROUP + rows
                tl.store(sums + 2 * place, highest, mask=rows < GROUP)
                tl.store(sums + 2 * place + 1, total, mask=rows < GROUP)
                tl.store(partial + place[:, None] * D + dims[None, :], acc, mask=(rows < GROUP)[:, None])
                first = head_begin // share
                pieces = (head_end - 1) // share - first + 1
                # All threads' stores come before the one thread's count.
                tl.debug_barrier()
                if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == pieces - 1:
                    tl.store(arrivals + first, 0)
                    result = _merge(sums, partial, first, pieces, merged, dims, GROUP, D, PIECES)
                    tl.store(
                        out_row + merged[:, None] * D + dims[None, :],
                        result.to(out.dtype.element_ty),
                        mask=(merged < GROUP)[:, None],
                    )
        if stop == before * HKV + tiles * HKV:
            seq += 1
        tile = stop


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How the kernel is compiled and launched."""

    tile: int
    """Tokens a program takes at a time; a power of two, 16 or more."""
    warps: int
    stages: int
    """Of loads on their way, those of the block table and then those of KV: half as many tiles lie in shared memory."""
    programs: int
    """For each multiprocessor."""


def decode_config(head_dim: int, group: int, dtype: torch.dtype) -> DecodeConfig:
    """What was fastest on an H200, of what fits."""
    if dtype is torch.float32:
        return DecodeConfig(tile=16, warps=4, stages=3, programs=2)
    if head_dim == 256:
        return DecodeConfig(tile=32, warps=8 if group > 32 else 4, stages=7, programs=2)
    return DecodeConfig(tile=64, warps=4, stages=7, programs=2)


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
        self._bounds = torch.zeros(max_seqs + 1, dtype=torch.int32, device=device)
        self._starts = torch.zeros(self.programs, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(self.programs, dtype=torch.int32, device=device)
        self._sums = torch.empty(self.programs, 2, self.group, 2, dtype=torch.float32, device=device)
        self._partial = torch.empty(self.programs, 2, self.group, head_dim, dtype=torch.float32, device=device)

    def plan(self, lens: torch.Tensor) -> None:
        """Shares out a step's work: once for all its layers. `lens` int32 [S], a sequence's tokens, the new one with them; 0
        for a row that stands for none."""
        if lens.shape[0] > self.max_seqs:
            raise ValueError(f"{lens.shape[0]} sequences are more than {self.max_seqs}")
        _plan[(self.programs,)](
            lens, self._bounds, self._starts, lens.shape[0],
            HKV=self.num_kv_heads, TILE=self.config.tile, WINDOW=self.window,
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
            self._bounds, self._starts, self._sums, self._partial, self._arrivals,
            q.shape[0], q.stride(0), out.stride(0), block_tables.stride(0), self.scale,
            HKV=self.num_kv_heads, GROUP=self.group, D=self.head_dim, BLOCK_SIZE=self.block_size, TILE=self.config.tile,
            WINDOW=self.window, SOFTCAP=self.softcap, ROWS=rows, MERGED=merged,
            PIECES=max(1, 4096 // (merged * self.head_dim)),
            num_warps=self.config.warps, num_stages=self.config.stages,
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
