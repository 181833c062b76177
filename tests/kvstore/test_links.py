"""Whose a buffer is while a block comes from another store, and what of it may come late: on a transport that a test moves by hand."""

import asyncio
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from kvrelay.common.access import PodAccess
from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import BlockId, Epoch, Fingerprint, NodeId
from kvrelay.common.layout import KvDtype
from kvrelay.common.nodes import NodeRecord
from kvrelay.kvstore.peers.arrivals import Arrival, Arrivals
from kvrelay.kvstore.peers.fetcher import Fetcher
from kvrelay.kvstore.peers.link import Link
from kvrelay.kvstore.tiers.base import Corrupt, TierFailed
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.transfer.transport import Buffer, CloseCallback, Inbox, Verdict

pytestmark = pytest.mark.unit

SIZE = 1000
PAYLOAD = bytes(range(250)) * 4
PLAIN = BlockInfo(
    id=BlockId(bytes(16)),
    head=BlockId(bytes(16)),
    fingerprint=Fingerprint("m"),
    shape="0" * 16,
    dtype=KvDtype.FLOAT32,
    size=SIZE,
)
INFO = BlockInfo(
    id=PLAIN.id,
    head=PLAIN.head,
    fingerprint=PLAIN.fingerprint,
    shape=PLAIN.shape,
    dtype=PLAIN.dtype,
    size=SIZE,
    checksum=checksum(PLAIN, memoryview(PAYLOAD)),
)


@pytest.fixture
def record() -> Iterator[NodeRecord]:
    """Of a store that says nothing: calls to it hang until they are ended."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield NodeRecord(
            node_id=NodeId("far"),
            epoch=Epoch("0" * 16),
            grpc_address=f"127.0.0.1:{silent.getsockname()[1]}",
            http_address="127.0.0.1:1",
            version="1",
            transfer_address=b"far",
        )


class Hand:
    """A transport whose only peer loses what is landing when the test says so."""

    name = "hand"
    address = b"near"
    bytes_sent = 0
    bytes_received = 0

    def __init__(self) -> None:
        self.closed = False
        self.landing: list[Arrival] = []

    def start(self, inbox: Inbox) -> None: ...

    def resume(self) -> None: ...

    def connect(self, address: bytes, on_closed: CloseCallback) -> "Hand":
        self.closed = False
        return self

    def send(self, tag: int, buffer: Buffer) -> asyncio.Future[None]:
        raise AssertionError("nothing is sent")

    def lose(self) -> None:
        for arrival in self.landing:
            arrival.lost(TransferFailed("the connection is closed"))

    def close(self) -> None:
        self.closed = True


class Case:
    def __init__(self, record: NodeRecord, seconds: float = 30.0) -> None:
        self.record = record
        self.hand = Hand()
        self.arrivals = Arrivals()
        self.fetcher = Fetcher(self.hand, self.arrivals, PodAccess(), seconds)  # type: ignore[arg-type]
        self.room = bytearray(b"\xa5" * (SIZE + 8))

    def get(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self.fetcher.get(self.record, INFO, memoryview(self.room)))

    async def expected(self) -> int:
        """The tag of the one message that is expected."""
        async with asyncio.timeout(5):
            while not len(self.arrivals):
                await asyncio.sleep(0)
        (tag,) = self.arrivals._expected
        return tag

    def accept(self, tag: int) -> Arrival:
        landing = self.arrivals.accept(tag, SIZE)
        assert isinstance(landing, Arrival)
        self.hand.landing.append(landing)
        return landing


async def test_a_block_lands_in_its_room(record: NodeRecord) -> None:
    case = Case(record)
    got = case.get()
    landing = case.accept(await case.expected())
    landing.buffer[:] = np.frombuffer(PAYLOAD, np.uint8)
    landing.landed()
    await got
    assert bytes(case.room) == PAYLOAD + b"\xa5" * 8
    assert len(case.arrivals) == 0
    await case.fetcher.close()


async def test_one_that_is_damaged_is_said_to_be(record: NodeRecord) -> None:
    case = Case(record)
    got = case.get()
    landing = case.accept(await case.expected())
    landing.buffer[:] = 7
    landing.landed()
    with pytest.raises(Corrupt):
        await got
    await case.fetcher.close()


async def test_what_is_not_expected_is_drained(record: NodeRecord) -> None:
    case = Case(record)
    assert case.arrivals.accept(1, SIZE) is Verdict.DRAIN
    got = case.get()
    tag = await case.expected()
    assert case.arrivals.accept(tag, SIZE + 1) is Verdict.DRAIN
    with pytest.raises(TierFailed, match="1001 bytes"):
        await got
    assert case.arrivals.accept(tag, SIZE) is Verdict.DRAIN
    assert bytes(case.room) == b"\xa5" * (SIZE + 8)


async def test_one_that_does_not_come_is_forgotten(record: NodeRecord) -> None:
    case = Case(record, seconds=0.05)
    got = case.get()
    tag = await case.expected()
    with pytest.raises(TierFailed, match="nothing has come"):
        await got
    assert case.hand.closed
    assert case.arrivals.accept(tag, SIZE) is Verdict.DRAIN, "its room is someone else's by now"
    assert not case.fetcher.usable(record)


@pytest.mark.parametrize("ending", ["late", "cancelled"])
async def test_what_is_landing_is_waited_for(record: NodeRecord, ending: str) -> None:
    """By force, and however often the waiting is cancelled: until then the transport may write."""
    case = Case(record, seconds=0.05 if ending == "late" else 30.0)
    got = case.get()
    case.accept(await case.expected())
    if ending == "cancelled":
        got.cancel()
    async with asyncio.timeout(5):
        while not case.hand.closed:
            await asyncio.sleep(0.001)
    for _ in range(5):
        got.cancel()
        await asyncio.sleep(0.01)
    assert not got.done()
    case.hand.lose()
    with pytest.raises(asyncio.CancelledError):
        await got


async def test_a_cut_link_ends_all_that_is_wanted(record: NodeRecord) -> None:
    hand, arrivals = Hand(), Arrivals()
    link = Link(record, hand, arrivals, PodAccess(), 30.0)  # type: ignore[arg-type]
    room = bytearray(SIZE)
    wanted = [asyncio.create_task(link.get(INFO, memoryview(room))) for _ in range(3)]
    async with asyncio.timeout(5):
        while len(arrivals) < 3:
            await asyncio.sleep(0)
    await link.close()
    for one in wanted:
        with pytest.raises(TransferFailed, match="cut"):
            await one
    assert len(arrivals) == 0
    with pytest.raises(TransferFailed, match="cut"):
        await link.get(INFO, memoryview(room))
