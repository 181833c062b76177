"""Two stores as real processes, with UCX between them: blocks come out of the other's memory, whole, or are a miss within a bound."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.kvstore.peers.elsewhere import LOOK_SECONDS
from kvrelay.v1 import kvstore_pb2 as pb
from tests.fixtures_redis import RedisServer
from tests.kvstore.pod import Pod, attached, chain_of, until_stat
from tests.kvstore.store_process import StoreProcess

pytestmark = pytest.mark.integration

SIZE = 100_000
"""Over what UCX sends eagerly."""
IDS = chain_of(1, 40)


@contextlib.asynccontextmanager
async def two(
    folder: Path, server: RedisServer, *more: str, memory: str = "16MiB"
) -> AsyncIterator[tuple[list[StoreProcess], list[Pod]]]:
    """With a pod at each."""
    stores = []
    for name in ("near", "far"):
        files = f"{{tier: file, bytes: 64MiB, directory: {folder / name}}}"
        options = ("--tiers", f"[{{tier: cpu, bytes: {memory}}}, {files}]", "--redis-url", server.url, *more)
        stores.append(StoreProcess(folder, *options, name=name))
    try:
        for store in stores:
            store.start()
        async with attached(stores[0].address) as near, attached(stores[1].address) as far:
            yield stores, [near, far]
    finally:
        for store in stores:
            with contextlib.suppress(AssertionError):
                store.send_signal(signal.SIGCONT)
            store.kill()


async def told(pod: Pod) -> None:
    """The index knows all that the pod's store holds."""
    await until_stat(pod, lambda seen: seen.announcer_backlog == 0)


async def until_found(pod: Pod, count: int) -> list[pb.FoundRun]:
    """Stores hear of each other a moment after they start."""
    async with asyncio.timeout(10):
        while True:
            runs = await pod.find(IDS)
            if sum(run.num_blocks for run in runs) == count:
                return runs
            await asyncio.sleep(0.02)


def peer(seen: pb.StatResponse) -> pb.TierCounters:
    (tier,) = [tier for tier in seen.tiers if tier.tier == pb.TIER_PEER]
    return tier.counters


async def test_a_hit_out_of_the_others_memory(tmp_path: Path, redis_server: RedisServer) -> None:
    async with two(tmp_path, redis_server) as (_, (near, far)):
        await near.store_all(IDS[:5], SIZE)
        await far.store_all(IDS, SIZE)
        await told(far)
        runs = await until_found(near, 40)
        assert [(run.tier, run.num_blocks) for run in runs] == [(pb.TIER_CPU, 5), (pb.TIER_PEER, 35)]
        assert runs[1].num_bytes == 35 * SIZE
        assert runs[1].seconds > 0
        assert await near.read(IDS) == 40
        seen = await until_stat(near, lambda seen: seen.num_pins == 0)
        assert (peer(seen).hits, peer(seen).bytes_read, peer(seen).corrupt) == (35, 35 * SIZE, 0)
        assert await near.num_found(IDS) == 40
        (run,) = await near.find(IDS)
        assert run.tier == pb.TIER_CPU, "it has come up"
        await until_stat(far, lambda seen: seen.num_pins == 0)
        assert await far.read(IDS) == 40


async def test_a_load_without_a_find(tmp_path: Path, redis_server: RedisServer) -> None:
    async with two(tmp_path, redis_server) as (_, (near, far)):
        await far.store_all(IDS, SIZE)
        await told(far)
        await until_found(near, 40)
        async with attached(near.address) as fresh:
            assert await fresh.read(IDS, first=3) == 37


async def test_only_what_is_alike_is_taken(tmp_path: Path, redis_server: RedisServer) -> None:
    async with two(tmp_path, redis_server) as ((near, _), (pod, far)):
        await far.store_all(IDS, SIZE)
        await told(far)
        await until_found(pod, 40)
        for fields in ({"shape": "0" * 16}, {"readable": ["bfloat16"]}):
            async with attached(near.address, **fields) as other:
                assert await other.num_found(IDS) == 0
                assert await other.read(IDS) == 0
        # A model of another name for the same ids, as no honest pod has: the checksum says no.
        async with attached(near.address, fingerprint="b" * 64) as other:
            assert await other.read(IDS) == 0
        assert peer(await pod.stat()).corrupt > 0


