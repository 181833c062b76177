"""Follows the KV events of all living pods, and keeps the router's index of their prefix caches true.

directory ──▶ a Replica a pod ◀── XREAD of all their streams at once
                   │   └── something is missing ──▶ the pod's snapshot; its stream waits meanwhile
                   └──▶ Index

Nothing here is needed to serve: while Redis is away, or a pod does not answer, the index is what it was.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter, Histogram
from redis.exceptions import RedisError
from redis.typing import KeyT, StreamIdT

from kvrelay.common.discovery import PodRecord, RetryPolicy, connect
from kvrelay.common.errors import KvrelayError, StaleEpoch
from kvrelay.common.ids import PodId
from kvrelay.common.kvevents import BATCH_FIELD, decode_batch, stream_key
from kvrelay.common.tasks import end_task
from kvrelay.router.pool import Directory
from kvrelay.router.replica import FIRST_ENTRY, Index, Replica
from kvrelay.router.snapshots import Snapshot

log = logging.getLogger(__name__)

BLOCK_SECONDS: Final = 0.25
"""How long Redis may keep a reading that finds nothing; also after how long a new pod's stream is read."""
READ_ENTRIES: Final = 64
"""Of each stream, at once."""
PAUSE_SECONDS: Final = 0.002
PAUSE_SECONDS_PER_STREAM: Final = 10e-6
"""Between two readings: each names all streams, and entries that come one by one are read together."""
SLICE_SECONDS: Final = 0.002
"""After which the event loop does other things."""
SILENT_SECONDS: Final = 10.0
"""Several times the pods' heartbeat. A stream without any is read from its start: a Redis whose clock went back numbers lower."""
SNAPSHOTS: Final = 8
"""At once."""
SNAPSHOT_PAUSE_SECONDS: Final = 0.25
"""Between two of one pod: a reader that cannot keep up does not make its pods do more."""
RETRY: Final = RetryPolicy()
SNAPSHOT_RETRY: Final = RetryPolicy(initial_seconds=0.2, maximum_seconds=5.0)
_LAG: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

Fetch = Callable[[PodRecord], Awaitable[Snapshot]]
Entries = list[tuple[bytes, dict[bytes, bytes]]]
Answer = list[tuple[bytes, Entries]]


class KvEventMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Histogram(
            "kvrelay_router_kv_event_lag_seconds",
            "From a step's end on a pod to its KV events in the index, by both clocks",
            buckets=_LAG,
            registry=registry,
        )
        self.batches = Counter("kvrelay_router_kv_event_batches", "Batches of KV events applied", registry=registry)
        self.gaps = Counter("kvrelay_router_kv_event_gaps", "Times that KV events were missing", registry=registry)
        self.snapshots = Counter("kvrelay_router_kv_event_snapshots", "Snapshots taken of pods", registry=registry)


