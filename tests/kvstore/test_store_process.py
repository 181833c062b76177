"""Stores and pods as real processes, killed and stopped: nothing leaks, nothing torn is ever read, files come back."""

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.index import Index
from kvrelay.kvstore.location import Location, node_key
from kvrelay.v1 import kvstore_pb2 as pb
from tests.fixtures_redis import RedisServer
from tests.kvstore.pod import Pod, attached, chain_of, until_stat
from tests.kvstore.store_process import StoreProcess

pytestmark = pytest.mark.integration

KILLS = int(os.environ.get("KVRELAY_KVSTORE_KILLS", "10"))
MEMORY = 40 * 3 * 4096
NO_REDIS = "redis://127.0.0.1:1/0"


def options(folder: Path, redis_url: str = NO_REDIS) -> tuple[str, ...]:
    files = f"{{tier: file, bytes: 16MiB, directory: {folder / 'blocks'}}}"
    return ("--tiers", f"[{{tier: cpu, bytes: {MEMORY}}}, {files}]", "--redis-url", redis_url)


@contextlib.contextmanager
def started(folder: Path, *more: str, redis_url: str = NO_REDIS) -> Iterator[StoreProcess]:
    store = StoreProcess(folder, *options(folder, redis_url), *more)
    store.start()
    try:
        yield store
    finally:
        store.kill()


@contextlib.asynccontextmanager
async def pod_process(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One that has blocks 0 to 3 of chain 1 pinned, and has begun chain 2's."""
    command = (sys.executable, "-m", "tests.kvstore.pod", address)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"holds\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_pod_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as store:
        async with attached(store.address) as other, pod_process(store.address) as pod:
            await until_stat(other, lambda seen: (seen.num_pods, seen.num_pins, seen.num_writing) == (2, 4, 3))
            pod.kill()
            await until_stat(other, lambda seen: (seen.num_pods, seen.num_pins, seen.num_writing) == (1, 0, 0))
            assert await other.read(chain_of(1, 4)) == 4
            assert await other.store(chain_of(2, 3)) == 3
        assert store.end() == 0


async def test_a_pod_that_is_stopped_keeps_what_it_holds(tmp_path: Path) -> None:
    """It may go on and write: its part of the arena is no one else's."""
    with started(tmp_path) as store:
        async with attached(store.address) as other, pod_process(store.address) as pod:
            pod.send_signal(signal.SIGSTOP)
            for number in range(10, 20):  # more than memory
                await other.store_all(chain_of(number, 10))
            seen = await until_stat(other, lambda seen: seen.num_pods == 2)
            assert (seen.num_pins, seen.num_writing) == (4, 3)
            pod.send_signal(signal.SIGCONT)
            pod.kill()
            await until_stat(other, lambda seen: (seen.num_pods, seen.num_pins, seen.num_writing) == (1, 0, 0))


async def test_sigterm_drains_into_the_files(tmp_path: Path) -> None:
    ids = chain_of(1, 20)
    with started(tmp_path) as store:
        async with attached(store.address) as pod:
            await pod.store_all(ids)
            assert await asyncio.to_thread(store.end) == 0
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".arena")]
        store.start()
        async with attached(store.address) as pod:
            (run,) = await pod.find(ids)
            assert (run.tier, run.num_blocks) == (pb.TIER_FILE, 20)
            assert await pod.read(ids) == 20


def free_memory_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".arena")]


async def use(pod: Pod, rng: random.Random) -> None:
    """Until the store is gone."""
    with contextlib.suppress(grpc.aio.AioRpcError, KvrelayError, asyncio.CancelledError, asyncio.InvalidStateError):
        while True:
            ids = chain_of(rng.randrange(30), 12)
            await pod.store(ids)
            await pod.read(ids)


async def announced(index: Index, ids: list[BlockId], epoch: str) -> list[Location]:
    """The store's own locations of a chain, in its life `epoch`."""
    found = await index.find(ids)
    return [at for locations in found for at in locations if at.node == node_key("store") and at.epoch == epoch]


async def test_kill_9_in_the_middle_of_writes(tmp_path: Path, redis_server: RedisServer) -> None:
    """At random points: no torn block is ever read (`Pod.read`), the files are taken over and announced, nothing else is left."""
    rng = random.Random(5)
    index = Index(redis_server.url, "default")
    chains = [chain_of(number, 12) for number in range(30)]
    with started(tmp_path, redis_url=redis_server.url) as store:
        for life in range(KILLS):
            async with attached(store.address) as pod:
                using = asyncio.create_task(use(pod, random.Random(life)))
                await asyncio.sleep(rng.uniform(0.05, 0.6))
                store.kill()
                async with asyncio.timeout(20):
                    await using
            store.start()
            assert len(free_memory_files(tmp_path)) == 1, "of this life"
            files = list((tmp_path / "blocks").glob("*/*"))
            assert all(path.suffix == ".kv" for path in files), "no remains"
            async with attached(store.address) as pod:
                seen = await pod.stat()
                assert (seen.num_pods, seen.num_pins, seen.num_writing) == (1, 0, 0)
                assert seen.tiers[1].num_blocks == len(files)
                await until_stat(pod, lambda seen: seen.announcer_backlog == 0)
                found = 0
                for ids in chains:
                    count = await pod.num_found(ids)
                    assert len(await announced(index, ids[:count], pod.attached.epoch)) == count
                    assert await pod.read(ids) == count
                    found += count
        assert found > 0
        assert seen.tiers[1].counters.corrupt == 0
    await index.close()
