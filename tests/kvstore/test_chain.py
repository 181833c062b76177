"""Memory above files above more files: what is stored is found whole, limits hold, and the index hears the truth."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore import chain as chains
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo, checksum
from tests.kvstore.blocks import until

pytestmark = pytest.mark.unit

SIZE = 12_000  # three pages in memory, four in a file
MEMORY_BLOCKS, FILE_BLOCKS = 8, 16


def data_of(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def info_of(number: int) -> BlockInfo:
    block_id = BlockId(number.to_bytes(16, "big"))
    plain = BlockInfo(
        id=block_id, head=block_id, fingerprint=Fingerprint("m"), shape="00" * 8, dtype=KvDtype.FLOAT32, size=SIZE
    )
    return msgspec.structs.replace(plain, checksum=checksum(plain, memoryview(data_of(number))))


class Heard:
    """What the index would hold."""

    def __init__(self) -> None:
        self.tiers: dict[BlockId, str] = {}

    def stored(self, info: BlockInfo, tier: str) -> None:
        self.tiers[info.id] = tier

    def removed(self, info: BlockInfo) -> None:
        self.tiers.pop(info.id, None)


class Node:
    def __init__(self, chain: Chain, heard: Heard, tiers: list[FileTier]) -> None:
        self.chain, self.heard, self.tiers = chain, heard, tiers

    def store(self, number: int) -> bool:
        slot = self.chain.begin(info_of(number))
        if slot is None:
            return False
        self.write(slot, number)
        return True

    def write(self, slot: Slot, number: int) -> None:
        with self.chain.memory.data(slot) as view:
            view[:] = data_of(number)
        self.chain.commit(slot, info_of(number).checksum)

    async def stored(self, number: int) -> None:
        """As a pod that tries until there is room."""
        async with asyncio.timeout(10):
            while not self.store(number) and info_of(number).id not in self.chain.memory:
                await asyncio.sleep(0.001)  # not 0: a loop that never rests keeps the threads of the files from running

    async def read(self, number: int) -> bool:
        slot = await self.chain.load(info_of(number).id)
        if slot is None:
            return False
        assert self.chain.verify(slot)
        with self.chain.memory.data(slot) as view:
            assert bytes(view) == data_of(number), "never a wrong byte"
        self.chain.release(slot)
        return True

    async def settled(self) -> None:
        """The sinks have nothing to do, and have told the index of the last that they did: that comes some turns of the loop after it."""
        async with asyncio.timeout(10):
            while self._working() or self._misheard():
                await asyncio.sleep(0.001)

    def _working(self) -> bool:
        if any(tier._tasks for tier in self.tiers) or any(level.grown.is_set() for level in self.chain.levels[:-1]):
            return True
        holders = (self.chain.memory, *self.tiers[:-1])
        return any(holder.used_bytes > 0.9 * holder.limit_bytes for holder in holders)

    def check(self) -> None:
        assert self.chain.memory.used_bytes <= self.chain.memory.limit_bytes
        for tier in self.tiers:
            assert tier.used_bytes <= tier.limit_bytes
        assert self._misheard() == {}, "the index knows of what is here, and where, and of nothing else"

    def _misheard(self) -> dict[BlockId, tuple[str | None, str | None]]:
        """Where a block is, and where the index takes it to be, where these are not the same."""
        ids = {*self.chain.ids(), *(i for tier in self.tiers for i in tier._blocks), *self.heard.tiers}
        found = {block_id: self.chain.find(block_id) for block_id in ids}
        places = {i: (place and place[1], self.heard.tiers.get(i)) for i, place in found.items()}
        return {i: (here, heard) for i, (here, heard) in places.items() if here != heard}


@asynccontextmanager
async def opened(folder: Path, num_files: int = 2, name: str = "lru") -> AsyncIterator[Node]:
    arena = Arena(Path("/dev/shm") / f"kvrelay-test-chain-{folder.name}", MEMORY_BLOCKS * 3 * 4096)
    heard = Heard()
    tiers = []
    for number in range(num_files):
        limit = (1 + number) * FILE_BLOCKS * 4 * 4096
        tier = FileTier(folder / str(number), limit, make_policy(name, limit), direct=False, threads=2, timeout_s=10.0)
        tier.name = f"file{number}"  # type: ignore[misc]
        tiers.append(tier)
    chain = Chain(MemoryTier(arena, make_policy(name, arena.size)), tiers, heard)
    await chain.open()
    try:
        yield Node(chain, heard, tiers)
    finally:
        await chain.close()
        arena.close()


async def test_evictions_cascade_and_hits_promote(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        for number in range(40):
            await node.stored(number)
            assert node.chain.memory.used_bytes <= node.chain.memory.limit_bytes
        await node.settled()
        node.check()
        tiers = [node.heard.tiers[info_of(number).id] for number in range(40)]
        assert tiers == sorted(tiers, reverse=True, key=["cpu", "file0", "file1"].index)
        assert {"cpu", "file0", "file1"} == set(tiers)
        assert tiers[0] == "file1"
        assert await node.read(0)
        assert node.heard.tiers[info_of(0).id] == "cpu"
        assert node.chain.levels[1].counters.hits == 1
        await node.settled()
        node.check()


async def test_what_goes_out_of_the_last_tier_is_gone(tmp_path: Path) -> None:
    async with opened(tmp_path, num_files=1) as node:
        for number in range(60):
            await node.stored(number)
        await node.settled()
        node.check()
        # Looked up before any is read: a block that is read from files comes to memory, and pushes others out.
        held = [number for number in range(60) if node.chain.find(info_of(number).id) is not None]
        assert 0 not in held
        assert 59 in held
        assert MEMORY_BLOCKS <= len(held) <= MEMORY_BLOCKS + FILE_BLOCKS
        assert await node.read(59)
        assert not await node.read(0)
        for number in held:
            await node.read(number)  # never a wrong byte
        await node.settled()
        node.check()


async def test_without_a_tier_below_the_coldest_goes_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, num_files=0) as node:
        assert all(node.store(number) for number in range(30))
        assert [await node.read(number) for number in range(30)] == [False] * 22 + [True] * 8
        assert node.chain.counters.dropped == 22
        node.check()


async def test_a_block_is_written_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        slot = node.chain.begin(info_of(1))
        assert slot is not None
        assert node.chain.begin(info_of(1)) is None
        assert node.chain.find(info_of(1).id) is None, "not before it is whole"
        node.write(slot, 1)
        assert node.chain.begin(info_of(1)) is None
        given_up = node.chain.begin(info_of(2))
        assert given_up is not None
        node.chain.give_up(given_up)
        assert node.chain.find(info_of(2).id) is None
        assert node.store(2)
        assert node.chain.counters.refused == 0


async def test_pinned_blocks_stay(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        pinned = []
        for number in range(MEMORY_BLOCKS):
            assert node.store(number)
            slot = await node.chain.load(info_of(number).id)
            assert slot is not None
            pinned.append(slot)
        assert not node.store(100), "there is no room, and nothing waits for it"
        assert node.chain.counters.refused == 1
        await node.chain.remove(info_of(0).id)
        assert node.chain.find(info_of(0).id) is None
        with node.chain.memory.data(pinned[0]) as view:
            assert bytes(view) == data_of(0), "who has it pinned reads on"
        assert not node.store(100)
        node.chain.release(pinned[0])
        assert node.store(100)
        for slot in pinned[1:]:
            node.chain.release(slot)
        node.check()


async def test_several_readers_share_one_reading(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        for number in range(30):
            await node.stored(number)
        await node.settled()
        assert await asyncio.gather(*(node.read(0) for _ in range(10))) == [True] * 10
        assert sum(level.counters.hits for level in node.chain.levels) == 1


def spoil(path: Path, error: Exception) -> None:
    if isinstance(error, Missing):
        path.unlink()
        return
    whole = bytearray(path.read_bytes())
    whole[5000] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("error", [Missing("gone"), Corrupt("flipped")])
async def test_a_bad_block_below_is_a_miss_and_no_longer_announced(tmp_path: Path, error: Exception) -> None:
    async with opened(tmp_path, num_files=1) as node:
        for number in range(20):
            await node.stored(number)
        await node.settled()
        spoil(Path(node.tiers[0]._path(info_of(0).id)), error)
        assert not await node.read(0)
        assert info_of(0).id not in node.heard.tiers
        assert not await node.read(0)
        counters = node.chain.levels[0].counters
        assert (counters.corrupt, counters.misses) == ((0, 1) if isinstance(error, Missing) else (1, 0))
        node.check()


async def test_bits_that_flip_in_memory(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        assert node.store(1)
        slot = await node.chain.load(info_of(1).id)
        assert slot is not None
        with node.chain.memory.data(slot) as view:
            view[77] ^= 4
        assert not node.chain.verify(slot)
        node.chain.release(slot)
        assert node.chain.counters.corrupt == 1
        assert not await node.read(1)
        node.check()


async def test_a_tier_that_fails_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving goes on from memory; what cannot go down is dropped."""
    async with opened(tmp_path, num_files=1) as node:
        calls = 0

        async def put(info: BlockInfo, data: memoryview) -> Iterable[BlockInfo]:
            nonlocal calls
            calls += 1
            raise TierFailed("no space left")

        monkeypatch.setattr(node.tiers[0], "put", put)
        for number in range(40):
            await node.stored(number)
        await node.settled()
        assert calls == 1
        assert not node.chain.levels[0].healthy
        assert node.chain.levels[0].reason == "no space left"
        assert await node.read(39)
        assert not await node.read(0)
        assert node.chain.counters.dropped > 20
        node.check()


