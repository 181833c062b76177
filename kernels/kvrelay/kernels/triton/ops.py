"""The Triton kernels as the interface that models compute by."""

import torch

from kvrelay.kernels.ops import Norm
from kvrelay.kernels.reference import ReferenceOps
from kvrelay.kernels.scaled import Scaled
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.gemv import gemv
from kvrelay.kernels.triton.norm import add_norm
from kvrelay.kernels.triton.quantize import quantize_rows
from kvrelay.kernels.triton.rotary import rotate
from kvrelay.kernels.triton.thin import MAX_TOKENS, thin


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
        if not 0 < len(x) <= MAX_TOKENS:
            if isinstance(weight, Scaled) and x.is_cuda:
                return scaled_product(x, weight, bias).to(dtype or x.dtype)
            return super().product(x, weight, bias, dtype)
        out = x.new_empty(len(x), len(weight), dtype=dtype)
        return (gemv if len(x) == 1 else thin)(x, weight, bias, out=out)

    def unadded_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not 1 < len(x) <= MAX_TOKENS:
            return self.product(x, weight, bias)
        return thin(x, weight, bias, added=False)

    def gated_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not 0 < len(x) <= MAX_TOKENS:
            return super().gated_product(x, weight, bias)
        return (gemv if len(x) == 1 else thin)(x, weight, bias, gated=True)


def scaled_product(x: torch.Tensor, weight: Scaled, bias: torch.Tensor | None) -> torch.Tensor:
    """Of many tokens in bfloat16, which are rounded to 8 bits: see `reference.scaled_product`. By torch, on a GPU."""
    rows = quantize_rows(x)
    scales = rows.scale.unsqueeze(1), weight.scale.unsqueeze(0)
    return torch._scaled_mm(rows.values, weight.values.T, *scales, bias=bias, out_dtype=x.dtype)
