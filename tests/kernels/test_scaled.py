"""Matrices in 8 bits and their products in plain torch, against float64."""

import pytest
import torch
import torch.nn.functional as F

from kvrelay.kernels.reference import FEW_TOKENS, ReferenceOps, scaled_product
from kvrelay.kernels.scaled import LEAST, Scaled, quantize
from tests.kernels.rounding import WIDE, assert_rounded

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def exact(matrix: Scaled) -> torch.Tensor:
    return matrix.values.double() * matrix.scale.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_to_nearest(dtype: torch.dtype) -> None:
    """Three bits of mantissa: half a step is 2^-4 of the value, under 2^-6 it is 2^-10, times the scale."""
    x = (torch.randn(33, 208) * torch.logspace(-3, 3, 33)[:, None]).to(dtype)
    found = quantize(x)
    assert found.values.dtype is torch.float8_e4m3fn
    assert torch.equal(found.scale, x.float().abs().amax(1) / 448)
    assert (found.values.float().abs().amax(1) == 448).all()
    bound = (x.double().abs() * 2**-4).maximum(2**-10 * found.scale.double()[:, None]) * (1 + 2**-20)
    assert ((exact(found) - x.double()).abs() <= bound).all()
    assert ((exact(found) - x.double()).abs() > bound / 2).any(), "values lie anywhere between the steps"
    assert torch.equal(found.wide(torch.float64), exact(found).float().double())


def test_what_is_in_8_bits_stays() -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    grid = grid[grid.float().isfinite()].float()
    for scale in (1.0, 2.0**-30, 2.0**90):
        found = quantize((grid * scale)[None])
        assert torch.equal(found.values[0].float(), grid)
        assert found.scale.item() == scale


def test_rows_at_the_ends() -> None:
    """Zeros, what is too small to count, the largest float32, and what is not finite: each row for itself."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, -0.0], [1e-40, 1e-36], [3.4e38, -3.4e38], [inf, 1.0], [1.0, nan], [1.0, -2.0]])
    found = quantize(x)
    assert found.values[:2].float().abs().sum() == 0
    assert found.scale[0] == LEAST / 448
    assert found.values[2].float().tolist() == [448, -448]
    assert found.wide(torch.float32).isnan().any(1).tolist() == [False, False, False, True, True, False]
    assert found.values[5].float().tolist() == [224, -448]
    assert quantize(torch.empty(0, 16)).wide(torch.float32).shape == (0, 16)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, FEW_TOKENS, FEW_TOKENS + 1, 40])
def test_product(tokens: int, dtype: torch.dtype, biased: bool) -> None:
    """Of few tokens as they are; of more, in 8 bits as well."""
    x, weight = torch.randn(tokens, 96).to(dtype), quantize(torch.randn(48, 96))
    bias = torch.randn(48).to(dtype) if biased else None
    taken = exact(quantize(x)) if tokens > FEW_TOKENS else x.double()
    products = F.linear(taken, exact(weight))
    error = WIDE * F.linear(taken.abs(), exact(weight).abs()) + WIDE * products.abs()
    if bias is not None:
        products += bias.double()
    found = scaled_product(x, weight, bias)
    assert found.dtype is dtype
    if tokens:
        assert_rounded(found, products, error)
    ops = ReferenceOps()
    assert torch.equal(ops.product(x, weight, bias), found)
    assert torch.equal(ops.product(x, weight, bias, torch.float32).to(dtype), found)
    assert torch.equal(ops.gated_product(x, weight, bias), ops.silu_gate(found))
