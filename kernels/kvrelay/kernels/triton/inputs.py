"""The inputs of a step of single tokens, out of the words that the host has sent: in one launch what takes torch a dozen."""

import torch
import triton
import triton.language as tl

WORDS = 11
"""Of a sequence: row, position, token, slot, top-k, seed, choice, sampled position; temperature, top-p and min-p in float64."""


@triton.jit(do_not_specialize=["size"])
def _unpack(
    words, size, row_tokens, row_tables, table_stride, token_ids, positions, integers, floats, tables,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    row = tl.load(words + seq)
    position = tl.load(words + size + seq)
    token = tl.load(words + 2 * size + seq)
    tl.store(token_ids + seq, tl.where(token < 0, tl.load(row_tokens + row), token))
    tl.store(positions + seq, tl.maximum(position, 0))
    tl.store(integers + seq, (position + 1).to(tl.int32))
    tl.store(integers + size + seq, tl.load(words + 4 * size + seq).to(tl.int32))
    tl.store(integers + 2 * size + seq, tl.load(words + 6 * size + seq).to(tl.int32))
    for i in tl.static_range(3):
        bits = tl.load(words + (8 + i) * size + seq)
        tl.store(floats + i * size + seq, bits.to(tl.float64, bitcast=True).to(tl.float32))
    blocks = (position + BLOCK_SIZE) // BLOCK_SIZE
    for begin in range(0, blocks.to(tl.int32), PIECE):
        at = begin + tl.arange(0, PIECE)
        inside = at < blocks
        found = tl.load(row_tables + row * table_stride + at, mask=inside)
        tl.store(tables + seq.to(tl.int64) * table_stride + at, found, mask=inside)


def unpack_decodes(
    words: torch.Tensor, row_tokens: torch.Tensor, row_tables: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`words` int64 [11, S]; by row, `row_tokens` int64 and the block tables `row_tables` int32, contiguous.

    Tokens and positions, int64 [S]; lengths, top-k and choices, int32 [3, S]; temperature, top-p and min-p, float32 [3, S]; block
    tables [S, max_blocks], of which only a sequence's own blocks are written. A token under 0 is its row's; position -1 is that
    of no sequence, whose length is 0.
    """
    size = words.shape[1]
    device = words.device
    token_ids, positions = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
    integers = torch.empty(3, size, dtype=torch.int32, device=device)
    floats = torch.empty(3, size, dtype=torch.float32, device=device)
    tables = torch.empty(size, row_tables.shape[1], dtype=torch.int32, device=device)
    _unpack[(size,)](
        words, size, row_tokens, row_tables, row_tables.shape[1], token_ids, positions, integers, floats, tables,
        BLOCK_SIZE=block_size, PIECE=128, num_warps=1,
    )  # fmt: skip
    return token_ids, positions, integers, floats, tables
