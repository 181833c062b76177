"""Whose a buffer is while a block comes from another store, and what of it may come late: on a transport that a test moves by hand."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvrelay.common.access import PodAccess
from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.common.ids import BlockId, Epoch, Fingerprint, NodeId
from kvrelay.common.layout import KvDtype
from kvrelay.common.nodes import NodeRecord
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.memory import MemoryTier
from kvrelay.kvstore.peers.arrivals import Arrivals, Message
from kvrelay.kvstore.peers.fetcher import Fetcher
from kvrelay.kvstore.peers.link import Link
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.tiers.base import Corrupt, TierFailed
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.transfer.transport import Buffer, CloseCallback, Inbox, Verdict

pytestmark = pytest.mark.unit

SIZE = 4096
PAYLOAD = bytes(range(256)) * 16


def info_of(number: int) -> BlockInfo:
    plain = BlockInfo(
        id=BlockId(number.to_bytes(16, "big")),
        head=BlockId(bytes(16)),
        fingerprint=Fingerprint("m"),
        shape="0" * 16,
        dtype=KvDtype.FLOAT32,
        size=SIZE,
    )
    return msgspec.structs.replace(plain, checksum=checksum(plain, memoryview(PAYLOAD)))


INFOS = [info_of(number) for number in range(4)]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryTier]:
    """For five blocks."""
    arena = Arena(tmp_path / "arena", 5 * SIZE)
    yield MemoryTier(arena, make_policy("lru", arena.size))
    arena.close()


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
        self.landing: list[Message] = []

    def start(self, inbox: Inbox) -> None: ...

    def resume(self) -> None: ...

    def connect(self, address: bytes, on_closed: CloseCallback) -> "Hand":
        self.closed = False
        return self

    def send(self, tag: int, buffer: Buffer) -> asyncio.Future[None]:
        raise AssertionError("nothing is sent")

    def lose(self) -> None:
        for message in self.landing:
            message.lost(TransferFailed("the connection is closed"))

    def close(self) -> None:
        self.closed = True


class Case:
    """Blocks that are fetched together, into rooms one behind the other."""

    def __init__(self, record: NodeRecord, memory: MemoryTier, seconds: float = 30.0, count: int = 1) -> None:
        self.record = record
        self.memory = memory
        self.hand = Hand()
        self.arrivals = Arrivals(memory.arena)
        self.fetcher = Fetcher(self.hand, self.arrivals, PodAccess(), seconds)  # type: ignore[arg-type]
        self.slots = [slot for info in INFOS[:count] if (slot := memory.allocate(info)) is not None]
        memory.arena.view[:] = b"\xa5" * memory.arena.size

    def get(self) -> "asyncio.Task[list[KvrelayError | None]]":
        return asyncio.create_task(self.fetcher.get(self.record, self.memory, self.slots))

    @property
    def held(self) -> bytes:
        """All of memory."""
        return bytes(self.memory.arena.view)

    async def expected(self) -> list[int]:
        """The tags of what is expected, in order."""
        async with asyncio.timeout(5):
            while not len(self.arrivals):
                await asyncio.sleep(0)
        return list(self.arrivals._expected)

    def accept(self, tag: int, length: int = SIZE) -> Message:
        landing = self.arrivals.accept(tag, length)
        assert isinstance(landing, Message)
        self.hand.landing.append(landing)
        return landing

    def land(self, tag: int, payload: bytes = PAYLOAD) -> None:
        landing = self.accept(tag, len(payload))
        landing.buffer[:] = np.frombuffer(payload, np.uint8)
        landing.landed()


async def test_blocks_land_in_their_rooms(record: NodeRecord, memory: MemoryTier) -> None:
    case = Case(record, memory, count=4)
    got = case.get()
    for tag in reversed(await case.expected()):
        assert not got.done()
        case.land(tag)
    assert await got == [None] * 4
    assert case.held == 4 * PAYLOAD + b"\xa5" * SIZE
    assert len(case.arrivals) == 0
    await case.fetcher.close()


@pytest.mark.parametrize("cuts", [[4], [1, 3], [2, 2], [1, 2, 1]])
async def test_blocks_come_several_in_a_message(record: NodeRecord, memory: MemoryTier, cuts: list[int]) -> None:
    """As many as the sender has one behind the other: the first one's tag names them all."""
    case = Case(record, memory, count=4)
    got = case.get()
    tags = await case.expected()
    for count in cuts:
        case.land(tags[0], count * PAYLOAD)
        del tags[:count]
    assert await got == [None] * 4
    assert case.held == 4 * PAYLOAD + b"\xa5" * SIZE
    await case.fetcher.close()


async def test_blocks_that_do_not_lie_together_do_not_come_together(record: NodeRecord, memory: MemoryTier) -> None:
    case = Case(record, memory, count=4)
    memory.give_up(case.slots.pop(1))
    got = case.get()
    first, second, third = await case.expected()
    assert case.arrivals.accept(first, 2 * SIZE) is Verdict.DRAIN
    case.land(second, 2 * PAYLOAD)
    outcomes = await got
    assert isinstance(outcomes[0], TierFailed)
    assert outcomes[1:] == [None, None]
    assert case.held == b"\xa5" * 2 * SIZE + 2 * PAYLOAD + b"\xa5" * SIZE
    assert case.arrivals.accept(third, SIZE) is Verdict.DRAIN


