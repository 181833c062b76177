"""The Triton kernels as the interface that models compute by."""

import torch

from kvrelay.kernels.ops import Norm
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.norm import add_norm
from kvrelay.kernels.triton.rotary import rotate


class TritonOps:
    """See `Ops`."""

    name = "triton"

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return add_norm(hidden, delta, norm.weight, norm.eps)

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return rotate(heads, cos, sin, norm)

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_gate(gate_up)
