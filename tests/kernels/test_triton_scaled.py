"""Products with weights in 8 bits against their twin, and against float64."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from kvrelay.kernels.reference import FEW_TOKENS
from kvrelay.kernels.reference import scaled_product as twin
from kvrelay.kernels.scaled import Scaled, quantize
from tests.kernels.rounding import WIDE, assert_rounded, gated, poison
from tests.kernels.triton_device import DEVICE, DTYPES, ON_GPU, ULP

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.triton.gemv import GemvConfig, gemv
from kvrelay.kernels.triton.ops import TritonOps, scaled_product
from kvrelay.kernels.triton.quantize import WIDEST, quantize_rows
from kvrelay.kernels.triton.thin import ThinConfig, thin

# numpy, which the interpreter computes by, warns of what overflows as it should.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

SMALL = [(1, 24, 64), (1, 10, 200), (1, 3, 24), (2, 40, 200), (3, 66, 520), (16, 130, 1024)]
LARGE = [
    (1, 6144, 4096), (1, 28672, 4096), (1, 4096, 14336), (1, 1024, 3072), (1, 6144, 1024), (1, 4096, 28672), (2, 6144, 4096),
    (3, 4096, 14336), (16, 28672, 4096), (7, 1536, 576),
]  # fmt: skip
CASES = [(*shape, dtype) for shape in SMALL for dtype in DTYPES] + [
    (*shape, torch.bfloat16) for shape in LARGE
] * ON_GPU
"""Tokens, rows, columns, type."""
CONFIGS: list[tuple[int, GemvConfig | ThinConfig]] = [
    (1, GemvConfig(2, 64, 1)),
    (1, GemvConfig(8, 256, 2)),
    (2, ThinConfig(1, 32)),
    (5, ThinConfig(2, 64, 2)),
]
if ON_GPU:
    CONFIGS += [
        (1, GemvConfig(block_n, block_k, warps, ahead=ahead))
        for block_n, block_k, warps in itertools.product((2, 4, 16), (512, 2048), (4, 8))
        for ahead in (False, True)
    ]
    CONFIGS += [(9, ThinConfig(parts, 64, stages)) for parts in (1, 4, 8) for stages in (2, 4)]
"""Tokens and how they are computed."""
TENSOR_CORES = 2.0**-11
"""What products of 8 bits may lose, of what they are sums of: a tensor core keeps 14 bits while it adds, and what it has added goes
into sums of float32 after every fourth time."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def weights(rows: int, columns: int) -> Scaled:
    """Channels are of different sizes."""
    sizes = torch.logspace(-1, 1, rows, device=DEVICE)[torch.randperm(rows, device=DEVICE), None]
    return quantize(torch.randn(rows, columns, device=DEVICE) * columns**-0.5 * sizes)


def exact(matrix: Scaled) -> torch.Tensor:
    return matrix.values.double() * matrix.scale.double()[:, None]


def exactly(x: torch.Tensor, weight: Scaled, inside: float = WIDE) -> tuple[torch.Tensor, torch.Tensor]:
    """The products in float64, and how far sums may be from them: by `inside`, of what they are sums of."""
    products = F.linear(x.double(), exact(weight))
    return products, inside * F.linear(x.double().abs(), exact(weight).abs()) + WIDE * products.abs()


