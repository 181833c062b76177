"""The parts that need no connection: checksum, frames, coverage, staging."""

import asyncio
import struct
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.transfer.checksum import checksum, leaves
from kvrelay.transfer.control import Gone, Identity
from kvrelay.transfer.copies import Part
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.frame import (
    HEADER_BYTES,
    IS_HEADER,
    MAX_FRAMES,
    ChecksumError,
    FrameRejected,
    Header,
    make_tag,
    open_header,
    split_tag,
)
from kvrelay.transfer.link import Dialer, Link
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.pending import Pending, Rectangle
from kvrelay.transfer.staging import Staging, host_memory
from kvrelay.transfer.transport import Buffer
from tests.transfer.kv import make_layout

pytestmark = pytest.mark.unit

HEADER = Header(0, Part(3, 2, 16, 4, KvDtype.FLOAT32), 1024, 7)
TAG = make_tag(0xABCDEF0123, 5)


def sealed(payload: Buffer, tag: int = TAG) -> Buffer:
    return HEADER.seal(tag, leaves(payload.data)).copy()


def opened(head: Buffer, payload: Buffer, tag: int = TAG) -> Header:
    header, value = open_header(head, checked=True)
    header.check(tag, value, leaves(payload.data))
    return header


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
    assert checksum(0x0123456789, 42, 7, b"head", leaves(memoryview(payload))) == expected


def test_checksum_is_the_tree_that_is_written_down() -> None:
    data = payload_of(40000).tobytes()
    values = [xxhash.xxh3_64_intdigest(data[i : i + 16384]) for i in (0, 16384, 32768)]
    seed = xxhash.xxh3_64_intdigest(struct.pack("<QQQ", 1, 2, 3))
    expected = xxhash.xxh3_64_intdigest(struct.pack("<3Q", *values) + b"h", seed)
    assert checksum(1, 2, 3, b"h", leaves(memoryview(data))) == expected


def test_a_frame_opens_as_it_was_sealed() -> None:
    payload = payload_of(1024)
    assert opened(sealed(payload), payload) == HEADER


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
    payload = payload_of(1024)
    head = sealed(payload)
    DAMAGE[damage](payload)
    with pytest.raises(ChecksumError):
        opened(head, payload)


def test_leaves_cannot_change_places() -> None:
    payload = payload_of(3 * 16384)
    head = sealed(payload)
    _swap(payload, slice(0, 16384), slice(16384, 32768))
    with pytest.raises(ChecksumError):
        opened(head, payload)


def test_each_bit_of_the_header_matters() -> None:
    payload = payload_of(64)
    whole = sealed(payload)
    for bit in range(8 * HEADER_BYTES):
        head = whole.copy()
        head[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameRejected):
            opened(head, payload)


@pytest.mark.parametrize("tag", [make_tag(0xABCDEF0123, 6), make_tag(0xABCDEF0122, 5)])
def test_a_frame_under_another_tag_is_rejected(tag: int) -> None:
    payload = payload_of(64)
    with pytest.raises(ChecksumError):
        opened(sealed(payload), payload, tag)


def test_frames_without_checksums() -> None:
    head = HEADER.seal(TAG, None)
    assert open_header(head, checked=False) == (HEADER, 0)
    with pytest.raises(FrameRejected):
        open_header(head, checked=True)
    with pytest.raises(FrameRejected):
        open_header(head[:-1], checked=False)


def test_final_frames() -> None:
    header = Header(1, None, 99, 7)
    assert open_header(header.seal(TAG, b""), checked=True)[0] == header


def test_tags() -> None:
    tag = make_tag((1 << 40) - 1, MAX_FRAMES - 1)
    assert split_tag(tag) == ((1 << 40) - 1, MAX_FRAMES - 1, False)
    assert split_tag(tag | IS_HEADER) == ((1 << 40) - 1, MAX_FRAMES - 1, True)
    assert (tag | IS_HEADER) < 1 << 64


