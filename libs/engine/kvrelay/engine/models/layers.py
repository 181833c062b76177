"""Parts that models are made of. Plain callables on tensors [T, ...]: T tokens of any sequences, no padding, no batch."""

import torch

from kvrelay.kernels.ops import Norm, Ops
from kvrelay.kernels.scaled import Scaled

PACK_ROWS = 64
"""The batch that packed weights are laid out for: 16 to 1,024 serve 1 to 256 tokens alike (within a tenth), 1 does not."""
HEAD_COPY_BYTES = 256 << 20


class Linear:
    """x [T, in] → [T, out], by a weight [out, in]."""

    def __init__(self, ops: Ops, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.product(x, self._weight, self._bias)

    def added(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """To `hidden`, in place, or else what `Ops.add_norm` is to add to it: see `Ops.added_product`."""
        return self._ops.added_product(x, self._weight, self._bias, hidden)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Of the products, the first half gates of the second: silu(gate) × up, [T, out / 2]."""
        return self._ops.gated_product(x, self._weight, self._bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """As float32: not rounded to the weight's type, where that costs nothing."""
        return self._ops.product(x, self._weight, self._bias, torch.float32)

    def uses(self, weight: torch.Tensor) -> bool:
        """As it is: no copy was made."""
        return self._weight is weight


class PackedLinear(Linear):
    """The same on a CPU, by oneDNN, with the weight laid out once for its kernels; the plain weight is not kept."""

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(ops, torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y

    def added(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.silu_gate(self(x))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).to(torch.float32)


def linear(ops: Ops, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None) -> Linear:
    if isinstance(weight, torch.Tensor) and _packs(weight):
        return PackedLinear(ops, weight, bias)
    return Linear(ops, weight, bias)


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def tied_head(ops: Ops, embedding: torch.Tensor) -> Linear:
    """The output layer that shares the embedding's weight [V, H].

    The look-up needs the plain weight, so packing costs a copy: worth it where the copy is small (half the time in
    bfloat16, a third of it in float32 with AVX2, at 1 to 8 tokens).
    """
    return linear(ops, embedding) if embedding.nbytes <= HEAD_COPY_BYTES else Linear(ops, embedding)


def rms_norm(weight: torch.Tensor, eps: float) -> Norm:
    return Norm(weight.to(torch.float32).contiguous(), torch.tensor(eps, dtype=torch.float32, device=weight.device))
