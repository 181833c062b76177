"""What is sent as one message, and whose pins it takes: two stores' memories over the twin of UCX."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.memory import MemoryTier
from kvrelay.kvstore.peers.arrivals import Arrival, Arrivals
from kvrelay.kvstore.peers.sender import Sender, Wanted
from kvrelay.kvstore.policy import make_policy
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.transport import Buffer
from tests.kvstore.test_promotion import SIZE, Heard, data_of, info_of

pytestmark = pytest.mark.unit

NUM_BLOCKS = 8


class Case:
    """`far` sends what `near` expects, in rooms one behind the other."""

    def __init__(self, near: Arena, far: Arena) -> None:
        self.network = LoopbackNetwork()
        self.network.tamper = self._seen
        self.messages: list[int] = []
        """Blocks of each."""
        self.near = MemoryTier(near, make_policy("lru", near.size))
        self.receiver = self.network.transport()
        self.arrivals = Arrivals(near)
        self.receiver.start(self.arrivals)
        self.chain = Chain(MemoryTier(far, make_policy("lru", far.size)), [], Heard())
        self.transport = self.network.transport()
        self.transport.start(Arrivals(far))
        self.sender = Sender(self.chain, self.transport)
        self.ended: list[Arrival] = []

    def _seen(self, tag: int, buffer: Buffer) -> Buffer:
        self.messages.append(buffer.nbytes // SIZE)
        return buffer

    def store(self, *numbers: int) -> None:
        for number in numbers:
            slot = self.chain.begin(info_of(number))
            assert slot is not None
            with self.chain.memory.data(slot) as room:
                room[:] = data_of(number)
            self.chain.commit(slot, info_of(number).checksum)

    def expect(self, *numbers: int) -> list[Arrival]:
        slots = [slot for number in numbers if (slot := self.near.allocate(info_of(number))) is not None]
        return self.arrivals.expect(slots, self.ended.append)

    async def send(self, arrivals: list[Arrival]) -> list[int]:
        """The places of those that are missing."""
        wanted = [
            Wanted(
                a.slot.info.id, a.tag, a.slot.info.size, a.slot.info.checksum, before is not None and before.behind is a
            )
            for a, before in zip(arrivals, [None, *arrivals[:-1]], strict=True)
        ]
        async with asyncio.timeout(5):
            return [m async for some in self.sender.send(self.receiver.address, 1, wanted, 5.0) for m in some]

    def whole(self) -> list[int]:
        """The numbers of the blocks that have come."""
        came = [arrival for arrival in self.ended if arrival.error is None]
        assert all(self.near.is_whole(arrival.slot) for arrival in came)
        return sorted(int.from_bytes(arrival.slot.info.id, "big") for arrival in came)

    @property
    def num_pins(self) -> int:
        return sum(slot.pins for slot in self.chain.memory.slots())


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    arenas = [Arena(tmp_path / name, NUM_BLOCKS * SIZE) for name in ("near", "far")]
    case = Case(*arenas)
    yield case
    assert case.num_pins == 0
    case.sender.close()
    for arena in arenas:
        arena.close()


async def test_what_lies_together_goes_together(case: Case) -> None:
    case.store(*range(6))
    assert await case.send(case.expect(*range(6))) == []
    assert (case.messages, case.whole()) == ([6], [0, 1, 2, 3, 4, 5])


async def test_a_gap_at_either_end_parts_a_message(case: Case) -> None:
    case.store(0, 1, 7, 2, 3)
    arrivals = case.expect(0, 1, 2, 6, 3)
    case.arrivals.forget(arrivals.pop(3))
    assert await case.send(arrivals) == []
    assert (case.messages, case.whole()) == ([2, 1, 1], [0, 1, 2, 3])


async def test_blocks_in_another_order_go_by_themselves(case: Case) -> None:
    case.store(3, 2, 1, 0)
    assert await case.send(case.expect(*range(4))) == []
    assert (case.messages, case.whole()) == ([1, 1, 1, 1], [0, 1, 2, 3])


async def test_one_that_is_missing_parts_a_message(case: Case) -> None:
    case.store(*range(5))
    await case.chain.remove(info_of(2).id)
    assert await case.send(case.expect(*range(5))) == [2]
    assert (case.messages, case.whole()) == ([2, 2], [0, 1, 3, 4])


async def test_one_with_another_checksum_is_missing(case: Case) -> None:
    case.store(0)
    slot = case.chain.begin(info_of(1))
    assert slot is not None
    case.chain.commit(slot, 77)
    case.store(2)
    assert await case.send(case.expect(*range(3))) == [1]
    assert (case.messages, case.whole()) == ([1, 1], [0, 2])


async def test_a_receiver_that_dies_leaves_no_pin(case: Case) -> None:
    case.store(*range(4))
    case.receiver.freeze()
    sending = asyncio.create_task(case.send(case.expect(*range(4))))
    async with asyncio.timeout(5):
        while case.num_pins < 4:
            await asyncio.sleep(0)
    case.receiver.kill()
    with pytest.raises(KvrelayError) as raised:
        await sending
    assert isinstance(raised.value, TransferFailed)
    assert case.whole() == []