async def test_damaged_bytes_are_a_miss_and_go(tmp_path: Path, redis_server: RedisServer) -> None:
    async with two(tmp_path, redis_server) as (_, (near, far)):
        await far.store_all(IDS, SIZE)
        await told(far)
        await until_found(near, 40)
        (block,) = [block async for block in far.load(IDS[:11], first=10)]
        far.arena[block.offset + 77] ^= 1
        await far.say(release=pb.ReleaseBlocks(offsets=[block.offset]))
        await until_stat(far, lambda seen: seen.num_pins == 0)
        assert await near.read(IDS) == 10
        assert peer(await near.stat()).corrupt == 1
        await until_stat(far, lambda seen: seen.tiers[0].counters.corrupt == 1)
        assert await far.num_found(IDS) == 10, "the other has been told"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_store_that_is_gone_is_a_miss_within_a_bound(
    tmp_path: Path, redis_server: RedisServer, number: signal.Signals
) -> None:
    async with two(tmp_path, redis_server) as ((_, other), (near, far)):
        await near.store_all(IDS[:5], SIZE)
        await far.store_all(IDS, SIZE)
        await told(far)
        await until_found(near, 40)
        assert await near.read(IDS[:10]) == 10, "there is a link"
        other.send_signal(number)
        started = time.monotonic()
        assert await near.read(IDS) == 10
        assert time.monotonic() - started < 2.0
        started = time.monotonic()
        assert await near.num_found(IDS) == 10, "it is left alone"
        assert await near.read(IDS) == 10
        assert time.monotonic() - started < 0.9, "less than to wait for it again"
        await until_stat(near, lambda seen: seen.num_pins == 0 and seen.num_writing == 0)
        assert await near.store(IDS[10:20], SIZE) == 10, "no room was lost"


async def test_a_store_stopped_while_blocks_fly(tmp_path: Path, redis_server: RedisServer) -> None:
    """What was landing is ended by force before its room is anyone else's."""
    ids = chain_of(2, 150)
    async with two(tmp_path, redis_server, memory="96MiB") as ((_, other), (near, far)):
        await far.store_all(ids, 2 * SIZE)
        await told(far)
        async with asyncio.timeout(10):
            while await near.num_found(ids) != 150:
                await asyncio.sleep(0.02)
        count = 0
        started = time.monotonic()
        async for block in near.load(ids):
            assert near.whole(block)
            count += 1
            if count == 20:
                other.send_signal(signal.SIGSTOP)
            await near.say(release=pb.ReleaseBlocks(offsets=[block.offset]))
        assert 20 <= count < 150
        assert time.monotonic() - started < 5.0
        seen = await until_stat(near, lambda seen: seen.num_pins == 0 and seen.num_writing == 0)
        assert seen.tiers[0].num_blocks >= count
        other.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while (found := await near.read(ids)) < 150:
                assert found >= count
                await asyncio.sleep(0.2)
        assert peer(await near.stat()).corrupt == 0


async def test_a_restarted_store_is_another(tmp_path: Path, redis_server: RedisServer) -> None:
    async with two(tmp_path, redis_server) as ((_, other), (near, far)):
        await far.store_all(IDS, SIZE)
        await told(far)
        await until_found(near, 40)
        other.kill()
        other.start()
        await until_found(near, 0)
        async with attached(other.address) as again:
            await again.store_all(IDS, SIZE)
            await until_found(near, 40)
            assert await near.read(IDS) == 40


async def test_a_slow_index_costs_little(tmp_path: Path, redis_server: RedisServer) -> None:
    async with two(tmp_path, redis_server) as (_, (near, far)):
        await near.store_all(IDS[:5], SIZE)
        await far.store_all(IDS, SIZE)
        await told(far)
        await until_found(near, 40)
        redis_server.send_signal(signal.SIGSTOP)
        async with attached(near.address) as fresh:  # one that has not asked yet
            started = time.monotonic()
            assert await fresh.num_found(IDS) == 5
            assert time.monotonic() - started < 0.9, "less than a command may take"
            seconds = []
            for _ in range(3):
                started = time.monotonic()
                assert await fresh.num_found(IDS) == 5
                seconds.append(time.monotonic() - started)
            assert min(seconds) < LOOK_SECONDS, "it is left alone: who asks it waits as long at least"
        redis_server.send_signal(signal.SIGCONT)
        await until_found(near, 40)
