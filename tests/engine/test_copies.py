"""KV between a cache and a store's memory, many spans at a time: on a CPU, and as a GPU does it (without one: interpreted)."""

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.engine.cache import TORCH_DTYPES, KvCache
from kvrelay.engine.connector.base import Room, Stored
from kvrelay.engine.connector.copies import Copier
from kvrelay.engine.gpu import cache as cache_module
from kvrelay.engine.gpu.cache import DeviceKvCache
from kvrelay.engine.gpu.kernels import TWINS, CopyKernels
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.transfer.checksum import leaves
from kvrelay.transfer.copies import Part
from kvrelay.transfer.frame import ChecksumError
from tests.kernels.triton_device import DEVICE, DTYPES

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")]

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=128,
    intermediate_size=10,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_positions=4096,
    tie_embeddings=False,
    rope=RopeSettings(),
)
NUM_BLOCKS = 12
SLOTS = [7 * 32 + 16, 32, 0, 11 * 32, 3 * 32 + 16, 5 * 32, 2 * 32]
KV_DTYPES = [kv for kv, dtype in TORCH_DTYPES.items() if dtype in DTYPES]
"""What the kernels can convert here."""
Make = Callable[[KvDtype], KvCache]


def num_bytes(dtype: KvDtype) -> int:
    return NUM_BLOCKS * MODEL.num_layers * 2 * 32 * MODEL.kv_size * dtype.itemsize


def on_cpu(dtype: KvDtype) -> KvCache:
    return KvCache(MODEL, dtype, 32, num_bytes(dtype))


def by_twins(dtype: KvDtype) -> KvCache:
    return DeviceKvCache(MODEL, dtype, 32, num_bytes(dtype), torch.device("cpu"), TWINS)


def by_kernels(dtype: KvDtype) -> KvCache:
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvrelay.kernels.triton import checksum, pack

    kernels = CopyKernels(pack.pack, pack.unpack, checksum.leaves)
    return DeviceKvCache(MODEL, dtype, 32, num_bytes(dtype), torch.device(DEVICE), kernels)