class EventReader:
    """`start` once, `stop` once. The directory is started, and stopped, by its owner."""

    def __init__(
        self,
        url: str,
        cluster: str,
        directory: Directory,
        index: Index,
        fetch: Fetch,
        metrics: KvEventMetrics,
        retry: RetryPolicy = RETRY,
    ) -> None:
        """`fetch` raises KvrelayError."""
        self._redis = connect(url)
        self._cluster = cluster
        self._directory = directory
        self._index = index
        self._fetch = fetch
        self._metrics = metrics
        self._retry = retry
        self._replicas: dict[PodId, Replica] = {}
        self._fetching: dict[PodId, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(SNAPSHOTS)
        self._readable = asyncio.Event()
        self._slice = 0.0
        """When the event loop last did other things than take in what was read."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._follow(), name="kv-events-pods"),
            asyncio.create_task(self._read_always(), name="kv-events"),
        ]

    async def stop(self) -> None:
        await asyncio.gather(*map(end_task, self._tasks))
        await asyncio.gather(*map(end_task, self._fetching.values()))
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    def known(self, pod_id: PodId) -> int | None:
        """The last batch of the pod's that the index contains; None: what it has of the pod may be wrong."""
        replica = self._replicas.get(pod_id)
        return None if replica is None or pod_id in self._fetching else replica.sequence

    # Which pods.

    async def _follow(self) -> None:
        async for records in self._directory.updates():
            for pod_id, replica in list(self._replicas.items()):
                record = records.get(pod_id)
                if record is None or record.epoch != replica.record.epoch:
                    self._end(pod_id)
            for pod_id, record in records.items():
                if pod_id not in self._replicas:
                    self._replicas[pod_id] = Replica(record, self._index, time.monotonic())
            self._readable.set()

    def _end(self, pod_id: PodId) -> None:
        self._replicas.pop(pod_id).end()
        task = self._fetching.pop(pod_id, None)
        if task is not None:
            task.cancel()

    def _lives(self, replica: Replica) -> bool:
        return self._replicas.get(replica.record.pod_id) is replica

    # The streams.

    async def _read_always(self) -> None:
        failures = 0
        while True:
            try:
                await self._read()
                failures = 0
            except (RedisError, OSError) as error:
                failures += 1
                if failures == 1:
                    log.warning("KV events cannot be read, trying on: %s", error)
                await asyncio.sleep(self._retry.delay(failures))

    async def _read(self) -> None:
        """Once, all streams whose pods' snapshots are not under way."""
        reading = {
            stream_key(self._cluster, pod_id).encode(): replica
            for pod_id, replica in self._replicas.items()
            if pod_id not in self._fetching
        }
        if not reading:
            self._readable.clear()
            await self._readable.wait()
            return
        streams: dict[KeyT, StreamIdT] = {key: replica.cursor for key, replica in reading.items()}
        answer = await self._redis.xread(streams, count=READ_ENTRIES, block=int(BLOCK_SECONDS * 1000))
        self._slice = time.perf_counter()
        for key, entries in cast(Answer, answer):
            await self._take(reading[key], entries)
        self._listen(reading.values())
        await asyncio.sleep(PAUSE_SECONDS + PAUSE_SECONDS_PER_STREAM * len(reading))

    async def _take(self, replica: Replica, entries: Entries) -> None:
        """Up to the first batch before which others are missing: it waits for the snapshot."""
        for entry_id, fields in entries:
            await self._breathe()
            if not self._lives(replica):
                return
            try:
                batch = decode_batch(fields.get(BATCH_FIELD.encode(), b""))
            except ValueError as error:
                log.warning("a batch of KV events of %s cannot be read: %s", replica.record.pod_id, error)
                replica.cursor = entry_id  # it will not become better
                self._lose(replica)
                return
            before = replica.sequence
            if not replica.apply(batch):
                self._lose(replica)
                return
            replica.cursor = entry_id
            if batch.epoch == replica.record.epoch:
                replica.heard = time.monotonic()
            if batch.events and replica.sequence != before:
                self._metrics.batches.inc()
                self._metrics.lag.observe(max(0.0, time.time() - batch.time))

    async def _breathe(self) -> None:
        if time.perf_counter() - self._slice > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._slice = time.perf_counter()

    def _listen(self, replicas: Iterable[Replica]) -> None:
        now = time.monotonic()
        for replica in replicas:
            if now - replica.heard > SILENT_SECONDS:
                replica.cursor, replica.heard = FIRST_ENTRY, now

    # Snapshots.

    def _lose(self, replica: Replica) -> None:
        pod_id = replica.record.pod_id
        if replica.sequence is not None:
            self._metrics.gaps.inc()
            log.info("KV events of %s are missing after batch %d", pod_id, replica.sequence)
        replica.lose()
        self._fetching[pod_id] = asyncio.create_task(self._restart(replica), name=f"snapshot {pod_id}")

    async def _restart(self, replica: Replica) -> None:
        pod_id = replica.record.pod_id
        failures = 0
        await asyncio.sleep(max(0.0, replica.restarted + SNAPSHOT_PAUSE_SECONDS - time.monotonic()))
        while self._lives(replica):
            try:
                async with self._slots:
                    snapshot = await self._fetch(replica.record)
                if snapshot.epoch != replica.record.epoch:
                    raise StaleEpoch(f"{pod_id} is in epoch {snapshot.epoch} by now")
            except KvrelayError as error:
                failures += 1
                if failures == 1:
                    log.warning("no snapshot of the KV cache of %s, trying on: %s", pod_id, error)
                await asyncio.sleep(SNAPSHOT_RETRY.delay(failures))
                continue
            await self._adopt(replica, snapshot)
            break
        if self._lives(replica):
            del self._fetching[pod_id]
            self._readable.set()

    async def _adopt(self, replica: Replica, snapshot: Snapshot) -> None:
        """Piece by piece; the stream is read on after the last of them, and what the snapshot covers is passed over."""
        for number, piece in enumerate(snapshot.pieces):
            if not self._lives(replica):
                return
            if number == 0:
                replica.restart(snapshot.sequence, piece)
            else:
                replica.add(piece)
            await asyncio.sleep(0)
        replica.restarted = time.monotonic()
        self._metrics.snapshots.inc()
