"""From pods' event logs through a real server into an index: it equals what the pods have, whatever becomes of the server."""

import asyncio
import random
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvrelay.common.ids import PodId
from kvrelay.common.kvevents import stream_key
from kvrelay.engine.pod import kvredis
from kvrelay.router import kvevents
from tests.fixtures_redis import RedisServer
from tests.router.cluster import until
from tests.router.kvcluster import CLUSTER, Cluster, running

pytestmark = pytest.mark.integration


async def test_the_index_follows(redis_server: RedisServer) -> None:
    rng = random.Random(1)
    async with running(redis_server.url, "one", "two", "three") as cluster:
        for _ in range(100):
            cluster.pods[rng.choice(("one", "two", "three"))].step(rng)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await until(cluster.true)
        assert cluster.count("batches") == sum(pod.log.num_batches for pod in cluster.pods.values()) == 100
        assert (cluster.count("gaps"), cluster.count("snapshots")) == (0, 0)
        assert cluster.registry.get_sample_value("kvrelay_router_kv_event_lag_seconds_count") == 100
        ttl = int(redis_server.command("TTL", stream_key(CLUSTER, PodId("one")))[1:])
        assert 0 < ttl <= kvredis.STREAM_SECONDS


async def test_a_late_router_needs_no_snapshot_of_a_whole_stream_and_one_of_a_trimmed_one(
    redis_server: RedisServer,
) -> None:
    rng = random.Random(2)
    async with running(redis_server.url, "whole") as cluster:
        trimmed = await cluster.add("trimmed", stream_batches=1)
        for _ in range(400):
            trimmed.step(rng)
        cluster.pods["whole"].step(rng)
        await until(cluster.true)
        late = Cluster(redis_server.url)
        late.pods = cluster.pods
        for pod in cluster.pods.values():
            late.directory.add(pod.record)
        late.reader.start()
        await until(late.true)
        assert (late.count("snapshots"), late.count("gaps")) == (1, 0)
        trimmed.step(rng)
        await until(late.true)
        await late.reader.stop()


async def test_after_a_flush(redis_server: RedisServer) -> None:
    rng = random.Random(3)
    async with running(redis_server.url, "one", "two") as cluster:
        for _ in range(20):
            cluster.pods["one"].step(rng)
        await until(cluster.true)
        for _ in range(5):
            redis_server.command("FLUSHALL")
            for pod in cluster.pods.values():
                pod.step(rng)
            await until(cluster.true)


