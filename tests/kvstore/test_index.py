"""The index on a real Valkey: prefixes are found in one round trip, and what Redis forgets is said again."""

import asyncio
import functools
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import pytest
import xxhash
from redis.exceptions import RedisError

from kvrelay.common.blocks import SPAN, BlockHasher
from kvrelay.common.discovery import RetryPolicy
from kvrelay.common.ids import BlockId, Epoch, Fingerprint, new_epoch
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore import announcer as announcing
from kvrelay.kvstore.announcer import Announcer
from kvrelay.kvstore.index import TTL_SECONDS, Index
from kvrelay.kvstore.location import MAX_LOCATIONS, RECORD_BYTES, Location, node_key, unpack
from kvrelay.transfer.block import BlockInfo
from kvrelay.transfer.segments import SEGMENT_BLOCKS, heads
from tests.fixtures_redis import RedisServer

pytestmark = pytest.mark.integration

QUICK = RetryPolicy(initial_seconds=0.02, maximum_seconds=0.1)


def chain(length: int, first: int = 0) -> list[BlockId]:
    ids: list[BlockId] = []
    BlockHasher(Fingerprint("model")).extend(ids, range(first, first + length * SPAN))
    return ids


def infos(ids: list[BlockId], size: int = 1000) -> list[BlockInfo]:
    return [
        BlockInfo(
            id=block_id,
            head=head,
            fingerprint=Fingerprint("model"),
            shape="00" * 8,
            dtype=KvDtype.BFLOAT16,
            size=size,
            checksum=2**64 - 1,
        )
        for block_id, head in zip(ids, heads(ids), strict=True)
    ]


def location(node: str = "n0", epoch: str = "0123456789abcdef", tier: str = "cpu") -> Location:
    return Location(
        node=node_key(node),
        epoch=Epoch(epoch),
        tier=tier,
        dtype=KvDtype.BFLOAT16,
        encoding="exact",
        size=368_640,
        shape="0011223344556677",
        checksum=12345678901234567890,
    )


class Holder:
    def __init__(self, blocks: Iterable[BlockInfo] = ()) -> None:
        self.blocks = {info.id: (info, "cpu") for info in blocks}

    def ids(self) -> Iterable[BlockId]:
        return self.blocks.keys()

    def find(self, block_id: BlockId) -> tuple[BlockInfo, str] | None:
        return self.blocks.get(block_id)


@asynccontextmanager
async def opened(server: RedisServer) -> AsyncIterator[Index]:
    index = Index(server.url, "test")
    try:
        yield index
    finally:
        await index.close()


async def until(holds: Callable[[], "asyncio.Future[bool] | object"]) -> None:
    """Asks again until it holds, for ten seconds at most."""
    async with asyncio.timeout(10):
        while not await holds():  # type: ignore[misc]
            await asyncio.sleep(0.01)


def test_a_location_survives_its_encoding() -> None:
    one, two = location(), location("n1", tier="file")
    assert unpack([one.pack() + two.pack(), None, two.pack(), b""]) == [[one, two], [], [two], []]


def test_what_is_no_location_is_a_miss() -> None:
    one, strange = location().pack(), b"\xff" * RECORD_BYTES
    assert unpack([one[:-1], strange, one, strange + one, one + b"x"]) == [[], [], [location()], [location()], []]


async def test_the_longest_prefix_is_found(redis_server: RedisServer) -> None:
    ids = chain(200)
    where = location()
    async with opened(redis_server) as index:
        assert await index.find(ids) == []
        stored = dict.fromkeys(zip(heads(ids), ids, strict=True), where)
        del stored[heads(ids)[150], ids[150]]
        await index.update(where.node, stored)
        assert await index.find(ids) == [[where]] * 150
        assert await index.find(ids[:10]) == [[where]] * 10
        assert await index.find([]) == []
        assert await index.find(chain(5, first=7)) == []
        before = await index._redis.info()
        assert len(await index.find(ids)) == 150
        after = await index._redis.info()
        assert after["total_commands_processed"] - before["total_commands_processed"] == 4 + 1, (
            "one a segment, and INFO"
        )
        assert after["total_reads_processed"] - before["total_reads_processed"] == 1 + 1, "in one round trip, and INFO"


async def test_several_nodes_have_a_block(redis_server: RedisServer) -> None:
    ids = chain(1)
    entry = (ids[0], ids[0])
    a, b, moved = location("a"), location("b"), location("a", tier="file")
    async with opened(redis_server) as index:
        for where in (a, b):
            await index.update(where.node, {entry: where})
        assert await index.find(ids) == [[a, b]]
        await index.update(a.node, {entry: moved})
        assert await index.find(ids) == [[b, moved]]
        restarted = location("b", epoch=new_epoch())
        await index.update(b.node, {entry: restarted})
        assert await index.find(ids) == [[moved, restarted]]
        await index.update(a.node, {entry: None})
        await index.update(b.node, {entry: None})
        assert await index.find(ids) == []
        assert redis_server.command("DBSIZE") == b":0\r\n"