KINDS = pytest.mark.parametrize("make", [on_cpu, by_twins, by_kernels])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three spans at a time, of 16 bits."""
    torch.set_num_threads(1)
    monkeypatch.setattr(cache_module, "PIECE_BYTES", 3 * 24 << 10)


def filled(cache: KvCache, seed: int = 0) -> KvCache:
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def memory(cache: KvCache, dtype: KvDtype, count: int = len(SLOTS)) -> list[NDArray[np.uint8]]:
    return list(np.zeros((count, cache.span_bytes(dtype)), np.uint8))


def same(one: KvCache, other: KvCache) -> bool:
    return torch.equal(one.data.cpu().view(torch.uint8), other.data.cpu().view(torch.uint8))


@pytest.mark.parametrize("theirs", KV_DTYPES)
@pytest.mark.parametrize("own", KV_DTYPES)
@KINDS
def test_many_spans(make: Make, own: KvDtype, theirs: KvDtype) -> None:
    """As one by one on a CPU, with the leaves of what is there."""
    cache, plain = filled(make(own)), filled(on_cpu(own))
    found, expected = memory(cache, theirs), memory(plain, theirs)
    hashed = cache.read_spans(SLOTS, found, theirs)
    for slot, span in zip(SLOTS, expected, strict=True):
        plain.read_span(slot, span, theirs)
    assert np.array_equal(found, expected)
    assert hashed == [leaves(span.data) for span in expected]

    other, plain = filled(make(own), 1), filled(on_cpu(own), 1)
    assert other.write_spans(SLOTS[::-1], found, theirs) == hashed
    for slot, span in zip(SLOTS[::-1], expected, strict=True):
        plain.write_span(slot, span, theirs)
    assert same(other, plain), "and no other slot is written"


@KINDS
def test_no_spans(make: Make) -> None:
    cache = make(KvDtype.FLOAT32)
    assert cache.read_spans([], [], KvDtype.FLOAT32) == []
    assert cache.write_spans([], [], KvDtype.FLOAT32) == []


PARTS = [(1, 1, 5, 70), (0, 3, 32, 64), (1, 2, 31, 18), (0, 3, 3, 1), (2, 1, 16, 9)]
"""First layer, layers, first token, tokens: whole spans, what is before and behind them, and neither."""


@pytest.mark.parametrize("theirs", KV_DTYPES)
@pytest.mark.parametrize("place", PARTS, ids=str)
@pytest.mark.parametrize("make", [by_twins, by_kernels])
def test_parts(make: Make, place: tuple[int, int, int, int], theirs: KvDtype) -> None:
    """As on a CPU, in layers, tokens and leaves."""
    part = Part(*place, theirs)
    cache, plain = (filled(each(KvDtype.FLOAT32)) for each in (make, on_cpu))
    size = 2 * part.num_rows * MODEL.kv_size * theirs.itemsize
    found, expected = (each.staging(size, on_device=False) for each in (cache, plain))
    hashed = cache.read_part(part, [7, 0, 3], found, hashed=True).result()
    assert hashed == plain.read_part(part, [7, 0, 3], expected, hashed=True).result()
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert hashed == leaves(np.asarray(found).data)

    checked: list[bytes] = []
    cache.write_part(part, [1, 2, 9, 4], found, checked.append).result()
    plain.write_part(part, [1, 2, 9, 4], expected, None).result()
    assert same(cache, plain)
    assert checked == [hashed]


@KINDS
def test_a_part_that_is_not_whole_is_not_written(make: Make) -> None:
    cache, part = filled(make(KvDtype.FLOAT32)), Part(0, 3, 0, 16, KvDtype.FLOAT32)

    def refuse(found: bytes) -> None:
        raise ChecksumError("of something else")

    data = cache.staging(part.num_rows * cache.token_bytes, on_device=False)
    np.asarray(data).fill(0)
    with pytest.raises(ChecksumError):
        cache.write_part(part, [3], data, refuse).result()
    assert same(cache, filled(on_cpu(KvDtype.FLOAT32)))


def test_rehearsal_changes_nothing() -> None:
    cache = filled(by_kernels(KvDtype.FLOAT16))
    assert isinstance(cache, DeviceKvCache)
    cache.rehearse()
    assert same(cache, filled(on_cpu(KvDtype.FLOAT16)))


def test_reads_and_writes_at_once() -> None:
    """Each has a stream and memory of its own. (The interpreter is for one thread.)"""
    cache = filled(by_kernels(KvDtype.FLOAT32) if DEVICE == "cuda" else by_twins(KvDtype.FLOAT32))
    before = filled(on_cpu(KvDtype.FLOAT32))
    source, target = SLOTS[:4], SLOTS[4:]
    new = memory(cache, KvDtype.FLOAT32, len(target))
    for number, span in enumerate(new):
        span.view(np.float32)[...] = number
    out, expected = (memory(cache, KvDtype.FLOAT32, len(source)) for _ in range(2))
    before.read_spans(source, expected, KvDtype.FLOAT32)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            writing = threads.submit(cache.write_spans, target, new, KvDtype.FLOAT32)
            reading = threads.submit(cache.read_spans, source, out, KvDtype.FLOAT32)
            assert writing.result() == [leaves(span.data) for span in new]
            assert reading.result() == [leaves(span.data) for span in expected]
            assert np.array_equal(out, expected)
            for span in out:
                span[...] = 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="there is no GPU to pin memory for")
def test_pinned_memory() -> None:
    """Of the kind that a store's is."""
    cache, plain = filled(by_kernels(KvDtype.FLOAT32)), filled(on_cpu(KvDtype.FLOAT32))
    size = cache.span_bytes(KvDtype.FLOAT32)
    arena = np.frombuffer(mmap.mmap(-1, size * len(SLOTS)), np.uint8)
    unpin = cache.pin(arena)
    found = [arena[start : start + size] for start in range(0, len(arena), size)]
    assert torch.from_numpy(found[1]).is_pinned()
    hashed = cache.read_spans(SLOTS, found, KvDtype.FLOAT32)
    assert hashed == plain.read_spans(SLOTS, memory(plain, KvDtype.FLOAT32), KvDtype.FLOAT32)
    assert hashed == [leaves(span.data) for span in found]
    assert cache.write_spans(SLOTS[::-1], found, KvDtype.FLOAT32) == hashed
    plain.write_spans(SLOTS[::-1], found, KvDtype.FLOAT32)
    assert same(cache, plain)
    unpin()
    assert not torch.from_numpy(found[1]).is_pinned()


