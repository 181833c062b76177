"""How far results of kernels may be from exact ones."""

import torch
import torch.nn.functional as F

from tests.kernels.triton_device import ULP

WIDE = 2e-6
"""How far float32 results may be apart, relative to what they are sums of: some steps of 2^-24, by the order of sums, and
approximations of a quotient, a root or an exponential that are good to 2^-22."""


def poison(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, float("nan"))


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, error: float | torch.Tensor = 0.0) -> None:
    """Of finite `exact`, float64, each is the number rounded: half a step away at most, and `error` of before the rounding."""
    assert got.isfinite().all()
    subnormal = 2.0**-25 if got.dtype is torch.float16 else 0.0
    bound = exact.abs() * (ULP[got.dtype] / 2 + WIDE) + subnormal + error
    beyond = (got.double() - exact).abs() - bound
    assert beyond.max() <= 0, f"{beyond.max()} beyond the bound"


def gated(products: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) × up of `products` float64 [T, 2 I], gates first, each `error` away at most; and how far that may be then."""
    (gate, up), (gate_error, up_error) = products.chunk(2, 1), (error + products.abs() * WIDE).chunk(2, 1)
    # No slope of silu is over 1.1.
    away = 1.1 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * (up_error + WIDE * up.abs())
    return F.silu(gate) * up, away
