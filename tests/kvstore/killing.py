"""A store that is killed again and again while a pod writes, and what is looked at after each time."""

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import grpc.aio

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.index import Index
from kvrelay.kvstore.location import Location, node_key
from tests.kvstore.pod import Pod, attached, chain_of, until_stat
from tests.kvstore.store_process import StoreProcess

MEMORY = 40 * 3 * 4096
FILES = 400 * 4 * 4096
"""Less than what two lives write: blocks are evicted as well."""
NO_REDIS = "redis://127.0.0.1:1/0"


def options(folder: Path, redis_url: str = NO_REDIS) -> tuple[str, ...]:
    files = f"{{tier: file, bytes: {FILES}, directory: {folder / 'blocks'}}}"
    return ("--tiers", f"[{{tier: cpu, bytes: {MEMORY}}}, {files}]", "--redis-url", redis_url)


@contextlib.contextmanager
def started(folder: Path, *more: str, redis_url: str = NO_REDIS) -> Iterator[StoreProcess]:
    store = StoreProcess(folder, *options(folder, redis_url), *more)
    store.start()
    try:
        yield store
    finally:
        store.kill()


def free_memory_files(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".arena")]


async def use(pod: Pod, rng: random.Random, chains: list[list[BlockId]]) -> None:
    """Until the store is gone."""
    with contextlib.suppress(grpc.aio.AioRpcError, KvrelayError, asyncio.CancelledError, asyncio.InvalidStateError):
        while True:
            ids = rng.choice(chains)
            await pod.store(ids)
            await pod.read(ids)


async def announced(index: Index, ids: list[BlockId], epoch: str) -> list[Location]:
    """The store's own locations of a chain, in its life `epoch`."""
    found = await index.find(ids)
    return [at for locations in found for at in locations if at.node == node_key("store") and at.epoch == epoch]


async def kill_again_and_again(folder: Path, redis_url: str, kills: int, seed: int = 5) -> int:
    """At random points. Fails where a torn block is read (`Pod.read`), files are lost or not announced, or anything else is left.

    Gives how many blocks the last life has found.
    """
    rng = random.Random(seed)
    index = Index(redis_url, "default")
    with started(folder, redis_url=redis_url) as store:
        for life in range(kills):
            # Some that the life before had, and some that are new, so that there is always something to write.
            chains = [chain_of(number, 12) for number in range(20 * life, 20 * life + 30)]
            async with attached(store.address) as pod:
                using = asyncio.create_task(use(pod, random.Random(f"{seed} {life}"), chains))
                await asyncio.sleep(rng.uniform(0.05, 0.6))
                store.kill()
                async with asyncio.timeout(20):
                    await using
            store.start()
            assert len(free_memory_files(folder)) == 1, "of this life"
            files = list((folder / "blocks").glob("*/*"))
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
        assert seen.tiers[1].counters.corrupt == 0
    await index.close()
    return found
