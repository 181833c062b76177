"""The product of a few tokens with a weight, at the speed at which memory gives the weight.

Each program has some of the weight's rows for itself and sums their products in float32, so that nothing is left to merge. A
norm of the input needs no pass of its own: its factor for each token, known once all columns went by, multiplies the sums.

With programmatic dependent launch, programs take the place of those of the kernel before that are done, and load what they need
first of the weight; only then they wait for their input.
"""

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.ops import Norm

MAX_TOKENS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class GemvConfig:
    """How the kernel is compiled."""

    block_n: int
    """Rows of the weight a program has; a power of two, 2 or more where they are gated."""
    block_k: int
    """Columns it takes at a time; a power of two."""
    warps: int
    early: bool = True
    """Launched before the kernel before it has ended, where the device can do that."""


def gemv_config(tokens: int, rows: int, columns: int) -> GemvConfig:
    """For a weight [rows, columns]."""
    held = 32 if tokens <= 2 else 16
    warps = 4
    block_k = min(1024, max(triton.next_power_of_2(columns) // 2, 64))
    return GemvConfig(max(2, 32 * warps * held // block_k), block_k, warps)


@triton.jit
def _gemv(
    x, delta, residual, weight, bias, factors, eps, out, rows, TOKENS: tl.constexpr, K: tl.constexpr, ADD: tl.constexpr,
    NORMED: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    # Outputs, and the rows of the weight that they come from: for gated ones the gates', then as many ups'.
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row = tl.minimum(program * WIDTH + place % WIDTH, rows - 1) + place // WIDTH * rows
    source = weight + row.to(tl.int64)[:, None] * K + column[None, :]
    tile = tl.load(source, mask=(column < K)[None, :], other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()

    sums = (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),) * TOKENS
    squares = (tl.zeros([BLOCK_K], tl.float32),) * TOKENS
    for first in range(0, K, BLOCK_K):
        inside = column < K - first
        source += BLOCK_K
        following = tl.load(
            source, mask=(column < K - BLOCK_K - first)[None, :], other=0.0, eviction_policy="evict_first"
        )
        wide = tile.to(tl.float32)
        if NORMED:
            factor = tl.load(factors + first + column, mask=inside, other=0.0)
        more_sums = sums[:0]
        more_squares = squares[:0]
        for token in tl.static_range(TOKENS):
            at = token * K + first + column
            held = tl.load(x + at, mask=inside, other=0.0)
            value = held.to(tl.float32)
            if ADD:
                held = (value + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
                tl.store(residual + at, held, mask=inside & (program == 0))
                value = held.to(tl.float32)
            if NORMED:
                more_squares += (squares[token] + value * value,)
                value *= factor
            more_sums += (sums[token] + wide * value[None, :],)
        sums = more_sums
        if NORMED:
            squares = more_squares
        tile = following

    output = program * WIDTH + tl.arange(0, WIDTH)
    for token in tl.static_range(TOKENS):
        total = tl.sum(sums[token], 1)
        if NORMED:
            total *= tl.rsqrt(tl.sum(squares[token]) / K + tl.load(eps))
        if BIAS:
            total += tl.load(bias + row).to(tl.float32)
        if GATED:
            gate, up = tl.split(tl.trans(tl.reshape(total, (2, WIDTH))))
            total = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + token * rows + output, total.to(out.dtype.element_ty), mask=output < rows)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    delta: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """x [T, K], T up to `MAX_TOKENS`, by `weight` [N, K] → [T, N], into `out` of any float type. All contiguous.

    With `delta` [T, K], what is multiplied is x + delta, rounded to their type, which goes into `residual` [T, K], a place of
    its own. With `norm`, it is normed first. With `gated`, the first half of the products are gates of the second: silu(gate)
    × up → [T, N / 2]. Nothing else is rounded on the way. Raises ValueError for more tokens, and where there is no such place.
    """
    tokens, columns = x.shape
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens are more than {MAX_TOKENS}")
    if delta is not None and (residual is None or residual.data_ptr() in (x.data_ptr(), delta.data_ptr())):
        raise ValueError("what is added needs a place for the sum that is none of its parts")
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = x.new_empty(tokens, rows)
    if not tokens:
        return out
    config = config or gemv_config(tokens, rows, columns)
    early = config.early and x.is_cuda and launches_early(x.device)
    _gemv[(triton.cdiv(rows, config.block_n // 2 if gated else config.block_n),)](
        x, delta, residual, weight, bias, norm and norm.weight, norm and norm.eps, out, rows,
        TOKENS=tokens, K=columns, ADD=delta is not None, NORMED=norm is not None, BIAS=bias is not None, GATED=gated,
        EARLY=early, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        num_warps=config.warps, launch_pdl=early,
    )  # fmt: skip
    return out


@functools.cache
def launches_early(device: torch.device) -> bool:
    """Whether it has programmatic dependent launch."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
