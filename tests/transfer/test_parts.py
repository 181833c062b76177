"""The parts that need no connection: checksum, frames, coverage, staging."""

import asyncio
import struct
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import Epoch, PodId
from kvrelay.transfer.checksum import checksum
from kvrelay.transfer.control import Gone, Identity
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.frame import HEADER_BYTES, ChecksumError, FrameRejected, Header, make_tag, open_frame, split_tag
from kvrelay.transfer.link import Dialer, Link
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.staging import Staging
from kvrelay.transfer.transport import Buffer
from tests.transfer.kv import make_layout

pytestmark = pytest.mark.unit

HEADER = Header(group=0, layer=3, dtype=1, first_token=16, num_tokens=8, generation=7)
TAG = make_tag(0xABCDEF0123, 5)


def sealed(payload: Buffer, header: Header = HEADER, tag: int = TAG) -> Buffer:
    buffer = np.zeros(HEADER_BYTES + payload.nbytes, np.uint8)
    buffer[HEADER_BYTES:] = payload
    header.seal(buffer, tag, checked=True)
    return buffer


def payload_of(size: int) -> Buffer:
    return np.random.default_rng(1).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0xA1796BFCE96C2086),
        (1, 0xF40F4E3CAAAF6695),
        (16384, 0xDDBA70FCDC67418D),
        (16385, 0x0B56D76CDEB3736D),
        (100000, 0x9D84E3DE17229BB6),
    ],
)
def test_checksum_vectors(size: int, expected: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    assert checksum(0x0123456789, 42, 7, b"head", memoryview(payload)) == expected


def test_checksum_is_the_tree_that_is_written_down() -> None:
    data = payload_of(40000).tobytes()
    leaves = [xxhash.xxh3_64_intdigest(data[i : i + 16384]) for i in (0, 16384, 32768)]
    seed = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", 1, 2, 3))
    expected = xxhash.xxh3_64_intdigest(struct.pack("<3Q", *leaves) + b"h", seed)
    assert checksum(1, 2, 3, b"h", memoryview(data)) == expected


def test_a_frame_opens_as_it_was_sealed() -> None:
    assert open_frame(sealed(payload_of(1024)), TAG, checked=True) == HEADER


def _swap(data: Buffer, a: slice, b: slice) -> None:
    data[a], data[b] = data[b].copy(), data[a].copy()


# A payload of 8 tokens × 2 heads × 8 × float32: K then V, 512 bytes each, 64 a token, 32 a head.
DAMAGE: dict[str, Callable[[Buffer], None]] = {
    "k for v": lambda p: _swap(p, slice(0, 512), slice(512, 1024)),
    "swapped tokens": lambda p: _swap(p, slice(0, 64), slice(64, 128)),
    "swapped heads": lambda p: _swap(p, slice(0, 32), slice(32, 64)),
    "zeroed tail": lambda p: p[-64:].fill(0),
    "one bit": lambda p: p.__setitem__(700, p[700] ^ 16),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_payloads_are_rejected(damage: str) -> None:
    frame = sealed(payload_of(1024))
    DAMAGE[damage](frame[HEADER_BYTES:])
    with pytest.raises(ChecksumError):
        open_frame(frame, TAG, checked=True)


def test_leaves_cannot_change_places() -> None:
    frame = sealed(payload_of(3 * 16384))
    _swap(frame[HEADER_BYTES:], slice(0, 16384), slice(16384, 32768))
    with pytest.raises(ChecksumError):
        open_frame(frame, TAG, checked=True)


def test_each_bit_of_the_header_matters() -> None:
    whole = sealed(payload_of(64))
    for bit in range(8 * HEADER_BYTES):
        frame = whole.copy()
        frame[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameRejected):
            open_frame(frame, TAG, checked=True)


@pytest.mark.parametrize("tag", [make_tag(0xABCDEF0123, 6), make_tag(0xABCDEF0122, 5)])
def test_a_frame_under_another_tag_is_rejected(tag: int) -> None:
    with pytest.raises(ChecksumError):
        open_frame(sealed(payload_of(64)), tag, checked=True)


def test_frames_without_checksums() -> None:
    buffer = np.zeros(HEADER_BYTES + 64, np.uint8)
    HEADER.seal(buffer, TAG, checked=False)
    assert open_frame(buffer, TAG, checked=False) == HEADER
    with pytest.raises(FrameRejected):
        open_frame(buffer, TAG, checked=True)
    with pytest.raises(FrameRejected):
        open_frame(buffer[:-1], TAG, checked=False)


def test_tags() -> None:
    assert split_tag(make_tag((1 << 40) - 1, (1 << 24) - 1)) == ((1 << 40) - 1, (1 << 24) - 1)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=40))
def test_coverage_takes_each_token_once(spans: list[tuple[int, int]]) -> None:
    coverage, taken = Coverage(), set[int]()
    for start, length in spans:
        tokens = set(range(start, start + length))
        assert coverage.add(start, start + length) == (not taken & tokens)
        if not taken & tokens:
            taken |= tokens
    assert {token for start, end in coverage.spans for token in range(start, end)} == taken
    assert all(end < start for (_, end), (start, _) in zip(coverage.spans, coverage.spans[1:], strict=False))


async def test_staging_is_bounded_and_lends_in_order() -> None:
    staging = Staging(capacity_bytes=200, slot_bytes=100)
    first, second = await staging.acquire(100), await staging.acquire(60)
    assert staging.try_acquire(100) is None
    waiting = [asyncio.ensure_future(staging.acquire(size)) for size in (100, 90, 10)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    staging.release(second)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    staging.release(first)
    third, fourth = await waiting[0], await waiting[2]
    assert (third.nbytes, fourth.nbytes, staging.used_bytes) == (100, 10, 110)
    staging.release(third)
    staging.release(fourth)
    assert staging.used_bytes == 0


async def test_a_cancelled_waiter_gives_its_buffer_back() -> None:
    staging = Staging(capacity_bytes=100, slot_bytes=100)
    first = await staging.acquire(100)
    waiter = asyncio.ensure_future(staging.acquire(100))
    await asyncio.sleep(0)
    staging.release(first)
    waiter.cancel()  # after it was served, before it woke
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert staging.used_bytes == 0


async def test_a_dial_that_has_just_failed_is_no_link() -> None:
    transport = LoopbackNetwork().transport()
    identity = Identity(pod_id=PodId("p"), epoch=Epoch("e"), layout=make_layout(), frame_bytes=1, checksum=0)
    dialer = Dialer(transport, identity, Counters(), 1, 1.0)

    async def fail() -> Link:
        raise TransferFailed("nobody there")

    dial = dialer._dials[b"there"] = asyncio.create_task(fail())
    await asyncio.wait((dial,))
    dialer.on_gone(Gone(link=1))
    assert dialer._open() == []