@pytest.mark.parametrize("length", [SIZE - 1, 2 * SIZE - 1, 5 * SIZE])
async def test_a_message_that_ends_within_a_block_is_drained(
    record: NodeRecord, memory: MemoryTier, length: int
) -> None:
    case = Case(record, memory, count=4)
    got = case.get()
    tags = await case.expected()
    assert case.arrivals.accept(tags[0], length) is Verdict.DRAIN
    for tag in tags[-(-length // SIZE) :]:
        case.land(tag)
    touched = min(4, -(-length // SIZE))
    assert [isinstance(outcome, TierFailed) for outcome in await got] == [True] * touched + [False] * (4 - touched)
    assert case.held == b"\xa5" * touched * SIZE + (4 - touched) * PAYLOAD + b"\xa5" * SIZE


async def test_no_message_lands_where_another_is_landing(record: NodeRecord, memory: MemoryTier) -> None:
    case = Case(record, memory, count=4)
    got = case.get()
    tags = await case.expected()
    landing = case.accept(tags[1])
    assert case.arrivals.accept(tags[0], 3 * SIZE) is Verdict.DRAIN
    landing.buffer[:] = np.frombuffer(PAYLOAD, np.uint8)
    landing.landed()
    case.land(tags[3])
    outcomes = await got
    assert [isinstance(outcome, TierFailed) for outcome in outcomes] == [True, False, True, False]


async def test_one_of_them_that_is_damaged_is_said_to_be(record: NodeRecord, memory: MemoryTier) -> None:
    case = Case(record, memory, count=4)
    got = case.get()
    for number, tag in enumerate(await case.expected()):
        case.land(tag, bytes(SIZE) if number == 1 else PAYLOAD)
    outcomes = await got
    assert [type(outcome) for outcome in outcomes] == [type(None), Corrupt, type(None), type(None)]
    assert case.fetcher.usable(record)
    await case.fetcher.close()


async def test_what_is_not_expected_is_drained(record: NodeRecord, memory: MemoryTier) -> None:
    case = Case(record, memory)
    assert case.arrivals.accept(1, SIZE) is Verdict.DRAIN
    got = case.get()
    (tag,) = await case.expected()
    assert case.arrivals.accept(tag, SIZE + 1) is Verdict.DRAIN
    (outcome,) = await got
    assert isinstance(outcome, TierFailed)
    assert f"{SIZE + 1} bytes" in outcome.message
    assert case.arrivals.accept(tag, SIZE) is Verdict.DRAIN
    assert case.held == b"\xa5" * 5 * SIZE


async def test_those_that_do_not_come_are_forgotten_and_those_that_came_stay(
    record: NodeRecord, memory: MemoryTier
) -> None:
    case = Case(record, memory, seconds=0.05, count=4)
    got = case.get()
    first, *others = await case.expected()
    case.land(first)
    outcomes = await got
    assert outcomes[0] is None
    for outcome in outcomes[1:]:
        assert isinstance(outcome, TierFailed)
        assert "nothing has come" in outcome.message
    assert case.hand.closed
    assert all(case.arrivals.accept(tag, SIZE) is Verdict.DRAIN for tag in others), (
        "their room is someone else's by now"
    )
    assert not case.fetcher.usable(record)


async def test_what_keeps_coming_may_take_longer(record: NodeRecord, memory: MemoryTier) -> None:
    """Time counts from what came last, of whatever run."""
    case = Case(record, memory, seconds=1.0, count=4)
    got = case.get()
    for tag in await case.expected():
        await asyncio.sleep(0.4)
        case.land(tag)
    assert await got == [None] * 4
    await case.fetcher.close()


@pytest.mark.parametrize("ending", ["late", "cancelled"])
async def test_what_is_landing_is_waited_for(record: NodeRecord, memory: MemoryTier, ending: str) -> None:
    """By force, and however often the waiting is cancelled: until then the transport may write."""
    case = Case(record, memory, seconds=0.05 if ending == "late" else 30.0, count=4)
    got = case.get()
    case.accept((await case.expected())[2])
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
    assert len(case.arrivals) == 0


async def test_a_cut_link_ends_all_that_is_wanted(record: NodeRecord, memory: MemoryTier) -> None:
    case = Case(record, memory, count=2)
    link = Link(record, case.hand, case.arrivals, PodAccess(), 30.0)  # type: ignore[arg-type]
    wanted = [asyncio.create_task(link.get(case.slots)) for _ in range(3)]
    async with asyncio.timeout(5):
        while len(case.arrivals) < 6:
            await asyncio.sleep(0)
    await link.close()
    for outcomes in [*await asyncio.gather(*wanted), await link.get(case.slots)]:
        assert [type(outcome) for outcome in outcomes] == [TransferFailed] * 2
        assert all(outcome is not None and "cut" in outcome.message for outcome in outcomes)
    assert len(case.arrivals) == 0
