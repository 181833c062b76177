"""The small Triton kernels of a layer against their twins in plain torch."""

import itertools
import sys

import pytest
import torch

from kvrelay.kernels.ops import Norm, choose_ops
from kvrelay.kernels.reference import ReferenceOps, narrow, rotate_and_store
from tests.kernels.rounding import WIDE, assert_rounded, poison
from tests.kernels.triton_device import DEVICE, DTYPES, KV_DTYPES, ON_GPU, ULP

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.triton import norm as norm_kernels
from kvrelay.kernels.triton import rotary
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.ops import TritonOps

# numpy, which the interpreter computes by, warns of what overflows as it should.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")]

SHAPES = [(1, 1), (3, 48), (2, 576), (5, 1000)] + [
    (1, 4096),
    (777, 1024),
    (64, 5120),
    (4096, 4096),
    (300, 8192),
] * ON_GPU


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def head_norm(*shape: int) -> Norm:
    return Norm(torch.rand(shape, device=DEVICE) + 0.5, torch.tensor(1e-5, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_add_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    hidden, delta, norm = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype), head_norm(width)
    own, twin = hidden.clone(), hidden.clone()
    got = norm_kernels.add_norm(own, delta, norm.weight, norm.eps, out=poison(hidden))
    ReferenceOps().add_norm(twin, delta, norm)
    assert torch.equal(own, twin)
    wide = twin.double()
    exact = wide * (wide.square().mean(1, keepdim=True) + norm.eps.double()).rsqrt() * norm.weight.double()
    assert_rounded(got, exact)
    assert torch.equal(TritonOps().add_norm(own, None, norm), got)
    assert torch.equal(own, twin)


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_of_parts(parts: int, dtype: torch.dtype) -> None:
    """Added in float32 in their order, and rounded, as if they had been added before."""
    hidden, norm, delta = randn(3, 72, dtype=dtype), head_norm(72), randn(parts, 3, 72)
    own, twin, one = hidden.clone(), hidden.clone(), hidden.clone()
    total = delta[0]
    for part in delta[1:]:
        total = total + part
    got = TritonOps().add_norm(own, delta, norm)
    assert torch.equal(got, TritonOps().add_norm(one, total.to(dtype), norm))
    ReferenceOps().add_norm(twin, delta, norm)
    assert torch.equal(own, one)
    assert torch.equal(own, twin)


def test_add_norm_at_the_ends() -> None:
    """Rows too wide are refused, none are nothing, and a NaN comes out in its row alone."""
    norm = head_norm(norm_kernels.WIDEST + 1)
    with pytest.raises(ValueError, match="32769"):
        TritonOps().add_norm(randn(1, norm_kernels.WIDEST + 1), None, norm)
    assert TritonOps().add_norm(randn(0, 64), None, head_norm(64)).shape == (0, 64)
    hidden = randn(3, 64)
    hidden[1, 5] = float("nan")
    assert TritonOps().add_norm(hidden, None, head_norm(64)).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 80), (2, 1536)] + [(1, 14336), (513, 3072), (4096, 14336)] * ON_GPU
)
def test_silu_gate(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, 1)
    # The exponential's argument has a rounding of its own, relative to a number of up to 16 / ln 2.
    error = (torch.nn.functional.silu(gate) * up).abs() * 2e-6
    got = silu_gate(gate_up, out=poison(gate_up[:, :width].contiguous()))
    assert_rounded(got, torch.nn.functional.silu(gate) * up, error)
    torch.testing.assert_close(got, ReferenceOps().silu_gate(gate_up), rtol=3 * ULP[dtype] + WIDE, atol=1e-6)


