"""Pods and routers find each other through a real server that is killed, stopped, flushed and absent."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvrelay.common.discovery import LEASE_SECONDS, PodDirectory, PodRecord, Registration, RetryPolicy
from kvrelay.common.ids import Epoch, Fingerprint, PodId
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from tests.fixtures_redis import RedisServer

pytestmark = pytest.mark.integration

CLUSTER = "test"
QUICK = RetryPolicy(initial_seconds=0.02, maximum_seconds=0.1)
LAYOUT = KvLayout(
    fingerprint=Fingerprint("f"),
    groups=(
        KvGroup(
            kind=KvGroupKind.FULL,
            layers=(0,),
            block_size=16,
            dtype=KvDtype.FLOAT32,
            num_kv_heads=1,
            head_dim=8,
            shard_heads=1,
        ),
    ),
)
POD = """
import asyncio, sys
from kvrelay.common.discovery import Registration
from tests.common.test_discovery import CLUSTER, record
async def main():
    registration = Registration(sys.argv[1], CLUSTER, record(sys.argv[2]))
    registration.start()
    await registration.registered.wait()
    print("up", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def record(pod_id: str, epoch: str = "e1") -> PodRecord:
    return PodRecord(
        pod_id=PodId(pod_id),
        epoch=Epoch(epoch),
        role="decode",
        model="m",
        fingerprint=Fingerprint("f"),
        grpc_address="127.0.0.1:1",
        http_address="127.0.0.1:2",
        layout=LAYOUT,
        max_model_len=100,
        num_blocks=10,
        transport="tcp",
        version="0",
    )


async def until(directory: PodDirectory, wanted: Callable[[set[str]], bool], seconds: float = 8.0) -> None:
    async with asyncio.timeout(seconds):
        async for pods in directory.updates():
            if wanted({str(pod_id) for pod_id in pods}):
                return


async def until_healthy(directory: PodDirectory, healthy: bool) -> None:
    async with asyncio.timeout(8):
        while directory.healthy is not healthy:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(url: str, *records: PodRecord) -> AsyncIterator[tuple[PodDirectory, list[Registration]]]:
    directory = PodDirectory(url, CLUSTER, QUICK)
    registrations = [Registration(url, CLUSTER, one, QUICK) for one in records]
    await directory.start()
    for registration in registrations:
        registration.start()
    try:
        yield directory, registrations
    finally:
        for registration in registrations:
            await registration.stop()
        await directory.stop()


async def test_pods_come_and_leave_at_once(redis_server: RedisServer) -> None:
    one, two = record("one"), record("two")
    async with running(redis_server.url, one, two) as (directory, (first, _)):
        await until(directory, {"one", "two"}.__eq__)
        assert directory.pods() == {one.pod_id: one, two.pod_id: two}
        assert directory.healthy
        await first.stop()
        await until(directory, {"two"}.__eq__, LEASE_SECONDS - 0.5)
    late = PodDirectory(redis_server.url, CLUSTER)
    await late.start()
    assert late.pods() == {}
    await late.stop()


async def test_clusters_do_not_mix(redis_server: RedisServer) -> None:
    async with running(redis_server.url, record("one")) as (directory, _):
        other = PodDirectory(redis_server.url, "other")
        await until(directory, {"one"}.__eq__)
        await other.start()
        assert other.pods() == {}
        await other.stop()


async def test_a_killed_pod_is_forgotten_with_its_lease(redis_server: RedisServer) -> None:
    command = (sys.executable, "-c", POD, redis_server.url, "victim")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        async with running(redis_server.url, record("survivor")) as (directory, _):
            await until(directory, {"survivor", "victim"}.__eq__)
            process.kill()
            await process.wait()
            await until(directory, {"survivor"}.__eq__, 3 * LEASE_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_pods_survive_a_redis_that_dies_and_comes_back_empty(redis_server: RedisServer) -> None:
    one = record("one")
    async with running(redis_server.url, one) as (directory, _):
        await until(directory, {"one"}.__eq__)
        redis_server.kill()
        await until_healthy(directory, False)
        assert directory.pods() == {one.pod_id: one}
        redis_server.start()
        await until_healthy(directory, True)
        assert directory.pods() == {one.pod_id: one}
        async with asyncio.timeout(10):
            while b"e1" not in redis_server.command("GET", f"kvrelay:{CLUSTER}:pod:one"):
                await asyncio.sleep(0.02)
        late = PodDirectory(redis_server.url, CLUSTER)
        await late.start()
        assert late.pods() == {one.pod_id: one}
        await late.stop()


async def test_pods_survive_a_flush(redis_server: RedisServer) -> None:
    async with running(redis_server.url, record("one"), record("two")) as (directory, _):
        await until(directory, {"one", "two"}.__eq__)
        seen: set[int] = set()

        async def watch() -> None:
            async for pods in directory.updates():
                seen.add(len(pods))

        watcher = asyncio.create_task(watch())
        assert redis_server.command("FLUSHALL").startswith(b"+OK")
        async with asyncio.timeout(3):
            while redis_server.command("SCARD", f"kvrelay:{CLUSTER}:pods") != b":2\r\n":
                await asyncio.sleep(0.02)
        watcher.cancel()
        assert seen <= {2}
        assert len(directory.pods()) == 2


async def test_pods_survive_a_redis_that_hangs(redis_server: RedisServer) -> None:
    async with running(redis_server.url, record("one")) as (directory, (registration,)):
        await until(directory, {"one"}.__eq__)
        redis_server.send_signal(signal.SIGSTOP)
        try:
            await until_healthy(directory, False)
            assert len(directory.pods()) == 1
        finally:
            redis_server.send_signal(signal.SIGCONT)
        await until_healthy(directory, True)
        async with asyncio.timeout(5):
            await registration.registered.wait()
        assert len(directory.pods()) == 1


async def test_without_redis_nothing_waits(redis_server: RedisServer) -> None:
    redis_server.kill()
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with running(redis_server.url, record("one")) as (directory, (registration,)):
        assert not directory.healthy
        assert not registration.registered.is_set()
        redis_server.start()
        await until(directory, {"one"}.__eq__)
        redis_server.kill()
    assert loop.time() - started < 20


async def test_a_restarted_pod_takes_its_place(redis_server: RedisServer) -> None:
    """The former life's farewell, coming late, does not take the new life's lease away."""
    async with running(redis_server.url, record("one", "e1"), record("two")) as (directory, (first, _)):
        await until(directory, {"one", "two"}.__eq__)
        second = Registration(redis_server.url, CLUSTER, record("one", "e2"), QUICK)
        task = first._task  # the former life hangs
        assert task is not None
        task.cancel()
        second.start()
        await until(directory, lambda _: directory.pods()[PodId("one")].epoch == "e2")
        await first.stop()
        async with asyncio.timeout(3):
            await second.registered.wait()
        assert b"e2" in redis_server.command("GET", f"kvrelay:{CLUSTER}:pod:one")
        assert directory.pods()[PodId("one")].epoch == "e2"
        await second.stop()
        await until(directory, {"two"}.__eq__)


async def test_what_cannot_be_read_is_left_out(redis_server: RedisServer) -> None:
    for pod_id, value in (("garbage", "{]"), ("other", '{"pod_id":"x"}'), ("huge", "x" * 60_000)):
        redis_server.command("SADD", f"kvrelay:{CLUSTER}:pods", pod_id)
        redis_server.command("SET", f"kvrelay:{CLUSTER}:pod:{pod_id}", value)
    redis_server.command("PUBLISH", f"kvrelay:{CLUSTER}:changes", "nonsense")
    async with running(redis_server.url, record("one")) as (directory, _):
        await until(directory, {"one"}.__eq__)
        assert directory.healthy


@pytest.mark.unit
def test_retry_policy_grows_and_is_bounded() -> None:
    policy = RetryPolicy(initial_seconds=0.1, multiplier=2, maximum_seconds=1.0, jitter=0.0)
    assert [policy.delay(n) for n in (1, 2, 3, 4, 5, 1000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
