"""What attention kernels share: where tokens lie in the cache, and a softmax that is fed tile by tile.

The softmax is the online one (Milakov & Gimelshein 2018), in powers of two: maxima are kept times log2 e, so that a weight is
one multiply-add and one exp2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""What a maximum starts from: finite, so that a row that has seen no key yet does not compute inf - inf."""


@triton.jit
def slots_of(table, token, last_token, BLOCK_SIZE: tl.constexpr):
    """Where a sequence's tokens lie, by its row of the block table.

    Tokens behind the last stand for it: what is loaded is always the sequence's own, and needs no mask.
    """
    token = tl.minimum(token, last_token)
    return tl.load(table + token // BLOCK_SIZE) * BLOCK_SIZE + token % BLOCK_SIZE


@triton.jit
def tanh(x):
    return 1 - 2 / (tl.exp2(2 * LOG2E * x) + 1)


@triton.jit
def raw_scores(q, k, scale, SOFTCAP: tl.constexpr):
    """`q` [M, D] by `k` [N, D]: scores [M, N], and the factor that makes them exponents of two."""
    raw = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        return tanh(raw * (scale / SOFTCAP)), SOFTCAP * LOG2E
    return raw, scale * LOG2E


@triton.jit
def absorb(highest, total, acc, raw, factor, v):
    """A tile's scores `raw` [M, N] and values `v` [N, D] into the state: maxima and sums [M], weighted values `acc` [M, D]."""
    higher = tl.maximum(highest, tl.max(raw, 1) * factor)
    weights = tl.exp2(raw * factor - higher[:, None])
    fade = tl.exp2(highest - higher)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total, acc