def test_silu_gate_at_the_ends() -> None:
    values = [0.0, -0.0, 88.0, -88.0, 1e30, -1e30, float("inf"), float("nan")]
    gate_up = torch.tensor([values + [1.0] * len(values)], device=DEVICE)
    expected = torch.tensor([[0.0, 0.0, 88.0, 0.0, 1e30, 0.0, float("inf"), float("nan")]], device=DEVICE)
    torch.testing.assert_close(TritonOps().silu_gate(gate_up), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "dim"), [(1, 2), (3, 6), (2, 64)] + [(65, 128), (2000, 256)] * ON_GPU)
def test_rotate(rows: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    """Queries and keys of a buffer that also holds values, which stay."""
    qkv = randn(rows, 15, dim, dtype=dtype)
    angles = randn(rows, 1, dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = head_norm(12, dim) if normed else None
    before = qkv.clone()
    got = TritonOps().rotate(qkv[:, :12], cos, sin, weight)
    exact = before[:, :12].double()
    if weight is not None:
        exact = exact * (exact.square().mean(-1, keepdim=True) + weight.eps.double()).rsqrt() * weight.weight.double()
    size = exact.abs() + exact.roll(dim // 2, -1).abs()
    assert_rounded(got, exact * cos.double() + exact.roll(dim // 2, -1) * sin.double(), size * WIDE)
    assert torch.equal(qkv[:, 12:], before[:, 12:])


class Stored:
    """T tokens at any positions, of which every third is padding; slots in no order, NaN where nothing was written."""

    def __init__(self, tokens: int, num_q: int, num_kv: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
        self.qkv = randn(tokens, num_q + 2 * num_kv, dim, dtype=dtype)
        angles = torch.arange(500, device=DEVICE).unsqueeze(1) * torch.logspace(0, -4, dim // 2, device=DEVICE)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.positions = torch.randint(0, 500, (tokens,), device=DEVICE)
        self.slots = torch.randperm(2 * tokens + 5, device=DEVICE)[:tokens]
        self.slots[2::3] = -1
        self.norm = head_norm(num_q + num_kv, dim) if normed else None
        self.num_q, self.num_kv = num_q, num_kv

    def cache(self, dtype: torch.dtype) -> torch.Tensor:
        return poison(randn(2 * len(self.qkv) + 5, self.num_kv, self.qkv.shape[-1])).to(dtype)

    def run(
        self, kv: torch.dtype, positions: torch.Tensor | None = None, kv_out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        keys, values = self.cache(kv), self.cache(kv)
        out = poison(self.qkv[:, : self.num_q].contiguous())
        at = self.positions if positions is None else positions
        rotary.rotate_and_store(self.qkv, self.cos, self.sin, at, self.slots, keys, values, self.norm, out, kv_out)
        return out, keys, values

    def twin(self, kv: torch.dtype, wide: bool = False, kv_out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        keys, values = self.cache(kv), self.cache(kv)
        qkv = self.qkv.double() if wide else self.qkv
        q = rotate_and_store(qkv, self.cos, self.sin, self.positions, self.slots, keys, values, self.norm, kv_out)
        return q, keys, values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "num_q", "num_kv", "dim"),
    [(1, 4, 4, 64), (5, 9, 3, 64), (3, 2, 1, 80)]
    + [(1, 32, 8, 128), (66, 16, 8, 128), (100, 64, 1, 64), (3000, 32, 8, 128), (257, 8, 4, 256)] * ON_GPU,
)
def test_rotate_and_store(tokens: int, num_q: int, num_kv: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    case = Stored(tokens, num_q, num_kv, dim, normed, dtype)
    before = case.qkv.clone()
    q, keys, values = case.run(dtype)
    twin_q, twin_keys, twin_values = case.twin(dtype)
    # Two products of numbers up to about 5 that may cancel.
    close = {"rtol": ULP[dtype], "atol": 10 * WIDE}
    torch.testing.assert_close(q, twin_q, **close)
    torch.testing.assert_close(keys, twin_keys, **close, equal_nan=True)
    torch.testing.assert_close(values, twin_values, rtol=0, atol=0, equal_nan=True)
    written = torch.zeros(len(keys), dtype=torch.bool, device=DEVICE)
    written[case.slots[case.slots >= 0]] = True
    assert not keys[written].isnan().any()
    assert keys[~written].isnan().all()
    assert values[~written].isnan().all()
    assert torch.equal(case.qkv, before)
    for found, again in zip((q, keys, values), case.run(dtype, case.positions.to(torch.int32)), strict=True):
        torch.testing.assert_close(again, found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_of_all_tokens(dtype: torch.dtype) -> None:
    """Whether they are stored or not; the cache holds the same."""
    case = Stored(5, 9, 3, 64, True, dtype)
    kept, twin = (poison(randn(2, 5, 3, 64, dtype=dtype)) for _ in range(2))
    q, keys, values = case.run(dtype, kv_out=kept)
    case.twin(dtype, kv_out=twin)
    torch.testing.assert_close(kept, twin, rtol=ULP[dtype], atol=10 * WIDE)
    stored = case.slots >= 0
    assert torch.equal(kept[0, stored], keys[case.slots[stored]])
    assert torch.equal(kept[1, stored], values[case.slots[stored]])
    assert torch.equal(q, case.run(dtype)[0])


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [pair for pair in itertools.product(DTYPES, KV_DTYPES) if pair[0] is not pair[1]],
)
def test_a_cache_of_another_dtype(dtype: torch.dtype, kv: torch.dtype) -> None:
    """Holds what one of the model's own dtype would hold, rounded once more; what is too large for 8 bits becomes the largest."""
    case = Stored(5, 4, 2, 64, True, dtype)
    case.qkv[0] *= 1000
    case.qkv[1] *= 0.001
    q, keys, values = case.run(dtype)
    other_q, other_keys, other_values = case.run(kv)
    assert torch.equal(other_q, q)
    for other, own in ((other_keys, keys), (other_values, values)):
        written = ~own.isnan()
        assert torch.equal(other.float()[written], narrow(own, kv).float()[written])
    if kv is torch.float8_e4m3fn:
        assert other_values.float().nan_to_num().max() == 448


def test_the_twin_turns_as_the_model_does() -> None:
    case = Stored(7, 4, 2, 64, True, torch.float32)
    q, keys, values = case.twin(torch.float32)
    angles = case.positions.to(torch.float32)[:, None] * torch.logspace(0, -4, 32, device=DEVICE)
    cos = torch.cat((angles.cos(), angles.cos()), -1).unsqueeze(1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1)
    turned = ReferenceOps().rotate(case.qkv[:, :6], cos, sin, case.norm)
    kept = case.slots >= 0
    torch.testing.assert_close(q, turned[:, :4])
    torch.testing.assert_close(keys[case.slots[kept]], turned[kept, 4:])
    assert torch.equal(values[case.slots[kept]], case.qkv[kept, 6:])


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    ops, reason = choose_ops("cuda:1", torch.float16)
    assert (ops.name, reason) == ("triton", "triton: for cuda:1")
    assert choose_ops("cuda", torch.bfloat16, "triton")[0].name == "triton"
    assert choose_ops("cuda", torch.bfloat16, "torch")[0].name == "torch"
    assert choose_ops("mps", torch.float32)[1] == "torch: there are none for mps"
    for device, option in (("cpu", "triton"), ("cuda", "compiled")):
        with pytest.raises(ValueError, match=f"{option} kernels: there are none for {device}"):
            choose_ops(device, torch.float32, option)
    monkeypatch.setitem(sys.modules, "kvrelay.kernels.triton.ops", None)
    ops, reason = choose_ops("cuda", torch.bfloat16)
    assert ops.name == "torch"
    assert reason.startswith("torch: Triton is not there")
    with pytest.raises(ValueError, match="triton kernels: Triton is not there"):
        choose_ops("cuda", torch.bfloat16, "triton")
