"""Products of 2 to 16 tokens with a weight, at the speed at which memory gives the weight.

The weight's rows take the place that tokens have in a product of many, so that the tensor cores' tiles are full. A program has
64 rows and a part of their columns: what the parts give is added by a second kernel, in their order.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvrelay.kernels.reference import FEW_TOKENS
from kvrelay.kernels.scaled import Scaled
from kvrelay.kernels.triton.early import Launch, begin, early, fetch_rows

MAX_TOKENS = FEW_TOKENS
_ROWS = 64
_OUTPUTS = 256
"""Of a program that adds parts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ThinConfig:
    """How the kernel is compiled."""

    parts: int
    """Of the columns; a multiple of 8 columns each."""
    block_k: int
    """Columns a program takes at a time; a power of two, 16 or more."""
    stages: int = 5
    """Of loads on their way."""
    early: bool = True
    """Launched before the kernel before it has ended, where the device can do that."""
    ahead: bool = False
    """Then asks for all its part of the weight at once."""


def thin_config(rows: int, columns: int) -> ThinConfig:
    """For a weight [rows, columns]: several programs for each of a GPU's multiprocessors, of 256 columns at least."""
    parts = 1
    while (
        parts < 16
        and triton.cdiv(rows, _ROWS) * parts < 512
        and columns % (256 * parts) == 0
        and columns // parts >= 512
    ):
        parts *= 2
    return ThinConfig(parts, min(128, max(16, triton.next_power_of_2(columns))))


@triton.jit
def _thin(
    x, weight, scale, bias, out, tokens, rows, K: tl.constexpr, PART: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`out` [parts, T, N]"""
    part = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    row = tl.minimum(row, rows - 1)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK_K)
    source = weight + row.to(tl.int64)[:, None] * K + part * PART
    if SCALED:
        factor = tl.load(scale + row)
    if EARLY:
        gdc_launch_dependents()
        if AHEAD:
            fetch_rows(source, ROWS, PART)
        gdc_wait()
    x += token[:, None] * K + part * PART + column[None, :]
    source += column[None, :]
    held = (token < tokens)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, PART, BLOCK_K):
        if PART % BLOCK_K == 0:
            tile = tl.load(source + first, eviction_policy="evict_first")
            taken = tl.load(x + first, mask=held, other=0.0)
        else:
            inside = (column < PART - first)[None, :]
            tile = tl.load(source + first, mask=inside, other=0.0, eviction_policy="evict_first")
            taken = tl.load(x + first, mask=held & inside, other=0.0)
        if SCALED:
            # By way of float32: a GPU makes bfloat16 of float16 more slowly than memory gives the weight.
            tile = tile.to(tl.float32).to(taken.dtype)
        acc = tl.dot(tile, tl.trans(taken), acc, input_precision="ieee")
    if SCALED:
        acc *= factor[:, None]
    if BIAS:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
    at = out + (part * tokens + token).to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real[:, None] & (token < tokens)[None, :])


@triton.jit
def _add_parts(
    sums, bias, out, rows, PARTS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
    OUTPUTS: tl.constexpr,
):  # fmt: skip
    """`sums` [parts, T, N]"""
    if EARLY:
        begin()
    token, tokens = tl.program_id(0), tl.num_programs(0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    width = rows // 2 if GATED else rows
    inside = output < width
    total = tl.zeros([OUTPUTS], tl.float32)
    up = tl.zeros([OUTPUTS], tl.float32)
    for part in tl.static_range(PARTS):
        at = sums + (part * tokens + token).to(tl.int64) * rows + output
        total += tl.load(at, mask=inside, other=0.0)
        if GATED:
            up += tl.load(at + width, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + width + output, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    tl.store(out + token.to(tl.int64) * width + output, total.to(out.dtype.element_ty), mask=inside)


def thin(
    x: torch.Tensor,
    weight: torch.Tensor | Scaled,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: ThinConfig | None = None,
    added: bool = True,
) -> torch.Tensor:
    """x [T, K], T up to `MAX_TOKENS`, by `weight` [N, K] → [T, N], into `out` of any float type. All contiguous.

    With `gated`, the first half of the products are gates of the second: silu(gate) × up → [T, N / 2]. Nothing is rounded on
    the way; a weight in 8 bits is widened. Not `added`, where there is no bias and no gate: float32 [parts, T, N], or as always
    where there is one part. Raises ValueError for more tokens.
    """
    (tokens, columns), rows = x.shape, len(weight)
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens are more than {MAX_TOKENS}")
    width = rows // 2 if gated else rows
    if out is None:
        out = x.new_empty(tokens, width)
    if not tokens:
        return out
    values, scale = (weight.values, weight.scale) if isinstance(weight, Scaled) else (weight, None)
    config = config or thin_config(rows, columns)
    launch = early(x, config.early)
    adds = gated or config.parts > 1
    sums = x.new_empty(config.parts, tokens, rows, dtype=torch.float32) if adds else out
    _thin[(triton.cdiv(rows, _ROWS), config.parts)](
        x, values, scale, bias, sums, tokens, rows, K=columns, PART=columns // config.parts, SCALED=scale is not None,
        BIAS=bias is not None and not adds, AHEAD=config.ahead, TOKENS=MAX_TOKENS, ROWS=_ROWS, BLOCK_K=config.block_k,
        num_warps=4, num_stages=config.stages, **launch,
    )  # fmt: skip
    if not adds:
        return out
    if not (added or gated or bias is not None):
        return sums
    add_parts(sums, bias, out, gated, launch)
    return out


def add_parts(sums: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, gated: bool, launch: Launch) -> None:
    """`sums` [parts, T, N] float32 into `out` [T, N], or gated [T, N / 2]."""
    parts, tokens, rows = sums.shape
    _add_parts[(tokens, triton.cdiv(out.shape[1], _OUTPUTS))](
        sums, bias, out, rows, PARTS=parts, BIAS=bias is not None, GATED=gated, OUTPUTS=_OUTPUTS, num_warps=4, **launch
    )
