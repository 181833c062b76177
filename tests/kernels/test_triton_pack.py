"""KV packed, unpacked and hashed, against torch and xxhash."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.kernels import reference
from kvrelay.transfer import checksum
from tests.kernels.triton_device import DEVICE, KV_DTYPES, ON_GPU

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.triton import pack as pack_module
from kvrelay.kernels.triton.checksum import leaves
from kvrelay.kernels.triton.pack import pack, unpack

# numpy says so where the interpreter makes infinity of what is too large for float16
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")]

SPANS, ROWS = (5, 6, 16), (37, 2, 1)
"""Of packed: runs, planes, rows of a run."""


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of all sizes, down to subnormal numbers of float16 and up to what is too large for it."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return reference.narrow(x * torch.logspace(-8, 6, shape[-1]), dtype).to(DEVICE)


def places(runs: int, length: int, slots: int, seed: int = 0) -> torch.Tensor:
    order = torch.randperm(slots // length, generator=torch.Generator().manual_seed(seed))
    return order[:runs].mul(length).to(DEVICE)


def memory(shape: tuple[int, int, int], row: int, dtype: torch.dtype) -> torch.Tensor:
    """For runs one after the other where they are long, for planes where they are single rows, as frames have them."""
    runs, planes, length = shape
    if length > 1:
        return torch.zeros(runs, planes, length, row, dtype=dtype, device=DEVICE)
    return torch.zeros(planes, runs, length, row, dtype=dtype, device=DEVICE).transpose(0, 1)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaN aside."""
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("row", [192, 40])
@pytest.mark.parametrize("shape", [SPANS, ROWS], ids=["spans", "rows"])
@pytest.mark.parametrize("theirs", KV_DTYPES)
@pytest.mark.parametrize("own", KV_DTYPES)
def test_as_torch(own: torch.dtype, theirs: torch.dtype, shape: tuple[int, int, int], row: int) -> None:
    runs, num_planes, length = shape
    planes = drawn(num_planes, 96, row, dtype=own)
    planes[0, :, 0] = float("nan")
    planes[1, :, :2] = reference.narrow(torch.tensor([float("inf"), float("-inf")], device=DEVICE), own)
    slots = places(runs, length, 96)
    found, expected = memory(shape, row, theirs), memory(shape, row, theirs)
    pack(planes, slots, found)
    reference.pack(planes, slots, expected)
    same(found, expected)

    back, expected_back = torch.zeros_like(planes), torch.zeros_like(planes)
    elsewhere = places(runs, length, 96, seed=1)
    unpack(back, elsewhere, found)
    reference.unpack(expected_back, elsewhere, found)
    same(back, expected_back)
    assert len(back.float().abs().nan_to_num(1).amax((0, 2)).nonzero()) == runs * length, "no other row is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_bits_are_copied(dtype: torch.dtype) -> None:
    """Whatever they stand for: NaN has many."""
    raw = torch.randint(0, 256, (4, 64, 96 * dtype.itemsize), generator=torch.Generator().manual_seed(0)).byte()
    planes = raw.to(DEVICE).view(dtype)
    slots = places(3, 16, 64)
    packed = torch.zeros(3, 4, 16, 96, dtype=dtype, device=DEVICE)
    pack(planes, slots, packed)
    for run, slot in zip(packed.view(torch.uint8), slots.tolist(), strict=True):
        assert torch.equal(run, planes.view(torch.uint8)[:, slot : slot + 16])
    back = torch.zeros_like(planes)
    unpack(back, slots, packed)
    kept = (slots[:, None] + torch.arange(16, device=DEVICE)).flatten()
    assert torch.equal(back.view(torch.uint8)[:, kept], planes.view(torch.uint8)[:, kept])


@pytest.mark.parametrize("shape", [SPANS, ROWS], ids=["spans", "rows"])
def test_by_many_programs_a_run(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "_PROGRAM_BYTES", 128)
    planes = drawn(shape[1], 96, 40, dtype=torch.float32)
    slots = places(shape[0], shape[2], 96)
    found, expected = memory(shape, 40, torch.float16), memory(shape, 40, torch.float16)
    pack(planes, slots, found)
    reference.pack(planes, slots, expected)
    same(found, expected)


def test_nothing_to_pack() -> None:
    planes = torch.ones(2, 4, 8, device=DEVICE)
    packed = torch.empty(0, 2, 1, 8, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    pack(planes, slots, packed)
    unpack(planes, slots, packed)
    assert planes.eq(1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="of 6 GB, on a GPU")
def test_beyond_what_32_bits_count() -> None:
    planes = torch.zeros(3, 1 << 20, 1 << 10, dtype=torch.float16, device=DEVICE)
    packed = torch.ones(2, 3, 16, 1 << 10, dtype=torch.float16, device=DEVICE)
    slots = torch.tensor([(1 << 20) - 16, 32], device=DEVICE)
    unpack(planes, slots, packed * torch.arange(1, 3, device=DEVICE)[:, None, None, None])
    assert planes[2, -16:].eq(1).all()
    assert planes[2, 32:48].eq(2).all()
    assert not planes[:, 48:-16].any()
    found = torch.zeros_like(packed)
    pack(planes, slots, found)
    assert torch.equal(found[:, 2, 3, 5].cpu(), torch.tensor([1, 2], dtype=torch.float16))


def hashed(data: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in leaves(data).cpu()]


@settings(max_examples=25, deadline=None)
@given(
    whole=st.integers(0, 2),
    stripes=st.sampled_from([0, 4, 5, 15, 16, 17, 32, 33, 96, 128, 240, 255]),
    count=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_leaves_are_xxhashs(whole: int, stripes: int, count: int, seed: int) -> None:
    size = whole * reference.LEAF_BYTES + 64 * stripes or 1024
    data = torch.randint(0, 256, (count, size), generator=torch.Generator().manual_seed(seed)).byte()
    assert hashed(data.to(DEVICE)) == [checksum.leaves(row.numpy().data) for row in data]


@pytest.mark.parametrize("byte", [0, 255])
def test_leaves_of_what_is_all_alike(byte: int) -> None:
    data = torch.full((1, 2 * reference.LEAF_BYTES), byte, dtype=torch.uint8)
    assert hashed(data.to(DEVICE)) == [checksum.leaves(data[0].numpy().data)]


def test_leaves_of_what_lies_apart() -> None:
    data = torch.randint(0, 256, (3, 2048), generator=torch.Generator().manual_seed(0)).byte()
    assert hashed(data.to(DEVICE)[:, 512:1536]) == [checksum.leaves(row[512:1536].numpy().data) for row in data]


@pytest.mark.parametrize("size", [0, 64, 192, 1000, reference.LEAF_BYTES + 64])
def test_no_such_leaf(size: int) -> None:
    with pytest.raises(ValueError, match="not hashed"):
        leaves(torch.zeros(1, size, dtype=torch.uint8, device=DEVICE))


def test_twin_of_the_leaves() -> None:
    assert reference.LEAF_BYTES == checksum.LEAF_BYTES
    data = torch.arange(40_000).remainder(251).byte().view(2, -1)
    assert [row.numpy().tobytes() for row in reference.leaves(data)] == [
        checksum.leaves(row.numpy().data) for row in data
    ]