async def test_locations_of_a_block_are_bounded(redis_server: RedisServer) -> None:
    ids = chain(1)
    async with opened(redis_server) as index:
        for number in range(MAX_LOCATIONS + 3):
            where = location(f"n{number}")
            await index.update(where.node, {(ids[0], ids[0]): where})
        found = (await index.find(ids))[0]
    assert [where.node for where in found] == [node_key(f"n{number}") for number in range(3, MAX_LOCATIONS + 3)]


async def test_segments_run_out(redis_server: RedisServer) -> None:
    ids = chain(2)
    async with opened(redis_server) as index:
        await index.update(1, dict.fromkeys([(ids[0], ids[0]), (ids[0], ids[1])], location()))
        assert 3500 < await index._redis.ttl(index.key(ids[0])) <= 3600
        await index._redis.expire(index.key(ids[0]), 1000)
        await index.update(1, {(ids[0], ids[1]): None})
        assert await index._redis.ttl(index.key(ids[0])) <= 1000, "by a word of what lives only"


async def aged(index: Index, head: BlockId, seconds: int) -> None:
    """All in the segment as if said so long ago."""
    key = index.key(head)
    for block_id, value in (await index._redis.hgetall(key)).items():
        records = [value[at : at + RECORD_BYTES] for at in range(0, len(value), RECORD_BYTES)]
        said = [int.from_bytes(record[-4:], "little") - seconds for record in records]
        old = [record[:-4] + at.to_bytes(4, "little") for record, at in zip(records, said, strict=True)]
        await index._redis.hset(key, block_id, b"".join(old))


async def test_what_is_not_said_again_goes_as_others_speak(redis_server: RedisServer) -> None:
    """A segment whose beginning lives on, in which many chains of a node that is dead have parted."""
    ids, dead, alive = chain(SEGMENT_BLOCKS), location("dead"), location("alive")
    parted = [ids[0], *(BlockId(xxhash.xxh3_128_digest(bytes([number]))) for number in range(200))]
    segment = [(ids[0], block_id) for block_id in ids]
    async with opened(redis_server) as index:
        await index.update(dead.node, dict.fromkeys([(ids[0], block_id) for block_id in parted], dead))
        await aged(index, ids[0], TTL_SECONDS - 100)
        await index.update(alive.node, dict.fromkeys(segment, alive))
        assert await index.locate(segment) == [[dead, alive], *[[alive]] * 63]
        assert await index._redis.hlen(index.key(ids[0])) == 264, "in time, all"
        await aged(index, ids[0], 200)
        await index.update(alive.node, {segment[0]: alive})
        assert await index.locate(segment) == [[alive]] * 64
        assert await index._redis.hlen(index.key(ids[0])) >= 263, "one that was spoken of, and one other at most"

        async def gone() -> bool:
            await index.update(alive.node, dict.fromkeys(segment, alive))
            return int(await index._redis.hlen(index.key(ids[0]))) == 64

        await until(gone)
        assert await index.locate(segment) == [[alive]] * 64


async def test_chains_part_within_a_segment(redis_server: RedisServer) -> None:
    """A hash that is not compact any more, nor are the values."""
    ids, where = chain(SEGMENT_BLOCKS), [location("a"), location("b")]
    others = [BlockId(xxhash.xxh3_128_digest(number.to_bytes(2, "little"))) for number in range(3000)]
    async with opened(redis_server) as index:
        for one in where:
            await index.update(one.node, dict.fromkeys([(ids[0], block_id) for block_id in ids + others], one))
        assert await index.find(ids) == [where] * SEGMENT_BLOCKS
        assert await index.locate([(ids[0], block_id) for block_id in others]) == [where] * 3000


def test_a_segment_has_one_key() -> None:
    ids = chain(SEGMENT_BLOCKS * 2 + 1)
    index = Index("redis://127.0.0.1:1/0", "c")
    keys = [index.key(head) for head in heads(ids)]
    assert [len(set(keys[:64])), len(set(keys[64:128])), len(set(keys))] == [1, 1, 3]
    assert keys[0] == b"kvrelay:c:kv:{" + ids[0].hex().encode() + b"}"


async def test_an_unreachable_redis_is_a_miss(redis_server: RedisServer) -> None:
    async with opened(redis_server) as index:
        redis_server.kill()
        assert await index.find(chain(3)) == []
        assert index.failures == 1
        with pytest.raises((RedisError, OSError)):
            await index.update(1, {(chain(1)[0], chain(1)[0]): location()})


async def test_a_stopped_redis_is_a_miss_in_time(redis_server: RedisServer) -> None:
    async with opened(redis_server) as index:
        assert await index.find(chain(3)) == []
        redis_server.send_signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(3):
                assert await index.find(chain(3)) == []
        finally:
            redis_server.send_signal(signal.SIGCONT)


