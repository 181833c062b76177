"""Rows in 8 bits, each with its scale, in one pass over memory."""

import torch
import triton
import triton.language as tl

from kvrelay.kernels.scaled import LARGEST, LEAST, Scaled
from kvrelay.kernels.triton.early import begin, early

WIDEST = 32768
"""Elements of a row that one program holds in registers."""


@triton.jit
def _quantize(
    x, values, scales, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    if EARLY:
        begin()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    wide = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide)), LEAST)
    # Rounded to nearest by the conversion, which gives the largest for what is larger.
    narrow = (wide * tl.div_rn(LARGEST, largest)).to(values.dtype.element_ty)
    tl.store(values + row * width + at, narrow, mask=inside)
    tl.store(scales + row, tl.div_rn(largest, LARGEST))


def quantize_rows(x: torch.Tensor) -> Scaled:
    """x [R, K], contiguous; see `scaled.quantize`. Raises ValueError for rows over `WIDEST`."""
    rows, width = x.shape
    if width > WIDEST:
        raise ValueError(f"rows of {width} are over {WIDEST}")
    found = Scaled(torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(rows, dtype=torch.float32))
    if rows:
        block = triton.next_power_of_2(width)
        warps = min(max(block // 256, 1), 16)
        _quantize[(rows,)](
            x, found.values, found.scale, width, LARGEST=LARGEST, LEAST=LEAST, BLOCK=block, num_warps=warps, **early(x)
        )  # fmt: skip
    return found