async def test_a_tier_that_cannot_be_opened_is_out(tmp_path: Path) -> None:
    blocked = tmp_path / "0"
    blocked.touch()
    async with opened(tmp_path, num_files=1) as node:
        assert not node.chain.levels[0].healthy
        assert all(node.store(number) for number in range(30))
        assert await node.read(29)


async def test_a_tier_that_could_not_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "REOPEN_SECONDS", 0.01)
    blocked = tmp_path / "0"
    async with opened(tmp_path, num_files=1) as node:
        for number in range(20):
            await node.stored(number)
        await node.settled()
    blocked.rename(tmp_path / "kept")
    blocked.touch()
    async with opened(tmp_path, num_files=1) as node:
        assert not node.chain.levels[0].healthy
        assert not await node.read(0)
        blocked.unlink()
        (tmp_path / "kept").rename(blocked)
        await until(lambda: node.chain.levels[0].healthy)
        assert await node.read(0)
        node.check()


async def test_files_are_there_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as node:
        for number in range(20):
            await node.stored(number)
        await node.settled()
        kept = {block_id for block_id, tier in node.heard.tiers.items() if tier != "cpu"}
    async with opened(tmp_path) as node:
        assert kept <= node.heard.tiers.keys()
        assert await node.read(0)
        node.check()


@pytest.mark.parametrize("name", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(4))
async def test_random_use(tmp_path: Path, seed: int, name: str) -> None:
    """Ten times more than memory, concurrent readers and writers: never a wrong byte, never over a limit."""
    rng = random.Random(seed)
    async with opened(tmp_path, name=name) as node:

        async def act() -> None:
            for _ in range(60):
                number = int(rng.paretovariate(0.6)) % 80
                match rng.randrange(8):
                    case 0 | 1 | 2:
                        node.store(number)
                    case 7 if rng.random() < 0.3:
                        await node.chain.remove(info_of(number).id)
                    case _:
                        await node.read(number)
                assert node.chain.memory.used_bytes <= node.chain.memory.limit_bytes
                assert all(tier.used_bytes <= tier.limit_bytes for tier in node.tiers)

        await asyncio.gather(*(act() for _ in range(6)))
        await node.settled()
        node.check()
