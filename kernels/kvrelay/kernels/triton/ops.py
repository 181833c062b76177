"""The Triton kernels as the interface that models compute by."""

from collections.abc import Callable

import torch

from kvrelay.kernels.ops import Norm
from kvrelay.kernels.reference import ReferenceOps
from kvrelay.kernels.scaled import Scaled
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.gemv import gemv
from kvrelay.kernels.triton.narrow import ALIGNMENT, narrow
from kvrelay.kernels.triton.narrow import MAX_TOKENS as MOST_NARROW_TOKENS
from kvrelay.kernels.triton.norm import add_norm
from kvrelay.kernels.triton.quantize import quantize_rows
from kvrelay.kernels.triton.rotary import rotate
from kvrelay.kernels.triton.thin import MAX_TOKENS, thin

NARROW_TOKENS = 64
"""Of products up to which `narrow` is faster than torch's on an H200, whose kernels are launched early."""
SMALL_WEIGHT = 8 << 20
"""Elements, up to which it is with all tokens that it serves."""
ADDED_FROM = 1024
"""Tokens, from which a product of torch's that adds to what is there takes, with the norm behind it, less than one that leaves that to the norm."""


class TritonOps(ReferenceOps):
    """See `Ops`. Products of many tokens are torch's.

    Which kernel serves depends on the number of tokens: a CUDA graph, which is captured for one, has the right one.
    """

    name = "triton"

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return add_norm(hidden, delta, norm.weight, norm.eps)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return rotate(heads, cos, sin, norm)

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_gate(gate_up)

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Scaled,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        by = _kernel(x, weight)
        if by is not None:
            return by(x, weight, bias, out=x.new_empty(len(x), len(weight), dtype=dtype))
        if isinstance(weight, Scaled) and x.is_cuda and len(x):
            return scaled_product(x, weight, bias).to(dtype or x.dtype)
        return super().product(x, weight, bias, dtype)

    def added_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None, hidden: torch.Tensor
    ) -> torch.Tensor | None:
        by = _kernel(x, weight)
        if by is thin or by is narrow:
            return by(x, weight, bias, added=False)
        if by is None and bias is None and isinstance(weight, torch.Tensor) and x.is_cuda and len(x) >= ADDED_FROM:
            hidden.addmm_(x, weight.T)
            return None
        return self.product(x, weight, bias)

    def gated_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        by = _kernel(x, weight)
        return super().gated_product(x, weight, bias) if by is None else by(x, weight, bias, gated=True)


def _kernel(x: torch.Tensor, weight: torch.Tensor | Scaled) -> Callable[..., torch.Tensor] | None:
    """For a product of few tokens, the fastest; None: torch's."""
    tokens, columns = x.shape
    if tokens <= MAX_TOKENS:
        return (None, gemv)[tokens] if tokens < 2 else thin
    if isinstance(weight, Scaled) or x.itemsize != 2 or columns * x.itemsize % ALIGNMENT:
        return None
    most = MOST_NARROW_TOKENS if weight.numel() <= SMALL_WEIGHT else NARROW_TOKENS
    return narrow if tokens <= most else None


def scaled_product(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None) -> torch.Tensor:
    """Of many tokens in bfloat16, which are rounded to 8 bits: see `reference.scaled_product`. By torch, on a GPU."""
    rows = quantize_rows(x)
    scales = rows.scale.unsqueeze(1), weight.scale.unsqueeze(0)
    return torch._scaled_mm(rows.values, weight.values.T, *scales, bias=bias, out_dtype=x.dtype)
