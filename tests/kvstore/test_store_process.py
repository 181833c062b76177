"""Stores and pods as real processes, killed and stopped: nothing leaks, nothing torn is ever read, files come back."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.v1 import kvstore_pb2 as pb
from tests.fixtures_redis import RedisServer
from tests.kvstore.killing import kill_again_and_again, started
from tests.kvstore.pod import attached, chain_of, until_stat

pytestmark = pytest.mark.integration

KILLS = int(os.environ.get("KVRELAY_KVSTORE_KILLS", "50"))


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


@pytest.mark.timeout(900)
async def test_kill_9_in_the_middle_of_writes(tmp_path: Path, redis_server: RedisServer) -> None:
    """At random points: no torn block is ever read, the files are taken over and announced, nothing else is left."""
    assert await kill_again_and_again(tmp_path, redis_server.url, KILLS) > 0