async def test_what_a_flush_took_is_found_missing_while_the_pod_is_silent(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(4)
    async with running(redis_server.url, "one") as cluster:
        pod = cluster.pods["one"]
        pod.step(rng)
        await until(cluster.true)
        stopped, going = asyncio.Event(), asyncio.Event()
        take = cluster.reader._take

        async def slow(*arguments: Any) -> None:
            stopped.set()
            await going.wait()
            await take(*arguments)

        monkeypatch.setattr(cluster.reader, "_take", slow)
        async with asyncio.timeout(5):
            await stopped.wait()
        for _ in range(3):
            pod.step(rng)
        await until(lambda: not pod.publisher._queue)
        redis_server.command("FLUSHALL")
        going.set()
        await until(cluster.true)
        assert cluster.count("gaps") == 1


async def test_redis_dies_and_comes_back_empty(redis_server: RedisServer) -> None:
    rng = random.Random(5)
    async with running(redis_server.url, "one", "two") as cluster:
        for _ in range(3):
            for pod in cluster.pods.values():
                pod.step(rng)
            await until(cluster.true)
            redis_server.kill()
            before = {name: set(keys) for name, keys in cluster.index.items()}
            for _ in range(10):
                for pod in cluster.pods.values():
                    pod.step(rng)
                await asyncio.sleep(0)
            assert dict(cluster.index) == before, "the index stays while Redis is away"
            redis_server.start()
            await until(cluster.true)
        assert all(pod.publisher.num_dropped == 0 for pod in cluster.pods.values())


async def test_a_pod_gives_up_what_is_too_much_while_redis_is_away(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvredis, "MAX_QUEUE_BATCHES", 50)
    rng = random.Random(6)
    async with running(redis_server.url, "one") as cluster:
        pod = cluster.pods["one"]
        pod.step(rng)
        await until(cluster.true)
        redis_server.kill()
        for _ in range(120):
            pod.step(rng)
            assert len(pod.publisher._queue) <= 50
            assert pod.publisher._queue_bytes == sum(len(queued.data) for queued in pod.publisher._queue)
        assert pod.log.num_dropped >= 100 - 50
        redis_server.start()
        await until(cluster.true)
        assert cluster.count("gaps") == cluster.count("snapshots") == 1


async def test_a_redis_that_hangs_holds_no_one_up(redis_server: RedisServer) -> None:
    rng = random.Random(7)
    async with running(redis_server.url, "one") as cluster:
        pod = cluster.pods["one"]
        pod.step(rng)
        await until(cluster.true)
        redis_server.send_signal(signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        longest, last = 0.0, loop.time()
        for _ in range(150):  # over the time that a command may take
            pod.step(rng)
            await asyncio.sleep(0.01)
            longest, last = max(longest, loop.time() - last), loop.time()
        redis_server.send_signal(signal.SIGCONT)
        assert longest < 0.5
        await until(cluster.true)


async def test_a_restarted_pod_has_nothing_of_its_former_life(redis_server: RedisServer) -> None:
    rng = random.Random(8)
    async with running(redis_server.url, "one") as cluster:
        for life in range(1, 5):
            for _ in range(10):
                cluster.pods["one"].step(rng)
            if life % 2:
                await until(cluster.true)
            await cluster.add("one", f"e{life + 1}")
            if life % 2 == 0:
                cluster.pods["one"].step(rng)
            await until(cluster.true)
        assert cluster.count("snapshots") == 0, "a stream tells of a life from its beginning"


async def test_a_pod_whose_lease_ended_is_forgotten(redis_server: RedisServer) -> None:
    rng = random.Random(9)
    async with running(redis_server.url, "one", "two") as cluster:
        for pod in cluster.pods.values():
            pod.step(rng)
        await until(cluster.true)
        cluster.directory.remove(PodId("one"))
        await until(lambda: "one" not in cluster.index)
        assert cluster.reader.known(PodId("one")) is None
        assert cluster.index[PodId("two")] == cluster.pods["two"].keys


async def test_snapshots_that_fail_are_tried_again_and_the_stream_waits(redis_server: RedisServer) -> None:
    rng = random.Random(10)
    async with running(redis_server.url, "one") as cluster:
        pod = cluster.pods["one"]
        pod.step(rng)
        await until(cluster.true)
        cluster.refuse, cluster.during_snapshot = 2, asyncio.Event()
        pod.lose_batch(rng)
        await until(lambda: cluster.reader.known(PodId("one")) is None and not cluster.refuse)
        for _ in range(30):
            pod.step(rng)
        cluster.during_snapshot.set()
        await until(cluster.true)
        assert cluster.count("gaps") == cluster.count("snapshots") == 1


async def test_a_pod_that_dies_during_its_snapshot(redis_server: RedisServer) -> None:
    rng = random.Random(11)
    async with running(redis_server.url, "one") as cluster:
        cluster.during_snapshot = asyncio.Event()
        pod = cluster.pods["one"]
        pod.lose_batch(rng)
        await until(lambda: PodId("one") in cluster.reader._fetching)
        second = await cluster.add("one", "e2")
        second.step(rng)
        await until(cluster.true)
        assert not cluster.reader._fetching


async def test_entries_that_are_no_batches(redis_server: RedisServer) -> None:
    rng = random.Random(12)
    async with running(redis_server.url, "one") as cluster:
        pod = cluster.pods["one"]
        pod.step(rng)
        await until(cluster.true)
        redis_server.command("XADD", stream_key(CLUSTER, PodId("one")), "*", "batch", "nonsense")
        redis_server.command("XADD", stream_key(CLUSTER, PodId("one")), "*", "other", "1")
        pod.step(rng)
        await until(lambda: cluster.count("snapshots") == 2 and cluster.true())


async def test_a_redis_whose_clock_went_back(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its new entries come before those that the router has read."""
    monkeypatch.setattr(kvevents, "SILENT_SECONDS", 0.5)
    rng = random.Random(13)
    async with running(redis_server.url, "one") as cluster:
        pod = cluster.pods["one"]
        pod.step(rng)
        await until(cluster.true)
        cluster.reader._replicas[PodId("one")].cursor = b"99999999999999-0"
        pod.step(rng)
        await until(cluster.true)


async def test_without_redis_nothing_waits(redis_server: RedisServer) -> None:
    redis_server.kill()
    rng = random.Random(14)
    async with running(redis_server.url, "one") as cluster:
        cluster.pods["one"].step(rng)
        assert cluster.reader.known(PodId("one")) is None
        redis_server.start()
        await until(cluster.true)
        redis_server.kill()


OPERATIONS = st.lists(
    st.sampled_from(("step", "step", "step", "steps", "flush", "drop", "restart", "kill", "late", "settle")),
    min_size=1,
    max_size=25,
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ),  # a history that fails takes seconds: shrinking it takes hours
)
@given(operations=OPERATIONS, seed=st.integers(0, 1000))
async def test_any_history(redis_server: RedisServer, operations: list[str], seed: int) -> None:
    rng = random.Random(seed)
    redis_server.command("FLUSHALL")
    async with running(redis_server.url, "one", "two", stream_batches=10) as cluster:
        for number, operation in enumerate(operations):
            pod = cluster.pods[rng.choice(("one", "two"))]
            match operation:
                case "step":
                    pod.step(rng)
                case "steps":
                    for _ in range(rng.randrange(150)):
                        pod.step(rng)
                case "flush":
                    redis_server.command("FLUSHALL")
                case "drop":
                    pod.lose_batch(rng)
                case "restart":
                    await cluster.add(pod.record.pod_id, f"{seed}-{number}")
                case "kill":
                    redis_server.kill()
                    pod.step(rng)
                    redis_server.start()
                case "late":
                    cluster.directory.remove(pod.record.pod_id)
                    await asyncio.sleep(0)
                    cluster.directory.add(pod.record)
                case "settle":
                    await until(cluster.true, 10)
        await until(cluster.true, 10)
        assert {PodId(name): pod.keys for name, pod in cluster.pods.items()} == {
            name: keys for name, keys in cluster.index.items() if name in cluster.pods
        }