async def test_a_redis_that_goes_and_comes_is_a_line_each_time(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvrelay.kvstore")
    ids = chain(3)

    def said() -> Counter[str]:
        return Counter(re.sub(r"\d+ blocks.*|:.*", "", record.getMessage()) for record in caplog.records)

    async def told_again(times: int) -> bool:
        return said()["the index is told again"] == times

    async with opened(redis_server) as index:
        announcer = Announcer(index, 7, new_epoch(), QUICK)
        announcer.start(Holder(infos(ids)))
        await until(lambda: index.find(ids))
        for times in (1, 2):
            redis_server.kill()
            failures = announcer.failures
            while announcer.failures < failures + 3:
                assert await index.find(ids) == []
                announcer.stored(infos(ids)[0], "cpu")
            redis_server.start()
            await until(lambda: index.find(ids))
            await until(functools.partial(told_again, times))
        await announcer.stop()
    lines = ("look-ups in the index fail, trying on", "look-ups in the index work again")
    assert said() == dict.fromkeys((*lines, "the index cannot be told of ", "the index is told again"), 2)


class TestAnnouncer:
    async def test_changes_reach_the_index(self, redis_server: RedisServer) -> None:
        ids, holder = chain(3), Holder()
        async with opened(redis_server) as index:
            announcer = Announcer(index, 7, new_epoch(), QUICK)
            announcer.start(holder)
            for info in infos(ids):
                announcer.stored(info, "cpu")
            await until(lambda: self._tiers(index, ids, ["cpu"] * 3))
            announcer.stored(infos(ids)[1], "file")
            announcer.removed(infos(ids)[2])
            await until(lambda: self._tiers(index, ids, ["cpu", "file"]))
            assert announcer.backlog == 0
            await announcer.stop()

    @pytest.mark.parametrize("how", ["flush", "restart"])
    async def test_what_redis_forgot_is_said_again(self, redis_server: RedisServer, how: str) -> None:
        ids = chain(1300)  # several batches
        holder = Holder(infos(ids))
        async with opened(redis_server) as index:
            announcer = Announcer(index, 7, new_epoch(), QUICK)
            announcer.start(holder)
            await until(lambda: self._tiers(index, ids, ["cpu"] * 1300))
            if how == "flush":
                redis_server.command("FLUSHALL")
            else:
                redis_server.kill()
                announcer.removed(infos(ids)[1299])
                del holder.blocks[ids[1299]]
                redis_server.start()
            left = len(holder.blocks)
            await until(lambda: self._tiers(index, ids, ["cpu"] * left))
            await announcer.stop()

    async def test_what_has_gone_meanwhile_is_not_said_again(self, redis_server: RedisServer) -> None:
        """Blocks leave while a long snapshot is being said."""
        ids = chain(2000)
        holder = Holder(infos(ids))
        async with opened(redis_server) as index:
            announcer = Announcer(index, 7, new_epoch(), QUICK)
            announcer.start(holder)
            await until(lambda: self._tiers(index, ids[:512], ["cpu"] * 512))
            for info in infos(ids)[1000:]:
                del holder.blocks[info.id]
                announcer.removed(info)
            await until(lambda: self._tiers(index, ids, ["cpu"] * 1000))
            await until(self._done(announcer))
            assert await self._tiers(index, ids, ["cpu"] * 1000)
            assert redis_server.command("DBSIZE") == b":17\r\n"  # a key for each 64, and the mark
            assert sum([await index._redis.hlen(index.key(head)) for head in ids[::SEGMENT_BLOCKS]]) == 1000
            await announcer.stop()

    async def test_entries_are_refreshed(self, redis_server: RedisServer) -> None:
        ids = chain(1)
        async with opened(redis_server) as index:
            announcer = Announcer(index, 7, new_epoch(), QUICK, refresh_seconds=0.05)
            announcer.start(Holder(infos(ids)))
            await until(lambda: self._tiers(index, ids, ["cpu"]))
            await index._redis.expire(index.key(ids[0]), 1000)

            async def renewed() -> bool:
                return int(await index._redis.ttl(index.key(ids[0]))) > 1000

            await until(renewed)
            await announcer.stop()

    async def test_too_much_to_remember(self, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(announcing, "MAX_PENDING", 10)
        ids = chain(50)
        holder = Holder()
        async with opened(redis_server) as index:
            announcer = Announcer(index, 7, new_epoch(), QUICK)
            redis_server.kill()
            announcer.start(holder)
            for info in infos(ids):
                holder.blocks[info.id] = (info, "cpu")
                announcer.stored(info, "cpu")
            assert announcer.backlog == 10
            redis_server.start()
            await until(lambda: self._tiers(index, ids, ["cpu"] * 50))
            await announcer.stop()

    def _done(self, announcer: Announcer) -> Callable[[], object]:
        async def done() -> bool:
            return announcer.backlog == 0 and announcer._repeat is None

        return done

    async def _tiers(self, index: Index, ids: list[BlockId], tiers: list[str]) -> bool:
        return [found[0].tier for found in await index.find(ids)] == tiers