class TestPending:
    @staticmethod
    def taken(pending: Pending, max_rows: int) -> list[Rectangle]:
        found = []
        while pending:
            found.append(pending.take(max_rows))
        return found

    def test_layers_and_chunks_of_a_small_prompt_go_together(self) -> None:
        pending = Pending()
        for start in (0, 16):
            for layer in range(4):
                pending.add(layer, start, start + 16)
        assert self.taken(pending, 1000) == [(0, 4, 0, 32)]

    def test_what_was_taken_is_not_waited_for(self) -> None:
        pending = Pending()
        pending.add(0, 0, 16)
        assert pending.take(1000) == (0, 1, 0, 16)
        pending.add(1, 0, 16)
        pending.add(2, 0, 16)
        assert self.taken(pending, 1000) == [(1, 3, 0, 16)]

    def test_whole_layers_while_they_fit(self) -> None:
        pending = Pending()
        for layer in range(5):
            pending.add(layer, 0, 10)
        assert self.taken(pending, 25) == [(0, 2, 0, 10), (2, 4, 0, 10), (4, 5, 0, 10)]

    def test_else_tokens_of_one(self) -> None:
        pending = Pending()
        for layer in range(2):
            pending.add(layer, 0, 25)
        assert self.taken(pending, 10) == [
            *((0, 1, 0, 10), (0, 1, 10, 20), (0, 1, 20, 25)),
            *((1, 2, 0, 10), (1, 2, 10, 20), (1, 2, 20, 25)),
        ]

    @given(st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 60), st.randoms())
    def test_each_row_once(self, layers: int, chunks: list[int], max_rows: int, random: Random) -> None:
        pending, found, start = Pending(), list[Rectangle](), 0
        for size in chunks:
            for layer in range(layers):
                pending.add(layer, start, start + size)
                while pending and random.random() < 0.3:
                    found.append(pending.take(max_rows))
            start += size
        found += self.taken(pending, max_rows)
        assert all(0 < each.num_rows <= max_rows for each in found)
        rows = [(x, token) for a, b, first, end in found for x in range(a, b) for token in range(first, end)]
        assert sorted(rows) == [(layer, token) for layer in range(layers) for token in range(start)]


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
    staging = Staging(host_memory(200), slot_bytes=100)
    first, second = await staging.acquire(100), await staging.acquire(60)
    assert staging.try_acquire(1) is None
    waiting = [asyncio.ensure_future(staging.acquire(size)) for size in (100, 90, 10)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    staging.release(second)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    staging.release(first)
    third, fourth = await waiting[0], await waiting[2]
    assert (third.memory.nbytes, fourth.memory.nbytes, staging.used_bytes) == (100, 10, 110)
    assert not np.shares_memory(np.asarray(third.memory), np.asarray(fourth.memory))
    staging.release(third)
    staging.release(fourth)
    assert (staging.used_bytes, staging.num_free) == (0, staging.num_slots)


async def test_a_cancelled_waiter_gives_its_room_back() -> None:
    staging = Staging(host_memory(100), slot_bytes=100)
    first = await staging.acquire(100)
    waiter = asyncio.ensure_future(staging.acquire(100))
    await asyncio.sleep(0)
    staging.release(first)
    waiter.cancel()  # after it was served, before it woke
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (staging.used_bytes, staging.num_free) == (0, 1)


async def test_a_dial_that_has_just_failed_is_no_link() -> None:
    transport = LoopbackNetwork().transport()
    identity = Identity(pod_id=PodId("p"), epoch=Epoch("e"), layout=make_layout(), frame_bytes=1, checksum=0)
    dialer = Dialer(transport, identity, Counters(), 1, 1.0)

    async def fail() -> Link:
        raise TransferFailed("nobody there")

    dial = dialer._dials[b"there"] = asyncio.create_task(fail())
    await asyncio.wait((dial,))
    dialer.on_gone(Gone(link=1))
    assert dialer.links == []
