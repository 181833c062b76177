"""Parts that models are made of. Plain callables on tensors [T, ...]: T tokens of any sequences, no padding, no batch."""

import torch
import torch.nn.functional as F

PACK_ROWS = 64
"""The batch that packed weights are laid out for: 16 to 1,024 serve 1 to 256 tokens alike (within a tenth), 1 does not."""
HEAD_COPY_BYTES = 256 << 20


class Linear:
    """x [T, in] → [T, out], by a weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def uses(self, weight: torch.Tensor) -> bool:
        """As it is: no copy was made."""
        return self._weight is weight


class PackedLinear(Linear):
    """The same on a CPU, by oneDNN, with the weight laid out once for its kernels; the plain weight is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return PackedLinear(weight, bias) if _packs(weight) else Linear(weight, bias)


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def tied_head(embedding: torch.Tensor) -> Linear:
    """The output layer that shares the embedding's weight [V, H].

    The look-up needs the plain weight, so packing costs a copy: worth it where the copy is small (half the time in
    bfloat16, a third of it in float32 with AVX2, at 1 to 8 tokens).
    """
    return linear(embedding) if embedding.nbytes <= HEAD_COPY_BYTES else Linear(embedding)


class RmsNorm:
    """Zhang & Sennrich 2019, in float32, as the reference computes it. Fewer, cheaper operations than torch's own on a CPU."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight.to(torch.float32)
        self._eps = torch.tensor(eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Along the last dimension of x [..., H]."""
        wide = x.to(torch.float32)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).mul_(self._weight).to(x.dtype)


def no_norm(heads: torch.Tensor) -> torch.Tensor:
    return heads


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I], gate then up → silu(gate) × up, [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
