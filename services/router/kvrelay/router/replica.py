"""One pod's prefix cache as its events tell it, kept true in the router's index."""

from collections.abc import Sequence
from typing import Protocol

from kvrelay.common.discovery import PodRecord
from kvrelay.common.ids import BlockId, PodId
from kvrelay.common.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

FIRST_ENTRY = b"0-0"


class Index(Protocol):
    """Which pods have which blocks. Called from the event loop, with a few thousand keys at most."""

    def add_pod(self, pod_id: PodId, block_size: int) -> None:
        """Its blocks may come; `block_size` in tokens."""
        ...

    def remove_pod(self, pod_id: PodId) -> None:
        """It has no blocks, and none come."""
        ...

    def stored(self, pod_id: PodId, keys: Sequence[BlockId]) -> None: ...

    def removed(self, pod_id: PodId, keys: Sequence[BlockId]) -> None:
        """Keys that the pod is not known to have are ignored."""
        ...

    def clear(self, pod_id: PodId) -> None: ...

    def replace(self, pod_id: PodId, keys: Sequence[BlockId]) -> None:
        """The pod has these, and nothing else."""
        ...


class Replica:
    """Of one epoch. It follows from a snapshot, or from the first batch, which nothing comes before."""

    def __init__(self, record: PodRecord, index: Index, now: float) -> None:
        self.record = record
        self.cursor = FIRST_ENTRY
        """The last entry of the stream that was dealt with."""
        self.heard = now
        """When an entry of this epoch last came; monotonic."""
        self.restarted = float("-inf")
        """When the last snapshot was taken in; monotonic."""
        self.sequence: int | None = None
        """The last batch that the index contains; None: the index is not true, a snapshot is needed."""
        self._index = index
        index.add_pod(record.pod_id, record.layout.groups[0].block_size)

    def apply(self, batch: EventBatch) -> bool:
        """False, and nothing is done: batches are missing before this one. Those of other epochs, and known ones, are ignored."""
        if batch.epoch != self.record.epoch:
            return True
        known = self.sequence
        if known is None:
            if batch.sequence > (1 if batch.events else 0):
                return False
            self.restart(known := 0)
        if batch.sequence <= known:
            return True
        if batch.sequence > known + 1 or not batch.events:
            return False
        self._take(batch)
        self.sequence = batch.sequence
        return True

    def _take(self, batch: EventBatch) -> None:
        pod_id = self.record.pod_id
        for event in batch.events:
            match event:
                case BlockStored(keys=keys):
                    self._index.stored(pod_id, keys)
                case BlockRemoved(keys=keys):
                    self._index.removed(pod_id, keys)
                case AllBlocksCleared():
                    self._index.clear(pod_id)

    def restart(self, sequence: int, keys: Sequence[BlockId] = ()) -> None:
        """The pod has these keys after the batch `sequence`; `add` brings the rest of them."""
        self._index.replace(self.record.pod_id, keys)
        self.sequence = sequence

    def add(self, keys: Sequence[BlockId]) -> None:
        self._index.stored(self.record.pod_id, keys)

    def lose(self) -> None:
        """Something was missed. What the index has stays until the snapshot: most of it is right."""
        self.sequence = None

    def end(self) -> None:
        """The pod, or this life of it, is gone."""
        self._index.remove_pod(self.record.pod_id)
