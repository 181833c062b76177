"""Products of some tokens, 256 at most, with a weight. `benchmarks.gpu.products` compares them with torch's.

As in `thin`, the weight's rows take the place that tokens have in a product of many, and what programs with parts of the columns give
is added by a second kernel. Here the tokens weigh as much as the weight's rows: both come by the bulk tensor copy engine, which takes
no threads and no registers, and gates and ups are multiplied where they are made.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kvrelay.kernels.triton.early import early, fetch_rows
from kvrelay.kernels.triton.thin import add_parts

MAX_TOKENS = 256
ALIGNMENT = 16
"""Bytes, of rows and of where they begin: the copy engine's."""
_ENOUGH_PROGRAMS = 128
"""For as many multiprocessors as a GPU has, about."""
_AHEAD = 256
"""Columns: as much of the weight is on its way while the kernel before ends."""


@dataclasses.dataclass(frozen=True, slots=True)
class NarrowConfig:
    """How the kernel is compiled."""

    rows: int
    """Of outputs that a program has: 64, 128 or 256."""
    parts: int
    """Of the columns; each a multiple of `block_k`, unless there is one."""
    block_k: int = 64
    """Columns a program takes at a time; a power of two, 16 or more."""
    tokens: int = 64
    """That a program has at most; a power of two, 16 or more."""
    warps: int = 4
    stages: int = 5
    """Of loads on their way."""
    early: bool = True
    """Launched before the kernel before it has ended, where the device can do that."""
    ahead: int = 0
    """Columns of its part of the weight that it asks for until then."""


def narrow_config(
    tokens: int, rows: int, columns: int, gated: bool = False, *, added: bool = True, itemsize: int = 2
) -> NarrowConfig:
    """Of so many tokens by a weight [rows, columns], what was fastest on an H200.

    A program takes 256 bytes of a row at a time. There is one for each multiprocessor, or more; where a second kernel has to add the
    parts, half as many serve as well, unless that is a long way for each.
    """
    block_k = 256 // itemsize
    ahead = min(_AHEAD, columns)
    if tokens > 128:
        return _of_many_tokens(tokens, rows, columns, gated, block_k)
    if gated and triton.cdiv(rows // 2, 64) >= _ENOUGH_PROGRAMS:
        return NarrowConfig(64, 1, block_k, stages=4, ahead=ahead)
    if rows // 128 >= 4 * _ENOUGH_PROGRAMS:
        return NarrowConfig(128, 1, block_k, stages=4, ahead=ahead)
    enough = _ENOUGH_PROGRAMS if not added or columns > 4096 else _ENOUGH_PROGRAMS // 2
    parts = 1
    while triton.cdiv(rows, 64) * parts < enough and columns % (2 * parts * block_k) == 0:
        parts *= 2
    return NarrowConfig(64, parts, block_k, stages=4 if gated else 6, ahead=min(_AHEAD, columns // parts))


def _of_many_tokens(tokens: int, rows: int, columns: int, gated: bool, block_k: int) -> NarrowConfig:
    """A weight is read once for each program's tokens: as many as leave half of the multiprocessors a program."""
    programs = triton.cdiv(rows // 2 if gated else rows, 64)
    if programs * triton.cdiv(tokens, 128) >= _ENOUGH_PROGRAMS // 2:
        return NarrowConfig(64, 1, block_k // 2 if gated else block_k, tokens=128, stages=4, ahead=min(_AHEAD, columns))
    parts = 2 if columns > 2048 and columns % (2 * block_k) == 0 and not gated else 1
    return NarrowConfig(64, parts, block_k, stages=4 if gated else 6, ahead=min(_AHEAD, columns // parts))


@triton.jit
def _narrow(
    weight, x, bias, out, pointer, tokens, rows, K: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`weight` and `x`: descriptors. `pointer`: to the weight. `out` [parts, T, N], or [1, T, N / 2] where it is gated."""
    first_token = tl.program_id(0) * TOKENS  # neighbours have the same part of the weight
    row = tl.program_id(1) * ROWS
    begin = tl.program_id(2) * PART
    width = rows // 2 if GATED else rows
    output = row + tl.arange(0, ROWS)
    token = first_token + tl.arange(0, TOKENS)
    if EARLY:
        gdc_launch_dependents()
        if AHEAD:
            real = tl.minimum(output, width - 1).to(tl.int64)[:, None] * K + begin
            fetch_rows(pointer + real, ROWS, AHEAD)
            if GATED:
                fetch_rows(pointer + width.to(tl.int64) * K + real, ROWS, AHEAD)
        gdc_wait()
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    up = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(begin, begin + PART, BLOCK_K):
        taken = tl.trans(x.load([first_token, first]))
        acc = tl.dot(weight.load([row, first]), taken, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(weight.load([width + row, first]), taken, up, input_precision="ieee")
    inside = output < width
    if BIAS:
        acc += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + width + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    at = out + (tl.program_id(2) * tokens + token).to(tl.int64)[None, :] * width + output[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (token < tokens)[None, :])


def narrow(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: NarrowConfig | None = None,
    added: bool = True,
) -> torch.Tensor:
    """x [T, K], T up to `MAX_TOKENS`, by `weight` [N, K] → [T, N], into `out` of any float type. All contiguous, rows of x and of the
    weight `ALIGNMENT` bytes apart or a multiple of it.

    With `gated`, the first half of the products are gates of the second: silu(gate) × up → [T, N / 2]. Nothing is rounded on
    the way. Not `added`: as in `thin`. Raises ValueError for more tokens, for rows that are not aligned, and for parts that are not whole blocks.
    """
    (tokens, columns), rows = x.shape, len(weight)
    if tokens > MAX_TOKENS:
        raise ValueError(f"{tokens} tokens are more than {MAX_TOKENS}")
    if columns * x.itemsize % ALIGNMENT:
        raise ValueError(f"rows of {columns} are not {ALIGNMENT} bytes apart, nor a multiple of it")
    width = rows // 2 if gated else rows
    if out is None:
        out = x.new_empty(tokens, width)
    if not tokens:
        return out
    config = config or narrow_config(tokens, rows, columns, gated, added=added, itemsize=x.itemsize)
    if config.parts > 1 and columns % (config.parts * config.block_k):
        raise ValueError(f"{columns} columns are not {config.parts} parts of blocks of {config.block_k}")
    launch = early(x, config.early)
    taken = min(config.tokens, max(16, triton.next_power_of_2(tokens)))
    whole = config.parts == 1
    sums = out if whole else x.new_empty(config.parts, tokens, rows, dtype=torch.float32)
    _narrow[(triton.cdiv(tokens, taken), triton.cdiv(width if whole else rows, config.rows), config.parts)](
        TensorDescriptor.from_tensor(weight, [config.rows, config.block_k]),
        TensorDescriptor.from_tensor(x, [taken, config.block_k]),
        bias, sums, weight, tokens, rows, K=columns, PART=columns // config.parts, BIAS=bias is not None and whole,
        GATED=gated and whole, AHEAD=config.ahead, TOKENS=taken, ROWS=config.rows, BLOCK_K=config.block_k,
        num_warps=config.warps, num_stages=config.stages, **launch,
    )  # fmt: skip
    if whole:
        return out
    if not (added or gated or bias is not None):
        return sums
    add_parts(sums, bias, out, gated, launch)
    return out