def product(
    x: torch.Tensor,
    weight: Scaled,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    config: GemvConfig | ThinConfig | None = None,
) -> torch.Tensor:
    """Into NaN."""
    out = poison(x.new_empty(len(x), len(weight) // (1 + gated)))
    if isinstance(config, GemvConfig) or (config is None and len(x) == 1):
        return gemv(x, weight, bias, gated=gated, out=out, config=config)
    return thin(x, weight, bias, gated=gated, out=out, config=config)


@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), CASES)
def test_products(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(tokens, columns, dtype=dtype), weights(rows, columns), randn(rows, dtype=dtype)
    got = product(x, weight)
    products, error = exactly(x, weight)
    assert_rounded(got, products, error)
    torch.testing.assert_close(got, twin(x, weight), rtol=2 * ULP[dtype], atol=2 * error.max().item())
    assert torch.equal(TritonOps().product(x, weight), got)
    assert torch.equal(TritonOps().product(x, weight, dtype=torch.float32).to(dtype), got)
    parts = TritonOps().added_product(x, weight, None, poison(got))
    assert parts is not None
    parts = parts.view(-1, tokens, rows)
    assert torch.equal(functools.reduce(torch.add, parts).to(dtype), got)
    assert_rounded(product(x, weight, bias), products + bias.double(), error + WIDE * bias.double().abs())


@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), [case for case in CASES if case[1] % 2 == 0])
def test_gate_and_bias(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(tokens, columns, dtype=dtype), weights(rows, columns), randn(rows, dtype=dtype)
    got = product(x, weight, bias, gated=True)
    products, errors = exactly(x, weight)
    products += bias.double()
    expected, error = gated(products, errors)
    assert_rounded(got, expected, error)
    assert torch.equal(TritonOps().gated_product(x, weight, bias), got)


@pytest.mark.parametrize(("tokens", "config"), CONFIGS, ids=str)
def test_any_config(tokens: int, config: GemvConfig | ThinConfig) -> None:
    """The rows and columns are no multiples of a program's."""
    rows, columns = (4098, 4096 + 64) if ON_GPU else (10, 136)
    x, weight = randn(tokens, columns, dtype=torch.float32), weights(rows, columns)
    products, error = exactly(x, weight)
    assert_rounded(product(x, weight, config=config), products, error)
    assert_rounded(product(x, weight, gated=True, config=config), *gated(products, error))


@pytest.mark.parametrize("tokens", [1, 2])
def test_all_256_values(tokens: int) -> None:
    """Each alone in its row: subnormals and NaN too, which the interpreter takes for 480."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    values = torch.zeros(256, 32, dtype=torch.uint8, device=DEVICE)
    values[:, 3] = codes
    weight = Scaled(values.view(torch.float8_e4m3fn), torch.full((256,), 0.5, device=DEVICE))
    got = product(torch.ones(tokens, 32, device=DEVICE), weight)
    expected = codes.view(torch.float8_e4m3fn).float() / 2
    if not ON_GPU:
        expected = expected.where(expected.isfinite(), torch.tensor([240.0, -240.0])[(codes >> 7).long()])
    torch.testing.assert_close(got, expected.expand(tokens, -1), rtol=0, atol=0, equal_nan=True)


ROWS = [(1, 64, 1.0), (3, 200, 1e-3), (5, 576, 1e4), (17, 4096, 1.0)] + [(8192, 4096, 1.0), (300, 28672, 30.0)] * ON_GPU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "size"), ROWS)
def test_rows_are_quantized_as_by_torch(tokens: int, width: int, size: float, dtype: torch.dtype) -> None:
    """To the bit; the interpreter loses what rounding carries into the exponent, and rounds ties and subnormals otherwise."""
    x = randn(tokens, width, dtype=dtype) * size
    got, expected = quantize_rows(x), quantize(x)
    assert torch.equal(got.scale, expected.scale)
    if ON_GPU:
        assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
    else:
        codes, right = (each.values.view(torch.uint8).int() for each in (got, expected))
        same = (codes == right) | ((codes == right - 8) & (right & 7 == 0))
        assert same.double().mean() > 0.98
    assert quantize_rows(x[:0]).values.shape == (0, width)


def test_what_is_in_8_bits_stays() -> None:
    """Where nothing is to be rounded the interpreter is exact as well."""
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(DEVICE)
    grid = grid[grid.isfinite()]
    x = torch.stack((grid, grid.flip(0) * 2.0**-30, grid.roll(9) * 2.0**90))
    got = quantize_rows(x)
    assert torch.equal(got.values.float() * got.scale[:, None], x)
    assert got.scale.tolist() == [1.0, 2.0**-30, 2.0**90]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_at_the_ends() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0, -0.0], [1e-40, 1e-36], [3.4e38, -3.4e38], [1.0, -2.0], [inf, 1.0], [1.0, nan]])
    got = quantize_rows(x.to(DEVICE))
    assert torch.equal(got.scale[:4], quantize(x).scale[:4].to(DEVICE))
    assert got.values[:4].float().tolist() == quantize(x).values[:4].float().tolist()
    if ON_GPU:  # the interpreter has no NaN in 8 bits
        assert got.values[4:].isnan().any(1).all()
    with pytest.raises(ValueError, match=f"rows of {WIDEST + 1} are over {WIDEST}"):
        quantize_rows(torch.ones(1, WIDEST + 1, device=DEVICE))


MANY = [(17, 48, 64), (33, 96, 576)] + [
    (24, 6144, 4096),
    (64, 28672, 4096),
    (256, 4096, 14336),
    (2048, 6144, 4096),
] * ON_GPU


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), MANY)
def test_many_tokens(tokens: int, rows: int, columns: int, biased: bool) -> None:
    """Which scale belongs to what is torch's to know: its product of 8 bits runs on a CPU as well."""
    x, weight = randn(tokens, columns, dtype=torch.bfloat16), weights(rows, columns)
    x *= torch.logspace(-2, 2, tokens, device=DEVICE).to(torch.bfloat16)[:, None]
    bias = randn(rows, dtype=torch.bfloat16) if biased else None
    products, error = exactly(exact(quantize_rows(x)), weight, TENSOR_CORES)
    if bias is not None:
        products, error = products + bias.double(), error + WIDE * bias.double().abs()
    got = scaled_product(x, weight, bias)
    assert got.dtype is torch.bfloat16
    assert_rounded(got, products, error)
    ops = TritonOps()
    if ON_GPU:
        assert torch.equal(ops.product(x, weight, bias), got)
        assert torch.equal(ops.product(x, weight, bias, torch.float32), got.float())
    else:
        assert torch.equal(ops.product(x, weight, bias), twin(x, weight, bias))
    assert torch.equal(ops.gated_product(x, weight, bias), ops.silu_gate(ops.product(x, weight, bias)))


def test_where_tokens_are_rounded() -> None:
    """From one number of tokens on, for the kernels as for their twin."""
    weight = weights(48, 64)
    x = torch.full((FEW_TOKENS + 1, 64), 0.3, dtype=torch.bfloat16, device=DEVICE)
    x[:, 0] = 1
    few, many = TritonOps().product(x[:-1].float(), weight), twin(x, weight)
    products, error = exactly(x[:-1], weight)
    assert_rounded(few, products, error)
    assert ((many[:-1].double() - products).abs() > error + products.abs() * 2**-8).any()
