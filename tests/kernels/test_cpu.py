"""The compiled kernels against their twins in plain torch, and against float64 where a twin rounds as they do."""

import itertools

import numpy as np
import pytest
import torch
from numba import njit

from kvrelay.kernels.cpu import compiled
from kvrelay.kernels.cpu.ops import CompiledOps, DecodeKernel
from kvrelay.kernels.ops import Norm
from kvrelay.kernels.reference import ReferenceOps, paged_decode, rms_norm

pytestmark = pytest.mark.kernels

DTYPES = [torch.float32, torch.bfloat16]
# One rounding to 8 bits of mantissa is up to 2^-8 of the value; twins that round at other points differ by a few of them.
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7}}
ROWS = [1, 3, 8, 65]


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    torch.manual_seed(0)
    torch.set_num_threads(request.param)
    return int(request.param)


def norm(*shape: int) -> Norm:
    return Norm(torch.rand(shape) + 0.5, torch.tensor(1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 48, 576])
@pytest.mark.parametrize("rows", ROWS)
def test_add_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    hidden, delta, weight = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype), norm(width)
    own, twin = hidden.clone(), hidden.clone()
    got = CompiledOps(dtype).add_norm(own, delta, weight)
    expected = ReferenceOps().add_norm(twin, delta, weight)
    assert torch.equal(own, twin)
    assert not torch.equal(own, hidden)
    torch.testing.assert_close(got, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(CompiledOps(dtype).add_norm(own, None, weight), expected, **TOLERANCE[dtype])
    assert torch.equal(own, twin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [2, 6, 64])
@pytest.mark.parametrize("rows", ROWS)
def test_rotate(rows: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    """Queries and keys of a buffer that also holds values, which stay."""
    qkv = torch.randn(rows, 15, dim).to(dtype)
    angles = torch.randn(rows, 1, dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = norm(12, dim) if normed else None
    before = qkv.clone()
    got = CompiledOps(dtype).rotate(qkv[:, :12], cos, sin, weight)
    torch.testing.assert_close(got, ReferenceOps().rotate(before[:, :12], cos, sin, weight), **TOLERANCE[dtype])
    assert torch.equal(qkv[:, 12:], before[:, 12:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 80, 1536])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_gate(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    got = CompiledOps(dtype).silu_gate(gate_up)
    torch.testing.assert_close(
        got, ReferenceOps().silu_gate(gate_up), rtol=2e-6 if dtype is torch.float32 else 2**-7, atol=1e-5
    )


def test_silu_gate_at_the_ends() -> None:
    values = [0.0, -0.0, 88.0, -88.0, 1e30, -1e30, float("inf"), float("nan")]
    gate_up = torch.tensor([values + [1.0] * len(values)])
    expected = torch.tensor([[0.0, 0.0, 88.0, 0.0, 1e30, 0.0, float("inf"), float("nan")]])
    torch.testing.assert_close(CompiledOps(torch.float32).silu_gate(gate_up), expected, equal_nan=True)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """All kinds of bits: ties, subnormals, overflow to infinity, infinities, NaNs."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(65536, dtype=torch.int64) * 65536 + 0x8000).to(torch.int32)
    numbers = torch.cat((bits, ties, ties - 1, ties + 1)).view(torch.float32)
    stored = np.zeros(len(numbers), np.uint16)
    _round(numbers.numpy().ctypes.data, stored.ctypes.data, len(numbers))
    own, theirs = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16), numbers.to(torch.bfloat16)
    assert torch.equal(own.isnan(), theirs.isnan())
    assert torch.equal(own.nan_to_num(), theirs.nan_to_num())
    back = np.zeros(len(numbers), np.float32)
    _widen(stored.ctypes.data, back.ctypes.data, len(numbers))
    torch.testing.assert_close(torch.from_numpy(back), own.float(), rtol=0, atol=0, equal_nan=True)


def test_exp() -> None:
    x = torch.cat((torch.linspace(-90, 0, 200_001), torch.tensor([-1e30, -float("inf"), float("nan"), -0.0])))
    out = np.zeros(len(x), np.float32)
    _exp(x.numpy().ctypes.data, out.ctypes.data, len(x))
    exact = x.double().exp().where(x >= -87, 0.0).where(~x.isnan(), float("nan"))
    torch.testing.assert_close(torch.from_numpy(out).double(), exact, rtol=2.0**-22, atol=0, equal_nan=True)


@njit
def _round(source, target, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        compiled.store(compiled.tensor_at(target, 2), i, compiled.load(compiled.tensor_at(source, 4), i))


@njit
def _widen(source, target, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        compiled.store(compiled.tensor_at(target, 4), i, compiled.load(compiled.tensor_at(source, 2), i))


@njit
def _exp(source, target, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        value = compiled.load(compiled.tensor_at(source, 4), i)
        compiled.store(compiled.tensor_at(target, 4), i, compiled.exp(value))


class Decode:
    """Sequences of these lengths whose blocks lie in no order; every slot that no sequence owns holds NaN."""

    def __init__(
        self, lens: list[int], heads: int, group: int, dim: int, block_size: int, dtype: torch.dtype, kv: torch.dtype
    ) -> None:
        torch.manual_seed(len(lens))
        self.lens, self.heads, self.group, self.dim, self.block_size = lens, heads, group, dim, block_size
        self.dtype, self.kv = dtype, kv
        width = max(-(-length // block_size) for length in lens) + 1
        blocks = width * len(lens) + 3
        self.tables = torch.randperm(blocks)[: width * len(lens)].to(torch.int32).view(len(lens), width)
        self.keys, self.values = (torch.full((blocks, block_size, heads, dim), float("nan"), dtype=kv) for _ in "kv")
        for table, length in zip(self.tables.tolist(), lens, strict=True):
            for t in range(length - 1):
                for side in (self.keys, self.values):
                    side[table[t // block_size], t % block_size] = torch.randn(heads, dim).to(kv)
        qkv = torch.randn(len(lens), heads * (group + 2), dim).to(dtype)
        self.q, self.k, self.v = torch.split(qkv, [heads * group, heads, heads], 1)

    def run(self, rows: slice = slice(None)) -> torch.Tensor:
        kernel = DecodeKernel(self.heads * self.group, self.heads, self.dim, self.dtype, self.kv)
        step = kernel.prepare(self.tables[rows].numpy(), np.array(self.lens[rows]), self.block_size)
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        return step(self.q[rows], self.k[rows], self.v[rows], keys, values)

    def expected(self) -> torch.Tensor:
        """In float64, on what is in the cache after `run`."""
        return paged_decode(self.q.double(), self.keys, self.values, self.tables, torch.tensor(self.lens))


LENS = [[1], [40], [255, 256, 257, 1, 16, 17], [700, 3, 513], [1, 1, 1, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(
    ("heads", "group", "dim", "block_size"),
    [(3, 3, 64, 16), (2, 4, 128, 32), (1, 7, 80, 48), (5, 1, 8, 512), (2, 2, 24, 16)],
)
@pytest.mark.parametrize(("dtype", "kv"), list(itertools.product(DTYPES, DTYPES)))
def test_decode(
    lens: list[int], heads: int, group: int, dim: int, block_size: int, dtype: torch.dtype, kv: torch.dtype
) -> None:
    decode = Decode(lens, heads, group, dim, block_size, dtype, kv)
    out = decode.run()
    torch.testing.assert_close(out.double(), decode.expected(), **TOLERANCE[dtype])
    for table, length, k, v in zip(decode.tables.tolist(), lens, decode.k, decode.v, strict=True):
        block, offset = table[(length - 1) // block_size], (length - 1) % block_size
        assert torch.equal(decode.keys[block, offset], k.to(kv))
        assert torch.equal(decode.values[block, offset], v.to(kv))
    owned = decode.keys.flatten(2).isnan().any(2)
    assert int((~owned).sum()) == sum(lens)


def test_decode_depends_on_neither_batch_nor_threads() -> None:
    decode = Decode([700, 3, 513, 256], 3, 3, 64, 16, torch.float32, torch.float32)
    together = decode.run()
    alone = torch.cat([decode.run(slice(i, i + 1)) for i in range(4)])
    torch.set_num_threads(1)
    assert torch.equal(together, alone)
    assert torch.equal(together, decode.run())


def test_nan_in_the_cache_comes_out() -> None:
    """A fault upstream must not turn into a plausible token."""
    decode = Decode([300, 20], 3, 3, 64, 16, torch.float32, torch.float32)
    decode.keys[decode.tables[0, 2], 5, 1, 7] = float("nan")
    out = decode.run()
    assert out[0, 3:6].isnan().all()
    assert not out[0, [0, 1, 2, 6, 7, 8]].isnan().any()
    assert not out[1].isnan().any()


def test_rms_norm_is_the_reference_s() -> None:
    x, weight = torch.randn(5, 64), norm(64)
    expected = torch.nn.functional.rms_norm(x.double(), (64,), weight.weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight).double(), expected, rtol=2e-6, atol=2e-6)
