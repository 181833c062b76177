"""Products of a few tokens against their twin in plain torch, and against float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvrelay.kernels import reference
from kvrelay.kernels.ops import Norm
from tests.kernels.rounding import WIDE, assert_rounded, poison
from tests.kernels.triton_device import DEVICE, DTYPES, ON_GPU, ULP

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.triton.gemv import MAX_TOKENS, GemvConfig, gemv

pytestmark = pytest.mark.kernels

SMALL = [(1, 24, 64), (2, 40, 200), (3, 8, 520), (4, 18, 1024)]
LARGE = [
    (1, 6144, 4096), (2, 4096, 4096), (1, 28672, 4096), (3, 4096, 14336), (1, 128256, 4096), (4, 128256, 4096),
    (1, 4096, 1024), (2, 1024, 2048), (3, 6144, 1024), (4, 1024, 3072), (1, 151936, 1024), (4, 1536, 576),
]  # fmt: skip
CASES = [(*shape, dtype) for shape in SMALL for dtype in DTYPES] + [
    (*shape, torch.bfloat16) for shape in LARGE
] * ON_GPU
"""Tokens, rows, columns, type."""
CONFIGS = [GemvConfig(2, 64, 1), GemvConfig(8, 256, 2)] + [
    GemvConfig(block_n, block_k, warps) for block_n in (2, 4, 16) for block_k in (512, 2048) for warps in (4, 8)
] * ON_GPU


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def weights(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, device=DEVICE) * columns**-0.5).to(dtype)


def norm_of(columns: int) -> Norm:
    return Norm(torch.rand(columns, device=DEVICE) + 0.5, torch.tensor(1e-5, device=DEVICE))


def exactly(x: torch.Tensor, weight: torch.Tensor, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The products in float64, and how far sums of float32 may be from them."""
    wide = x.double()
    if norm is not None:
        wide *= (wide.square().mean(1, keepdim=True) + norm.eps.double()).rsqrt() * norm.weight.double()
    return F.linear(wide, weight.double()), WIDE * F.linear(wide.abs(), weight.double().abs())


@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), CASES)
def test_products(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = randn(tokens, columns, dtype=dtype), weights(rows, columns, dtype)
    got = gemv(x, weight, out=poison(x.new_empty(tokens, rows)))
    exact, error = exactly(x, weight, None)
    assert_rounded(got, exact, error)
    torch.testing.assert_close(got, reference.gemv(x, weight), rtol=2 * ULP[dtype], atol=2 * error.max().item())
    as_logits = gemv(x, weight, out=poison(x.new_empty(tokens, rows, dtype=torch.float32)))
    assert torch.equal(as_logits.to(dtype), got)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), CASES)
def test_norm_and_residual(tokens: int, rows: int, columns: int, dtype: torch.dtype, added: bool) -> None:
    x, weight, norm = randn(tokens, columns, dtype=dtype), weights(rows, columns, dtype), norm_of(columns)
    delta = randn(tokens, columns, dtype=dtype) if added else None
    summed, twins = (poison(x) if added else None for _ in range(2))
    before = x.clone()
    got = gemv(x, weight, delta=delta, residual=summed, norm=norm, out=poison(x.new_empty(tokens, rows)))
    assert torch.equal(x, before)
    twin = reference.gemv(x, weight, delta=delta, residual=twins, norm=norm)
    if summed is not None and twins is not None:
        assert torch.equal(summed, twins)
        x = summed
    exact, error = exactly(x, weight, norm)
    assert_rounded(got, exact, error)
    torch.testing.assert_close(got, twin, rtol=2 * ULP[dtype], atol=2 * error.max().item())


@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), CASES)
def test_gate_and_bias(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, norm = randn(tokens, columns, dtype=dtype), weights(rows, columns, dtype), norm_of(columns)
    bias = randn(rows, dtype=dtype)
    got = gemv(x, weight, bias, norm=norm, gated=True, out=poison(x.new_empty(tokens, rows // 2)))
    products, errors = exactly(x, weight, norm)
    products += bias.double()
    (gate, up), (gate_error, up_error) = products.chunk(2, 1), (errors + products.abs() * WIDE).chunk(2, 1)
    # No slope of silu is over 1.1.
    error = 1.1 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * (up_error + WIDE * up.abs())
    assert_rounded(got, F.silu(gate) * up, error)
    twin = reference.gemv(x, weight, bias, norm=norm, gated=True)
    torch.testing.assert_close(got, twin, rtol=2 * ULP[dtype], atol=2 * error.max().item())
    biased = gemv(x, weight, bias, norm=norm)
    assert_rounded(biased, products, errors)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_any_config(config: GemvConfig) -> None:
    """The rows and columns are no multiples of a program's."""
    tokens, rows, columns = (4, 4098, 4096 + 72) if ON_GPU else (2, 10, 136)
    x, weight, norm = (
        randn(tokens, columns, dtype=torch.float32),
        weights(rows, columns, torch.float32),
        norm_of(columns),
    )
    exact, error = exactly(x, weight, norm)
    out = poison(x.new_empty(tokens, rows))
    assert_rounded(gemv(x, weight, norm=norm, out=out, config=config), exact, error)
    gated = gemv(x, weight, gated=True, out=poison(x.new_empty(tokens, rows // 2)), config=config)
    twin = reference.gemv(x, weight, gated=True)
    torch.testing.assert_close(gated, twin, rtol=1e-5, atol=1e-5)


def test_a_token_is_the_same_beside_others() -> None:
    """For one configuration: what a token gives does not depend on those that are with it, nor on chance."""
    rows, columns = (4096, 4096) if ON_GPU else (16, 192)
    dtype = DTYPES[-1]
    x, weight, norm = randn(MAX_TOKENS, columns, dtype=dtype), weights(rows, columns, dtype), norm_of(columns)
    config = GemvConfig(4, 512 if ON_GPU else 64, 4)
    together = gemv(x, weight, norm=norm, config=config)
    assert torch.equal(together, gemv(x, weight, norm=norm, config=config))
    for token in range(MAX_TOKENS):
        alone = gemv(x[token : token + 1], weight, norm=norm, config=config)
        assert torch.equal(alone, together[token : token + 1])


def test_what_is_refused() -> None:
    x, weight = torch.ones(MAX_TOKENS + 1, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
    with pytest.raises(ValueError, match="5 tokens"):
        gemv(x, weight)
    few = x[:2]
    for place in (None, few, x[:2]):
        with pytest.raises(ValueError, match="place"):
            gemv(few, weight, delta=few.clone(), residual=place)
    assert gemv(x[:0], weight).shape == (0, 8)


def test_nan_stays_in_its_token() -> None:
    x, weight = torch.ones(3, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
    x[1, 7] = float("nan")
    for norm in (None, norm_of(64)):
        assert gemv(x, weight, norm=norm).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: kernels that start before the one before has ended")
def test_a_chain_in_a_graph() -> None:
    """Each product waits for the one before, whose programs may still run as its own begin."""
    hidden, inner = 2048, 8192
    dtype = torch.bfloat16
    layers = [(weights(2 * inner, hidden, dtype), weights(hidden, inner, dtype), norm_of(hidden)) for _ in range(8)]
    x = randn(1, hidden, dtype=dtype)

    def chain(after: Callable[[], None]) -> torch.Tensor:
        stream, delta = x, torch.zeros_like(x)
        for gate_up, down, norm in layers:
            summed = torch.empty_like(x)
            inside = gemv(stream, gate_up, delta=delta, residual=summed, norm=norm, gated=True)
            after()
            stream, delta = summed, gemv(inside, down)
            after()
        return stream + delta

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda: None)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)
