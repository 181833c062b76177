"""Pods that only have KV events, and a router's reader that follows them through a real server."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from kvrelay.common.discovery import PodRecord, RetryPolicy
from kvrelay.common.errors import Unavailable
from kvrelay.common.ids import BlockId, PodId
from kvrelay.common.kvevents import BlockRemoved, Event
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.engine.pod.kvredis import RedisPublisher
from kvrelay.router.kvevents import EventReader, KvEventMetrics
from kvrelay.router.snapshots import Snapshot
from tests.common.test_discovery import record
from tests.kvevents import Sets, engine, key, stored
from tests.router.cluster import Known

CLUSTER = "test"
QUICK = RetryPolicy(initial_seconds=0.02, maximum_seconds=0.1)
PIECE = 7
"""Keys in a piece of a snapshot."""


class FakePod:
    """A pod's log and publisher; its cache is a set that random steps change."""

    def __init__(self, url: str, name: str, epoch: str = "e1", **options: Any) -> None:
        self.record = record(name, epoch)
        self.keys: set[BlockId] = set()
        self.publisher = RedisPublisher(url, CLUSTER, QUICK, **{"heartbeat_seconds": 0.1, **options})
        self.log = EventLog(engine(name, epoch), (self.publisher,))
        self.log.start()

    def step(self, rng: random.Random, num_blocks: int = 40) -> None:
        """Some blocks come, some go, some come and go."""
        events: list[Event] = []
        for _ in range(rng.randrange(1, 4)):
            numbers = {rng.randrange(1, 400) for _ in range(rng.randrange(1, 9))}
            new = [number for number in numbers if key(number) not in self.keys]
            if new:
                events.append(stored(*new))
                self.keys.update(map(key, new))
            over = rng.sample(sorted(self.keys), max(0, len(self.keys) - num_blocks))
            if over:
                events.append(BlockRemoved(keys=tuple(over)))
                self.keys.difference_update(over)
        self.log.take(tuple(events))

    def lose_batch(self, rng: random.Random) -> None:
        """A batch that no reader gets, and another one after it."""
        self.log._sequence += 1
        lost = self.log.num_batches
        while self.log.num_batches == lost:
            self.step(rng)


class Cluster:
    """Pods, the directory that knows them, and a router's reader."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.directory = Known()
        self.index = Sets()
        self.pods: dict[str, FakePod] = {}
        self.refuse = 0
        """So many snapshots fail."""
        self.during_snapshot: asyncio.Event | None = None
        """Snapshots are answered when it is set."""
        self.registry = CollectorRegistry()
        metrics = KvEventMetrics(self.registry)
        self.reader = EventReader(url, CLUSTER, self.directory, self.index, self._snapshot, metrics, QUICK)

    async def _snapshot(self, record: PodRecord) -> Snapshot:
        if self.refuse:
            self.refuse -= 1
            raise Unavailable("not now")
        taken = self.pods[record.pod_id].log.snapshot()
        if self.during_snapshot is not None:
            await self.during_snapshot.wait()
        pieces = [list(taken.keys[start : start + PIECE]) for start in range(0, len(taken.keys) or 1, PIECE)]
        return Snapshot(taken.epoch, taken.sequence, pieces)

    async def add(self, name: str, epoch: str = "e1", **options: Any) -> FakePod:
        former = self.pods.get(name)
        if former is not None:
            await former.log.stop()
        pod = self.pods[name] = FakePod(self.url, name, epoch, **options)
        self.directory.add(pod.record)
        return pod

    def true(self) -> bool:
        """The index has of each pod what the pod has, as of its last batch."""
        return all(
            self.reader.known(PodId(name)) == pod.log.num_batches and self.index[PodId(name)] == pod.keys
            for name, pod in self.pods.items()
        )

    def count(self, name: str) -> float:
        return self.registry.get_sample_value(f"kvrelay_router_kv_event_{name}_total") or 0.0


@asynccontextmanager
async def running(url: str, *names: str, **options: Any) -> AsyncIterator[Cluster]:
    cluster = Cluster(url)
    for name in names:
        await cluster.add(name, **options)
    cluster.reader.start()
    try:
        yield cluster
    finally:
        await cluster.reader.stop()
        for pod in cluster.pods.values():
            await pod.log.stop()
