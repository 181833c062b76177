"""The product of one token with a weight, at the speed at which memory gives the weight.

Each program has some of the weight's rows for itself and sums their products in float32, so that nothing is left to merge.
While it waits for the token it asks for its rows: memory is busy while the kernel before comes to its end.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.scaled import Scaled
from kvrelay.kernels.triton.early import early, fetch_rows

_MANY_ROWS, _FEW_ROWS = 16384, 2048


@dataclasses.dataclass(frozen=True, slots=True)
class GemvConfig:
    """How the kernel is compiled."""

    block_n: int
    """Rows of the weight a program has; a power of two, 2 or more where they are gated."""
    block_k: int
    """Columns it takes at a time; a power of two, 8 or more."""
    warps: int = 4
    early: bool = True
    """Launched before the kernel before it has ended, where the device can do that."""
    ahead: bool = False
    """Then asks for all its rows at once."""


def gemv_config(rows: int, columns: int, gated: bool = False, in_8_bits: bool = False) -> GemvConfig:
    """For a weight [rows, columns]: 32 elements a thread at a time, 64 where it is in 8 bits and has many rows, in several times as
    many programs as run at once."""
    if rows < _FEW_ROWS:
        return GemvConfig(2 if gated else 1, min(triton.next_power_of_2(columns), 2048 if gated else 4096))
    many = rows >= _MANY_ROWS
    block_k = min(triton.next_power_of_2(columns), 1024 if many and not in_8_bits else 2048)
    return GemvConfig(max(2, (8192 if many and in_8_bits else 4096) // block_k), block_k)


@triton.jit
def _add(sums, tile, x, column, K: tl.constexpr, EVEN: tl.constexpr):
    part = tl.load(x + column) if EVEN else tl.load(x + column, mask=column < K, other=0.0)
    products = tile.to(tl.float32) * part.to(tl.float32)[None, :]
    SIDE_BY_SIDE: tl.constexpr = tile.shape[1] // sums.shape[1]
    if SIDE_BY_SIDE > 1:
        products = tl.sum(tl.reshape(products, (tile.shape[0], sums.shape[1], SIDE_BY_SIDE)), 2)
    return sums + products


@triton.jit
def _gemv(
    x, weight, scale, bias, out, rows, K: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = K % BLOCK_K == 0
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK_N)
    # 8 side by side to a thread, of 8 bits too: those of the weight are then where those of x are.
    column = tl.max_contiguous(tl.arange(0, BLOCK_K), min(8, BLOCK_K))
    # Outputs, and the rows of the weight that they come from: for gated ones the gates', then as many ups'.
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row = tl.minimum(program * WIDTH + place % WIDTH, rows - 1) + place // WIDTH * rows
    begin = weight + row.to(tl.int64)[:, None] * K
    source = begin + column[None, :]
    if SCALED:
        factor = tl.load(scale + row)
    if EARLY:
        gdc_launch_dependents()
    tile = tl.load(source, mask=(column < K)[None, :], other=0.0, eviction_policy="evict_first")
    if EARLY:
        if AHEAD:
            fetch_rows(begin, BLOCK_N, K)
        gdc_wait()

    # In 8 bits: a thread adds its 8 at once, so that sums take fewer registers than what is on its way, and unrolls the loop, since
    # what is carried around it falls apart into single bytes.
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8 if SCALED else BLOCK_K], tl.float32)
    for first in tl.range(BLOCK_K, K, BLOCK_K, loop_unroll_factor=max(1, (K - 1) // BLOCK_K) if SCALED else 1):
        source += BLOCK_K
        if EVEN:
            following = tl.load(source, eviction_policy="evict_first")
        else:
            following = tl.load(source, mask=(column < K - first)[None, :], other=0.0, eviction_policy="evict_first")
        sums = _add(sums, tile, x, first - BLOCK_K + column, K, EVEN)
        tile = following
    total = tl.sum(_add(sums, tile, x, (K - 1) // BLOCK_K * BLOCK_K + column, K, EVEN), 1)

    output = program * WIDTH + tl.arange(0, WIDTH)
    if SCALED:
        total *= factor
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(total, (2, WIDTH))))
        total = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + output, total.to(out.dtype.element_ty), mask=output < rows)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor | Scaled,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """x [1, K] by `weight` [N, K] → [1, N], into `out` of any float type. All contiguous.

    With `gated`, the first half of the products are gates of the second: silu(gate) × up → [1, N / 2]. Nothing is rounded on
    the way; a weight in 8 bits is widened. Raises ValueError for more tokens than one.
    """
    tokens, columns = x.shape
    if tokens != 1:
        raise ValueError(f"one token, not {tokens}")
    rows = len(weight) // 2 if gated else len(weight)
    if out is None:
        out = x.new_empty(1, rows)
    values, scale = (weight.values, weight.scale) if isinstance(weight, Scaled) else (weight, None)
    config = config or gemv_config(len(weight), columns, gated, scale is not None)
    _gemv[(triton.cdiv(rows, config.block_n // 2 if gated else config.block_n),)](
        x, values, scale, bias, out, rows, K=columns, SCALED=scale is not None, BIAS=bias is not None, GATED=gated,
        AHEAD=config.ahead, BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.warps,
        **early(x, config.early),
    )  # fmt: skip
    return out
