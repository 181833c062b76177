"""Attention of parts of prompts on paged KV, their own with it.

A program takes a tile of a part's tokens, with all query heads of one KV head: rows of the tile are (token, head), so that
short parts fill tiles too. Which tile is whose is found on the device: the grid depends on the numbers of tokens and sequences alone.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from kvrelay.kernels.triton.decode_attention import check_heads
from kvrelay.kernels.triton.softmax import LOWEST, absorb, raw_scores, slots_of


@triton.jit
def _find(query_starts, tile, num_seqs, TOKENS: tl.constexpr):
    """The sequence whose tile this is; -1 for what comes before the first, `num_seqs` for the padding behind the last.

    Sequence s is given the tiles from query_starts[s] // TOKENS + s on, which are enough whatever comes before it. Counting
    waits for one load where a search waits for several.
    """
    count = 0
    lanes = tl.arange(0, 128)
    for begin in range(0, num_seqs + 1, 128):
        seqs = begin + lanes
        first = tl.load(query_starts + seqs, mask=seqs <= num_seqs, other=0) // TOKENS + seqs
        count += tl.sum(((seqs <= num_seqs) & (first <= tile)).to(tl.int32), 0)
    return count - 1


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "table_stride"])
def _prefill(
    q, keys, values, tables, query_starts, context_lens, out, num_tokens, num_seqs, q_stride, out_stride, table_stride, scale,
    HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP
    head = tl.program_id(0)
    # The last tiles of a part see the most keys; they go first, so that the end is made of short ones.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = _find(query_starts, tile, num_seqs, TOKENS)
    if seq < 0:
        return
    begin = tl.load(query_starts + seq)
    end = tl.load(query_starts + seq + 1, mask=seq < num_seqs, other=num_tokens)
    first = begin + (tile - begin // TOKENS - seq) * TOKENS
    if first >= end:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, D)
    token = first + rows // GROUP
    heads = head * GROUP + rows % GROUP
    mask = ((rows < TOKENS * GROUP) & (token < end))[:, None]
    out_at = out + token.to(tl.int64)[:, None] * out_stride + heads[:, None] * D + dims[None, :]
    if seq == num_seqs:
        tl.store(out_at, tl.zeros([ROWS, D], out.dtype.element_ty), mask=mask)
        return

    query = tl.load(q + token.to(tl.int64)[:, None] * q_stride + heads[:, None] * D + dims[None, :], mask=mask, other=0)
    context = tl.load(context_lens + seq)
    oldest_row = context - end + first
    newest_row = context - end + tl.minimum(first + TOKENS, end) - 1
    position = tl.minimum(context - end + token, newest_row)
    table = tables + seq.to(tl.int64) * table_stride
    highest = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)

    first_tile = tl.maximum(oldest_row - WINDOW + 1, 0) // TILE if WINDOW > 0 else 0
    key = first_tile * TILE + tl.arange(0, TILE)
    for at in range(first_tile, tl.cdiv(newest_row + 1, TILE)):
        slots = slots_of(table, key, context - 1, BLOCK_SIZE)
        places = (slots.to(tl.int64) * HKV + head)[:, None] * D + dims[None, :]
        k = tl.load(keys + places)
        raw, factor = raw_scores(query, k, scale, SOFTCAP)
        # Most tiles are seen whole by all rows.
        partly = (at + 1) * TILE > oldest_row + 1
        if WINDOW > 0:
            partly |= at * TILE <= newest_row - WINDOW
        if partly:
            seen = key[None, :] <= position[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position[:, None] - WINDOW
            raw = tl.where(seen, raw, float("-inf"))
        v = tl.load(values + places)
        highest, total, acc = absorb(highest, total, acc, raw, factor, v)
        key += TILE
    total = tl.where(total == 0, 1.0, total)  # without context
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How the kernel is compiled."""

    rows: int
    """Query rows, (token, head), of a program; a power of two, no less than the heads that share a KV head."""
    tile: int
    """Keys a program takes at a time; a power of two, 16 or more."""
    warps: int
    stages: int
    """Of loads on their way, those of the block table and then those of KV: half as many tiles lie in shared memory."""


def prefill_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """What was fastest on an H200, of what fits."""
    if dtype is torch.float32:
        return PrefillConfig(rows=64, tile=16, warps=4, stages=2)
    return PrefillConfig(rows=128, tile={64: 128, 128: 64, 256: 32}[head_dim], warps=8, stages=5)


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_size: int,
    out: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Parts of S sequences, packed: `q` [T, Hq, D], of which a token's heads are contiguous, a part's tokens from
    `query_starts` int32 [S + 1] on, each the last ones of the `context_lens` int32 [S] tokens whose KV is in the cached `keys`
    and `values` [slots, Hkv, D], by `block_tables` int32 [S, …]. Causal. Into `out` [T, Hq, D]: zeros for tokens behind the
    last part, and where a part has no context; nothing for tokens before the first part.

    `window`: the last tokens that are attended to, the query's own with them; `scale` of scores, D^-½ if not given. Capturable
    in a CUDA graph: what is launched depends on T and S alone. Raises ValueError for shapes that there is no kernel for.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_seqs = keys.shape[1], context_lens.shape[0]
    group = check_heads(num_heads, num_kv_heads, head_dim)
    config = config or prefill_config(head_dim, q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    tiles = triton.cdiv(num_tokens, config.rows // group) + num_seqs
    _prefill[(num_kv_heads, tiles)](
        q, keys, values, block_tables, query_starts, context_lens, out, num_tokens, num_seqs,
        q.stride(0), out.stride(0), block_tables.stride(0), head_dim**-0.5 if scale is None else scale,
        HKV=num_kv_heads, GROUP=group, D=head_dim, BLOCK_SIZE=block_size, ROWS=config.rows, TILE=config.tile,
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out
