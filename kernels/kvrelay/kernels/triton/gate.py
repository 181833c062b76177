"""The gate of an MLP: silu(gate) × up."""

import torch
import triton
import triton.language as tl

from kvrelay.kernels.triton.early import begin, early

_BLOCK = 1024


@triton.jit
def _silu_gate(gate_up, out, width, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    if EARLY:
        begin()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    source = gate_up + row * 2 * width + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + at, gated.to(out.dtype.element_ty), mask=inside)


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T, 2 I], gate then up → silu(gate) × up, [T, I], in float32 until it is stored."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty((rows, width))
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        _silu_gate[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4, **early(gate_up))
    return out
