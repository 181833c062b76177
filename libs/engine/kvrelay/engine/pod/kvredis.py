"""KV events onto the pod's Redis stream. Redis may be away, slow, full or come back empty: the pod never waits for it."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from typing import Final, NamedTuple

from redis.exceptions import RedisError

from kvrelay.common.discovery import RetryPolicy, connect
from kvrelay.common.kvevents import BATCH_FIELD, EventBatch, encode_batch, stream_key
from kvrelay.common.tasks import end_task
from kvrelay.engine.messages import EngineInfo

log = logging.getLogger(__name__)

STREAM_BATCHES: Final = 2048
"""What the stream keeps, about; who is further behind takes a snapshot, which then costs less."""
STREAM_SECONDS: Final = 30
"""The life of a stream to which nothing is added any more."""
HEARTBEAT_SECONDS: Final = 2.0
"""After which a batch without events says how far a silent pod has come: what was lost before is found missing."""
MAX_QUEUE_BATCHES: Final = 4096
MAX_QUEUE_BYTES: Final = 16 << 20
PIPELINE_BATCHES: Final = 128
RETRY: Final = RetryPolicy()


class Queued(NamedTuple):
    sequence: int
    data: bytes


class RedisPublisher:
    """A task of its own adds what was published, in order, and again what Redis may not have got."""

    def __init__(
        self,
        url: str,
        cluster: str,
        retry: RetryPolicy = RETRY,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        stream_batches: int = STREAM_BATCHES,
    ) -> None:
        self.num_dropped = 0
        """Batches that were given up while Redis was away or too slow."""
        self._redis = connect(url)
        self._cluster = cluster
        self._retry = retry
        self._heartbeat_seconds = heartbeat_seconds
        self._stream_batches = stream_batches
        self._queue: deque[Queued] = deque()
        self._queue_bytes = 0
        self._wake = asyncio.Event()
        self._info: EngineInfo | None = None
        self._sequence = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, info: EngineInfo) -> None:
        self._info = info
        self._task = asyncio.create_task(self._run(info), name="kv-events")

    def publish(self, batch: EventBatch) -> None:
        """Never waits. Where too much waits already, all of that is given up: its readers need a snapshot, and that covers it."""
        data = encode_batch(batch)
        self._sequence = batch.sequence
        if len(self._queue) >= MAX_QUEUE_BATCHES or self._queue_bytes + len(data) > MAX_QUEUE_BYTES:
            self.num_dropped += len(self._queue)
            self._queue.clear()
            self._queue_bytes = 0
        self._queue.append(Queued(batch.sequence, data))
        self._queue_bytes += len(data)
        self._wake.set()

    async def stop(self) -> None:
        """What waits is not sent any more: the pod's lease is over."""
        if self._task is not None:
            await end_task(self._task)
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _run(self, info: EngineInfo) -> None:
        key = stream_key(self._cluster, info.pod_id)
        failures = 0
        while True:
            try:
                await self._send(key, info)
            except (RedisError, OSError) as error:
                failures += 1
                if failures == 1:
                    log.warning("KV events cannot be published, trying on: %s", error)
                await asyncio.sleep(self._retry.delay(failures))
                continue
            failures = 0
            if self._queue:
                continue
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):  # wait_for may lose a cancellation in Python 3.11
                    await self._wake.wait()

    async def _send(self, key: str, info: EngineInfo) -> None:
        """The oldest batches, or how far the pod has come. A failure may leave some of them in the stream; they come twice then."""
        batches = list(itertools.islice(self._queue, PIPELINE_BATCHES)) or [self._heartbeat(info)]
        async with self._redis.pipeline(transaction=False) as pipe:
            for queued in batches:
                pipe.xadd(key, {BATCH_FIELD: queued.data}, maxlen=self._stream_batches, approximate=True)
            pipe.expire(key, STREAM_SECONDS)
            await pipe.execute()
        while self._queue and self._queue[0].sequence <= batches[-1].sequence:
            self._queue_bytes -= len(self._queue.popleft().data)

    def _heartbeat(self, info: EngineInfo) -> Queued:
        batch = EventBatch(epoch=info.epoch, sequence=self._sequence, time=time.time(), events=())
        return Queued(self._sequence, encode_batch(batch))
