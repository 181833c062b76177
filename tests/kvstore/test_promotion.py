"""Blocks that are asked for together come together, and each by itself is whole or a miss: what cuts a run cuts no more than it must."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore import promotion, supply
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.index import Entry
from kvrelay.kvstore.level import Health, Offer
from kvrelay.kvstore.loading import Loading
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.promotion import Coming
from kvrelay.kvstore.supply import Hello, Supply
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo, checksum

pytestmark = pytest.mark.unit

SIZE = 4096
MEMORY_BLOCKS = 8
RUN_BLOCKS = 4
HELLO = Hello(
    pod_id=PodId("p"),
    fingerprint=Fingerprint("m"),
    shape="00" * 8,
    dtype=KvDtype.FLOAT32,
    readable=frozenset({KvDtype.FLOAT32}),
)


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def info_of(number: int) -> BlockInfo:
    block_id = BlockId(number.to_bytes(16, "big"))
    plain = BlockInfo(
        id=block_id, head=block_id, fingerprint=Fingerprint("m"), shape="00" * 8, dtype=KvDtype.FLOAT32, size=SIZE
    )
    return msgspec.structs.replace(plain, checksum=checksum(plain, memoryview(data_of(number))))


class Far:
    """Another store, which gives what it is asked for when the test lets it."""

    run_bytes = RUN_BLOCKS * SIZE

    def __init__(self) -> None:
        self.health = Health("peer")
        self.asked: list[list[int]] = []
        self.wrong: dict[int, KvrelayError] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, memory: MemoryTier, slots: Sequence[Slot]) -> Sequence[KvrelayError | None]:
        numbers = [int.from_bytes(slot.info.id, "big") for slot in slots]
        self.asked.append(numbers)
        await self.gate.wait()
        for number, slot in zip(numbers, slots, strict=True):
            with memory.data(slot) as room:
                room[:] = data_of(number)
        return [self.wrong.get(number) for number in numbers]

    def failed(self, error: KvrelayError) -> None:
        self.health.counters.failures += 1


class Heard:
    def __init__(self) -> None:
        self.ids: set[BlockId] = set()

    def stored(self, info: BlockInfo, tier: str) -> None:
        self.ids.add(info.id)

    def removed(self, info: BlockInfo) -> None:
        self.ids.discard(info.id)


class Case:
    def __init__(self, chain: Chain, heard: Heard) -> None:
        self.chain = chain
        self.heard = heard
        self.far = Far()

    def bring(self, *numbers: int) -> list[Slot | Coming]:
        return [self.chain.bring(info_of(n).id, Offer(info_of(n), self.far)) for n in numbers]

    async def read(self, *numbers: int) -> list[bool]:
        """Which of them are had; those are whole, and pinned once by this."""
        return [self.whole(n, await had(coming)) for n, coming in zip(numbers, self.bring(*numbers), strict=True)]

    def whole(self, number: int, slot: Slot | None) -> bool:
        if slot is None:
            return False
        with self.chain.memory.data(slot) as data:
            assert bytes(data) == data_of(number), "never a wrong byte"
        assert slot.pins == 1
        self.chain.release(slot)
        return True

    def check(self) -> None:
        """Nothing is left of what is over."""
        memory = self.chain.memory
        assert memory.num_writing == 0
        assert memory.used_bytes == len(memory) * SIZE
        assert not any(slot.pins for slot in memory.slots())
        assert set(memory.ids()) <= self.heard.ids


async def had(coming: Slot | Coming) -> Slot | None:
    return coming if isinstance(coming, Slot) else await coming


@asynccontextmanager
async def opened(folder: Path, *, files: bool = False) -> AsyncIterator[Case]:
    arena = Arena(folder / "arena", MEMORY_BLOCKS * SIZE)
    policy = make_policy("lru", 1 << 20)
    tiers = [FileTier(folder / "files", 1 << 20, policy, direct=False, threads=1, timeout_s=10.0)] if files else []
    heard = Heard()
    chain = Chain(MemoryTier(arena, make_policy("lru", arena.size)), tiers, heard)
    await chain.open()
    case = Case(chain, heard)
    try:
        yield case
        case.check()
    finally:
        await chain.close()
        arena.close()


async def test_what_is_asked_for_in_one_turn_comes_in_runs(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert await case.read(*range(6)) == [True] * 6
        assert case.far.asked == [[0, 1, 2, 3], [4, 5]]
        assert (case.far.health.counters.hits, case.far.health.counters.bytes_read) == (6, 6 * SIZE)
        assert await case.read(*range(6)) == [True] * 6
        assert len(case.far.asked) == 2, "they are here"


async def test_all_who_wait_have_a_pin_of_their_own(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first, second, given_up = case.bring(1, 2), case.bring(2, 1), case.bring(1, 2)
        for coming in given_up:
            case.chain.drop(coming)
        slots = [await had(coming) for coming in (*first, *second)]
        assert [slot is not None and slot.pins for slot in slots] == [2, 2, 2, 2]
        assert case.far.asked == [[1, 2]]
        for slot in slots:
            assert slot is not None
            case.chain.release(slot)


@pytest.mark.parametrize("error", [Missing("gone"), Corrupt("flipped"), TierFailed("the store is gone")])
async def test_one_that_is_not_had_takes_no_other_with_it(tmp_path: Path, error: KvrelayError) -> None:
    async with opened(tmp_path) as case:
        case.far.wrong = {1: error}
        assert await case.read(*range(4)) == [True, False, True, True]
        assert info_of(1).id not in case.chain.memory
        assert info_of(1).id not in case.heard.ids
        counters = case.far.health.counters
        seen = counters.hits, counters.misses, counters.corrupt, counters.failures
        assert seen == (3, isinstance(error, Missing), isinstance(error, Corrupt), isinstance(error, TierFailed))
        case.far.wrong = {}
        assert await case.read(1) == [True]


async def test_a_store_that_dies_midway_leaves_what_came(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        case.far.wrong = dict.fromkeys(range(2, 8), TierFailed("the store is gone"))
        assert await case.read(*range(8)) == [True, True, *[False] * 6]
        assert len(case.chain.memory) == 2


async def test_a_run_for_which_there_is_little_room_comes_in_parts(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        pinned = [await had(coming) for coming in case.bring(*range(10, 16))]
        coming = case.bring(*range(4))
        slots = [await had(one) for one in coming[:2]]
        assert case.far.asked[2:] == [[0, 1]], "as many as there was room for"
        for slot in (*slots, *pinned):
            assert slot is not None
            case.chain.release(slot)
        for number, one in zip((2, 3), coming[2:], strict=True):
            assert case.whole(number, await had(one))
        assert case.far.asked[3:] == [[2, 3]]


async def test_without_room_a_run_is_a_miss_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "ROOM_SECONDS", 0.02)
    async with opened(tmp_path) as case:
        pinned = [await had(coming) for coming in case.bring(*range(10, 17))]
        assert await case.read(*range(3)) == [True, True, True], "one place will do, if one by one"
        slot = await had(case.bring(20)[0])
        assert await case.read(*range(30, 34)) == [False] * 4
        assert case.chain.counters.refused == 4
        for one in (slot, *pinned):
            assert one is not None
            case.chain.release(one)


async def test_what_a_pod_writes_meanwhile_is_not_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        writing = case.chain.begin(info_of(1))
        assert writing is not None
        assert await case.read(0, 1, 2) == [True, False, True]
        with case.chain.memory.data(writing) as room:
            room[:] = data_of(1)
        case.chain.commit(writing, info_of(1).checksum)
        assert await case.read(1) == [True]
        assert case.far.asked == [[0, 2]]


async def test_what_is_evicted_before_its_run_is_over_is_brought_again(tmp_path: Path) -> None:
    """A run that waits for room has nothing more to say of what it brought before."""
    async with opened(tmp_path) as case:
        pinned = [await had(coming) for coming in case.bring(*range(10, 17))]
        first, second = case.bring(0, 1)
        assert case.whole(0, await had(first))
        await case.chain.remove(info_of(0).id)
        again = case.bring(0)[0]
        assert case.whole(1, await had(second))
        assert case.whole(0, await had(again))
        for slot in pinned:
            assert slot is not None
            case.chain.release(slot)


async def test_the_end_of_the_store_is_a_miss(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        case.far.gate.clear()
        coming = case.bring(*range(6))
        while len(case.far.asked) < 2:
            await asyncio.sleep(0)
        coming += case.bring(7)
        await case.chain.close()
        assert [await had(one) for one in coming] == [None] * 7


async def test_a_tier_of_the_node_comes_before_others(tmp_path: Path) -> None:
    """And one whose block is damaged gives way to them."""
    async with opened(tmp_path, files=True) as case:
        (level,) = case.chain.levels
        for number in (0, 1):
            await level.tier.put(info_of(number), memoryview(data_of(number)))
        path = tmp_path / "files" / "00" / f"{info_of(1).id.hex()}.kv"
        whole = bytearray(path.read_bytes())
        whole[5000] ^= 1
        path.write_bytes(whole)
        assert await case.read(0, 1, 2) == [True] * 3
        assert (level.counters.hits, level.counters.corrupt) == (1, 1)
        assert sorted(case.far.asked) == [[1], [2]]


class Elsewhere:
    """All blocks are in one other store."""

    exists = True

    def __init__(self, far: Far, numbers: Sequence[int]) -> None:
        self.far = far
        self.held = {info_of(number).id: info_of(number) for number in numbers}
        self.num_asked = 0

    async def locate(self, entries: Sequence[Entry], hello: Hello) -> dict[BlockId, Offer]:
        self.num_asked += 1
        return {block_id: Offer(self.held[block_id], self.far) for _, block_id in entries if block_id in self.held}


class Reader:
    """Has room for two blocks."""

    def __init__(self) -> None:
        self.held: list[Slot] = []
        self.released = asyncio.Event()

    def fits(self, ahead_bytes: int, num_bytes: int) -> bool:
        return ahead_bytes + num_bytes + SIZE * len(self.held) <= 2 * SIZE

    async def let_go(self) -> None:
        self.released.clear()
        await self.released.wait()


async def test_a_load_that_takes_long_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others hold is believed for a while only; a load may take longer than that."""
    now = 1000.0
    monkeypatch.setattr(supply, "time", SimpleNamespace(monotonic=lambda: now))
    async with opened(tmp_path) as case:
        elsewhere = Elsewhere(case.far, range(6))
        ids = [info_of(number).id for number in range(7)]
        source = Supply(case.chain, elsewhere, HELLO)
        await source.look(ids, 0)
        reader, given = Reader(), []

        def give(slot: Slot) -> None:
            reader.held.append(slot)
            given.append(slot.info.id)

        load = asyncio.create_task(Loading(source, ids, 0, reader, give).run())
        while not load.done():
            async with asyncio.timeout(5):
                while len(reader.held) < 2 and not load.done():
                    await asyncio.sleep(0)
            now += supply.KNOWN_SECONDS
            for slot in reader.held:
                case.chain.release(slot)
            reader.held.clear()
            reader.released.set()
        await load
        assert given == ids[:6], "no further than there is"
        assert elsewhere.num_asked == 4, "twice what is believed no more, and once more at its end"
