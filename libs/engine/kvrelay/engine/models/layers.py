"""Parts that models are made of. Plain callables on tensors [T, ...]: T tokens of any sequences, no padding, no batch."""

import torch
import torch.nn.functional as F

PACK_ROWS = 64
"""The batch that packed weights are laid out for. Measured over 1 to 1,024 tokens: the best for bfloat16 (by a third at 1 to 64
tokens, by half at 500), and for float32 at 2 to 64 tokens (by a third; 1 token is slower by a tenth)."""
HEAD_COPY_BYTES = 256 << 20


class Linear:
    """x [T, in] → [T, out], by a weight [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


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

    The look-up needs the plain weight, so packing costs a copy: worth it in bfloat16 (half the time at 1 to 8 tokens),
    not in float32 (a tenth), and only where the copy is small.
    """
    small = embedding.nbytes <= HEAD_COPY_BYTES
    return linear(embedding) if embedding.dtype is torch.bfloat16 and small else Linear(embedding)


class RmsNorm:
    """Zhang & Sennrich 2019, in float32, as the reference computes it."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = (weight.shape[-1],)
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorm:
    """Normalizes each head of queries and keys [T, Hq + Hkv, D] by weights [Hq + Hkv, D]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = (weight.shape[-1],)
        self._eps = eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(heads, self._shape, None, self._eps) * self._weight


def no_norm(heads: torch.Tensor) -> torch.Tensor:
    return heads


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 I], gate then up → silu(gate) × up, [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