class TestCopier:
    """Between a pod's cache and the memory of a store."""

    @staticmethod
    def copier(make: Make) -> Copier:
        cache = filled(make(KvDtype.FLOAT32))
        no_id = BlockId(bytes(16))
        identity = BlockInfo(
            id=no_id,
            head=no_id,
            fingerprint=Fingerprint("f"),
            shape="s",
            dtype=KvDtype.FLOAT16,
            size=cache.span_bytes(KvDtype.FLOAT16),
        )
        return Copier(cache, identity)

    def stored(self, copier: Copier) -> list[Stored]:
        data = memory(copier.cache, KvDtype.FLOAT16)
        rooms = [Room(i, span, i) for i, span in enumerate(data)]
        infos = [copier.info(bytes([i]) * 16) for i in range(len(data))]
        checksums = copier.store(rooms, infos, SLOTS)
        assert checksums == [checksum(info, span.data) for info, span in zip(infos, data, strict=True)]
        assert all(span.any() for span in data)
        return [
            Stored(msgspec.structs.replace(info, checksum=value), span, i)
            for i, (info, value, span) in enumerate(zip(infos, checksums, data, strict=True))
        ]

    @KINDS
    def test_there_and_back(self, make: Make) -> None:
        copier = self.copier(make)
        spans, other = self.stored(copier), Copier(make(KvDtype.FLOAT32), copier.identity)
        assert other.load(spans, SLOTS) == (len(SLOTS), [])
        again = memory(other.cache, KvDtype.FLOAT16)
        other.cache.read_spans(SLOTS, again, KvDtype.FLOAT16)
        assert all(np.array_equal(span.data, found) for span, found in zip(spans, again, strict=True))

    @KINDS
    def test_damaged(self, make: Make) -> None:
        """What comes before the first that is not whole is taken; all that are not are said."""
        copier = self.copier(make)
        spans = self.stored(copier)
        spans[2].data[-1] ^= 1
        spans[4] = Stored(copier.info(spans[4].info.id), spans[4].data, 4)
        other = msgspec.structs.replace(spans[5].info, id=spans[6].info.id)
        spans[5] = Stored(other, spans[5].data, 5)
        whole, damaged = copier.load(spans, SLOTS)
        assert (whole, [span.offset for span in damaged]) == (2, [2, 4, 5])

    @KINDS
    def test_of_another_size(self, make: Make) -> None:
        copier = self.copier(make)
        spans = self.stored(copier)
        half = spans[3].data[: len(spans[3].data) // 2]
        info = msgspec.structs.replace(spans[3].info, size=len(half))
        spans[3] = Stored(msgspec.structs.replace(info, checksum=checksum(info, half.data)), half, 3)
        before = copier.cache.data[:, :, SLOTS[3] // 32].clone()
        whole, damaged = copier.load(spans, SLOTS)
        assert (whole, [span.offset for span in damaged]) == (3, [3])
        assert torch.equal(copier.cache.data[:, :, SLOTS[3] // 32], before)

    @KINDS
    def test_of_several_types(self, make: Make) -> None:
        copier = self.copier(make)
        spans = self.stored(copier)
        wide = memory(copier.cache, KvDtype.FLOAT32, 2)
        copier.cache.read_spans(SLOTS[:2], wide, KvDtype.FLOAT32)
        for at, data in zip((1, 5), wide, strict=True):
            info = msgspec.structs.replace(spans[at].info, dtype=KvDtype.FLOAT32, size=len(data))
            spans[at] = Stored(msgspec.structs.replace(info, checksum=checksum(info, data.data)), data, at)
        assert copier.load(spans, SLOTS) == (len(SLOTS), [])
        found = memory(copier.cache, KvDtype.FLOAT32, 2)
        copier.cache.read_spans([SLOTS[1], SLOTS[5]], found, KvDtype.FLOAT32)
        assert np.array_equal(found, wide)
