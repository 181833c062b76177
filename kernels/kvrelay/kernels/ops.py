"""What a model computes beside its products: one interface, and which implementation serves a device and a type."""

import dataclasses
from typing import Protocol

import torch

from kvrelay.kernels.reference import ReferenceOps
from kvrelay.kernels.scaled import Scaled


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Of an RMS norm (Zhang & Sennrich 2019)."""

    weight: torch.Tensor
    """float32, [H], or [heads, D] for a norm of each head."""
    eps: torch.Tensor
    """float32, a scalar."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampleParams:
    """Of R rows, on the device, each [R]. Temperature 0 or `top_k` 1 take the most likely token; `top_k` 0, `top_p` 1 and
    `min_p` 0 leave a row whole."""

    temperature: torch.Tensor
    """float32"""
    top_k: torch.Tensor
    """int32"""
    top_p: torch.Tensor
    """float32"""
    min_p: torch.Tensor
    """float32"""
    seed: torch.Tensor
    """int64, which counts modulo 2^64"""
    choice: torch.Tensor
    """int32"""
    position: torch.Tensor
    """int64"""

    def first(self, count: int) -> "SampleParams":
        """Of so many rows."""
        return SampleParams(*(getattr(self, field.name)[:count] for field in dataclasses.fields(self)))


class Ops(Protocol):
    """On tensors of one dtype, contiguous unless said otherwise; arithmetic is float32's."""

    name: str

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """Adds `delta` [T, H] to `hidden` [T, H] in place, if there is one, and gives its norm, [T, H]. `delta` may be what
        `added_product` gives."""
        ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """`heads` [T, heads, D], of which a token's are contiguous, normed each if so asked, and rotated by `cos` and signed
        `sin` [T, 1, D]. They may be gone afterwards: the result may lie where they were."""
        ...

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 I], gate then up → silu(gate) × up, [T, I]."""
        ...

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Scaled,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """x [T, K] by `weight` [N, K] → [T, N]; as `dtype`, not rounded to x's where that costs nothing.

        By a weight in 8 bits: see `reference.scaled_product`.
        """
        ...

    def added_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None, hidden: torch.Tensor
    ) -> torch.Tensor | None:
        """Adds `product` to `hidden` [T, N] in place; or gives it, or parts of it in float32, [parts, T, N], where to add them is
        left to `add_norm`: in their order, rounded when they are added."""
        ...

    def gated_product(
        self, x: torch.Tensor, weight: torch.Tensor | Scaled, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, K] by `weight` [2 I, K], then `silu_gate`, [T, I]: not rounded in between where that costs nothing."""
        ...


def choose_ops(device: str, dtype: torch.dtype, option: str = "auto") -> tuple[Ops, str]:
    """By `option` auto, compiled, triton or torch: the implementation, and the reason in words. Raises ValueError where it
    cannot be had."""
    if option not in ("auto", "compiled", "triton", "torch"):
        raise ValueError(f"kernels {option} are not among auto, compiled, triton, torch")
    if option == "torch":
        return ReferenceOps(), "torch: asked for"
    own = "compiled" if device.startswith("cpu") else "triton"
    try:
        if option not in ("auto", own):
            raise _NotHere(f"there are none for {device}")
        ops, how = _compiled(dtype) if own == "compiled" else _triton(device)
    except _NotHere as why:
        if option != "auto":
            raise ValueError(f"{option} kernels: {why}") from why
        return ReferenceOps(), f"torch: {why}"
    return ops, f"{own}: {how}"


class _NotHere(Exception):
    """Says why kernels cannot be had."""


def _compiled(dtype: torch.dtype) -> tuple[Ops, str]:
    if dtype not in (torch.float32, torch.bfloat16):
        raise _NotHere(f"there are none for {dtype}")
    try:
        from kvrelay.kernels.cpu.openmp import NoThreads
        from kvrelay.kernels.cpu.ops import CompiledOps
    except ImportError as error:
        raise _NotHere(f"numba is not there ({error})") from error
    try:
        return CompiledOps(dtype), "by numba, on torch's threads"
    except NoThreads as error:
        raise _NotHere(str(error)) from error


def _triton(device: str) -> tuple[Ops, str]:
    if not device.startswith("cuda"):
        raise _NotHere(f"there are none for {device}")
    try:
        from kvrelay.kernels.triton.ops import TritonOps
    except ImportError as error:
        raise _NotHere(f"Triton is not there ({error})") from error
    return TritonOps(), f"for {device}"
