"""Products of a few tokens against their twin in plain torch, and against float64."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvrelay.kernels.ops import Norm
from kvrelay.kernels.reference import ReferenceOps
from kvrelay.kernels.scaled import Scaled, quantize
from tests.kernels.rounding import WIDE, assert_rounded, gated, poison
from tests.kernels.triton_device import DEVICE, DTYPES, ON_GPU, ULP

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.triton import narrow as narrow_module
from kvrelay.kernels.triton.gemv import GemvConfig, gemv
from kvrelay.kernels.triton.narrow import NarrowConfig, narrow
from kvrelay.kernels.triton.ops import NARROW_TOKENS, TritonOps
from kvrelay.kernels.triton.thin import MAX_TOKENS, ThinConfig, thin

Config = GemvConfig | ThinConfig | NarrowConfig

pytestmark = pytest.mark.kernels

SMALL = [
    (1, 24, 64), (1, 10, 200), (2, 40, 200), (3, 66, 520), (16, 130, 1024), (17, 40, 200), (33, 66, 520), (70, 130, 1024), (150, 40, 200),
]  # fmt: skip
LARGE = [
    (1, 6144, 4096), (2, 4096, 4096), (1, 28672, 4096), (1, 4096, 14336), (3, 4096, 14336), (1, 128256, 4096),
    (4, 128256, 4096), (1, 4096, 1024), (2, 1024, 2048), (3, 6144, 1024), (1, 1024, 3072), (4, 1024, 3072),
    (1, 151936, 1024), (16, 28672, 4096), (7, 1536, 576), (17, 4096, 14336), (33, 28672, 4096), (64, 6144, 4096), (64, 1536, 576),
    (40, 128256, 4096), (64, 6144, 1024), (50, 1024, 3072), (256, 6144, 1024), (200, 151936, 1024), (256, 4096, 1024), (256, 1024, 2048), (200, 1024, 3072),
]  # fmt: skip
CASES = [(*shape, dtype) for shape in SMALL for dtype in DTYPES] + [
    (*shape, torch.bfloat16) for shape in LARGE
] * ON_GPU
"""Tokens, rows, columns, type."""
CONFIGS: list[tuple[int, Config]] = [
    (1, GemvConfig(2, 64, 1)),
    (1, GemvConfig(8, 256, 2)),
    (2, ThinConfig(1, 32)),
    (5, ThinConfig(2, 64, 2)),
    (2, NarrowConfig(64, 1)),
    (20, NarrowConfig(64, 2, 16)),
    (70, NarrowConfig(64, 1, tokens=32)),
    (40, NarrowConfig(128, 1, stages=2, ahead=64)),
]
if ON_GPU:
    CONFIGS += [
        (1, GemvConfig(block_n, block_k, warps, ahead=ahead))
        for block_n in (2, 4, 16)
        for block_k in (512, 2048)
        for warps in (4, 8)
        for ahead in (False, True)
    ]
    CONFIGS += [(9, ThinConfig(parts, 64, stages)) for parts in (1, 4, 8) for stages in (2, 4)]
    CONFIGS += [
        (tokens, NarrowConfig(rows, parts, 32, block, warps, 3, ahead=ahead))
        for tokens, block in ((9, 64), (17, 64), (64, 64), (130, 128), (256, 64))
        for rows, warps in ((64, 4), (128, 4), (128, 8))
        for parts in (1, 2)
        for ahead in (0, 128)
    ]
"""Tokens and how they are computed."""


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def weights(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, device=DEVICE) * columns**-0.5).to(dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Into NaN."""
    out = poison(x.new_empty(len(x), len(weight) // (1 + gated), dtype=dtype or x.dtype))
    if isinstance(config, GemvConfig) or (config is None and len(x) == 1):
        return gemv(x, weight, bias, gated=gated, out=out, config=config)
    if isinstance(config, NarrowConfig) or (config is None and len(x) > MAX_TOKENS):
        return narrow(x, weight, bias, gated=gated, out=out, config=config)
    return thin(x, weight, bias, gated=gated, out=out, config=config)


def exactly(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The products in float64, and how far sums of float32 may be from them."""
    wide = weight.double()
    return F.linear(x.double(), wide), WIDE * F.linear(x.double().abs(), wide.abs())


@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), CASES)
def test_products(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = randn(tokens, columns, dtype=dtype), weights(rows, columns, dtype)
    got = product(x, weight)
    exact, error = exactly(x, weight)
    assert_rounded(got, exact, error)
    twin = F.linear(x.float(), weight.float()).to(dtype)
    torch.testing.assert_close(got, twin, rtol=2 * ULP[dtype], atol=2 * error.max().item())
    if tokens > MAX_TOKENS and (tokens > NARROW_TOKENS or dtype is torch.float32):
        return
    assert torch.equal(TritonOps().product(x, weight), got)
    as_logits = TritonOps().product(x, weight, dtype=torch.float32)
    assert torch.equal(as_logits.to(dtype), got)


@pytest.mark.parametrize(("tokens", "rows", "columns", "dtype"), CASES)
def test_gate_and_bias(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(tokens, columns, dtype=dtype), weights(rows, columns, dtype), randn(rows, dtype=dtype)
    got = product(x, weight, bias, gated=True)
    products, errors = exactly(x, weight)
    products += bias.double()
    expected, error = gated(products, errors)
    assert_rounded(got, expected, error)
    twin = ReferenceOps().gated_product(x.float(), weight.float(), bias.float()).to(dtype)
    torch.testing.assert_close(got, twin, rtol=2 * ULP[dtype], atol=2 * error.max().item())
    if tokens <= MAX_TOKENS or (tokens <= NARROW_TOKENS and dtype is not torch.float32):
        assert torch.equal(TritonOps().gated_product(x, weight, bias), got)
    assert_rounded(product(x, weight, bias), products, errors)


@pytest.mark.parametrize(("tokens", "config"), CONFIGS, ids=str)
def test_any_config(tokens: int, config: Config) -> None:
    """The rows and columns are no multiples of a program's."""
    rows, columns = (4098, 4096 + 64) if ON_GPU else (10, 160)
    x, weight = randn(tokens, columns, dtype=torch.float32), weights(rows, columns, torch.float32)
    exact, error = exactly(x, weight)
    assert_rounded(product(x, weight, config=config), exact, error)
    assert_rounded(product(x, weight, gated=True, config=config), *gated(exact, error))


@pytest.mark.parametrize(
    ("by", "config"), [(thin, ThinConfig(4, 16)), (narrow, NarrowConfig(64, 4, 16)), (narrow, NarrowConfig(64, 1))]
)
def test_what_is_not_added(by: Callable[..., torch.Tensor], config: Config) -> None:
    """It gives the product when it is; a bias and a gate cannot wait for that."""
    x, weight, bias = (
        randn(3, 128, dtype=torch.float16),
        weights(40, 128, torch.float16),
        randn(40, dtype=torch.float16),
    )
    parts = by(x, weight, config=config, added=False)
    whole = by(x, weight, config=config)
    if config.parts == 1:
        assert torch.equal(parts, whole)
    else:
        assert (parts.shape, parts.dtype) == ((4, 3, 40), torch.float32)
        assert torch.equal(functools.reduce(torch.add, parts).half(), whole)
    assert torch.equal(by(x, weight, bias, config=config, added=False), by(x, weight, bias, config=config))
    assert by(x, weight, gated=True, config=config, added=False).shape == (3, 20)


@pytest.mark.parametrize(("by", "most"), [(thin, MAX_TOKENS), (narrow, narrow_module.MAX_TOKENS)])
def test_a_token_is_the_same_beside_others(by: Callable[..., torch.Tensor], most: int) -> None:
    """What a token gives does not depend on those that are with it, nor on chance."""
    rows, columns = (4096, 4096) if ON_GPU else (70, 192)
    dtype = DTYPES[-1]
    x, weight = randn(most, columns, dtype=dtype), weights(rows, columns, dtype)
    together = by(x, weight)
    assert torch.equal(together, by(x, weight))
    for token in range(0, most, most // 3):
        assert torch.equal(by(x[token : token + 2], weight), together[token : token + 2])


def test_what_is_refused() -> None:
    x, weight = torch.ones(MAX_TOKENS + 1, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
    with pytest.raises(ValueError, match="17 tokens are more than 16"):
        thin(x, weight)
    with pytest.raises(ValueError, match="one token, not 2"):
        gemv(x[:2], weight)
    with pytest.raises(ValueError, match="257 tokens are more than 256"):
        narrow(torch.ones(257, 64, device=DEVICE), weight)
    with pytest.raises(ValueError, match="rows of 63 are not 16 bytes apart"):
        narrow(torch.ones(5, 63, device=DEVICE), torch.ones(8, 63, device=DEVICE))
    with pytest.raises(ValueError, match="96 columns are not 2 parts of blocks of 64"):
        narrow(torch.ones(5, 96, device=DEVICE), torch.ones(8, 96, device=DEVICE), config=NarrowConfig(64, 2))
    assert thin(x[:0], weight).shape == narrow(x[:0], weight).shape == (0, 8)
    assert torch.equal(TritonOps().product(x, weight), F.linear(x, weight))
    assert TritonOps().gated_product(x[:0], weight).shape == (0, 4)


@pytest.mark.parametrize("by", [thin, narrow])
def test_nan_stays_in_its_token(by: Callable[..., torch.Tensor]) -> None:
    x, weight = torch.ones(3, 64, device=DEVICE), torch.ones(8, 64, device=DEVICE)
    x[1, 7] = float("nan")
    assert by(x, weight).isnan().all(1).tolist() == [False, True, False]
    assert product(x[1:2], weight).isnan().all()


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: kernels that start before the one before has ended")
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 24])
def test_a_chain_in_a_graph(tokens: int, in_8_bits: bool) -> None:
    """Each kernel waits for the one before, whose programs may still run as its own begin."""
    hidden, inner = 2048, 8192
    dtype = torch.bfloat16
    norm = Norm(torch.rand(hidden, device=DEVICE) + 0.5, torch.tensor(1e-5, device=DEVICE))
    layers: list[tuple[torch.Tensor | Scaled, torch.Tensor | Scaled]] = [
        (weights(2 * inner, hidden, dtype), weights(hidden, inner, dtype)) for _ in range(8)
    ]
    if in_8_bits:
        layers = [(quantize(gate_up), quantize(down)) for gate_up, down in layers]
    x, ops = randn(tokens, hidden, dtype=dtype), TritonOps()

    def chain(after: Callable[[], None]) -> torch.Tensor:
        stream = x.clone()
        delta: torch.Tensor | None = torch.zeros_like(x)
        for gate_up, down in layers:
            after()
            normed = ops.add_norm(stream, delta, norm)
            after()
            inside = ops.gated_product(normed, gate_up)
            after()
            delta = ops.added_product(inside, down, None, stream)
        after()
        return ops.add_norm(stream, delta, norm)

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(lambda: None)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, expected)
