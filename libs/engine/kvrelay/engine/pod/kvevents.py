"""A pod's KV events: numbered as they come from the engine, handed to all who publish them, and summed up for snapshots.

engine.outputs() ──▶ Routes ──▶ EventLog ──▶ RedisPublisher     a stream, for our routers
                                   │     └──▶ ZmqPublisher       vLLM's schema, where configured
                                   └──▶ snapshot                 GetCachedBlocks
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from kvrelay.common.errors import Internal
from kvrelay.common.ids import BlockId, Epoch
from kvrelay.common.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvrelay.engine.api import EngineClient
from kvrelay.engine.messages import EngineInfo
from kvrelay.engine.pod.kvredis import RedisPublisher
from kvrelay.engine.pod.settings import PodSettings


class Publisher(Protocol):
    """`start` once, `publish` in the order of the numbers and without waiting for anyone, `stop` once, also without a start."""

    def start(self, info: EngineInfo) -> None:
        """Raises Internal where it cannot listen."""
        ...

    @property
    def num_dropped(self) -> int:
        """Batches that were not published at all."""
        ...

    def publish(self, batch: EventBatch) -> None: ...

    async def stop(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """The keys of all cached blocks, after the batch `sequence` of the epoch; 0: before the first."""

    epoch: Epoch
    sequence: int
    keys: tuple[BlockId, ...]


class EventLog:
    """Owned by the pod, from the engine's start to the pod's end: one epoch."""

    def __init__(self, engine: EngineClient, publishers: Sequence[Publisher]) -> None:
        self.publishers = publishers
        self._engine = engine
        self._sequence = 0
        self._keys: set[BlockId] = set()

    @property
    def num_batches(self) -> int:
        return self._sequence

    @property
    def num_dropped(self) -> int:
        return sum(publisher.num_dropped for publisher in self.publishers)

    def start(self) -> None:
        """The engine has started. Raises Internal where a publisher cannot listen."""
        for publisher in self.publishers:
            publisher.start(self._engine.info)

    async def stop(self) -> None:
        for publisher in self.publishers:
            await publisher.stop()

    def take(self, events: tuple[Event, ...]) -> None:
        """A step's changes; none is no batch."""
        if not events:
            return
        self._sequence += 1
        for event in events:
            match event:
                case BlockStored(keys=keys):
                    self._keys.update(keys)
                case BlockRemoved(keys=keys):
                    self._keys.difference_update(keys)
                case AllBlocksCleared():
                    self._keys.clear()
        batch = EventBatch(epoch=self._engine.info.epoch, sequence=self._sequence, time=time.time(), events=events)
        for publisher in self.publishers:
            publisher.publish(batch)

    def snapshot(self) -> Snapshot:
        return Snapshot(self._engine.info.epoch, self._sequence, tuple(self._keys))


def event_log(settings: PodSettings, engine: EngineClient) -> EventLog:
    """With the publishers that the settings name. Raises Internal where ZMQ is wanted and is not installed."""
    publishers: list[Publisher] = []
    if settings.kv_events:
        publishers.append(RedisPublisher(settings.redis_url, settings.cluster))
    if settings.kv_events_zmq is not None:
        try:
            from kvrelay.engine.pod.kvzmq import ZmqPublisher  # an extra: not every pod has it
        except ImportError as error:
            raise Internal(f"option --kv-events-zmq needs pyzmq, the extra zmq: {error}") from error
        publishers.append(
            ZmqPublisher(
                settings.kv_events_zmq,
                settings.kv_events_zmq_replay,
                form=settings.kv_events_zmq_format,
                topic=settings.kv_events_zmq_topic,
            )
        )
    return EventLog(engine, publishers)
