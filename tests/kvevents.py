"""Pods that only have KV events, and an index that only has sets."""

import types
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kvrelay.common.blocks import NO_PARENT
from kvrelay.common.ids import BlockId, Epoch, PodId
from kvrelay.common.kvevents import BlockStored


def key(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "little"))


def stored(*numbers: int) -> BlockStored:
    """Blocks of 16 tokens at the beginning of a prompt."""
    return BlockStored(parent=NO_PARENT, keys=tuple(map(key, numbers)), block_size=16)


class Sets(defaultdict[PodId, set[BlockId]]):
    """The plainest `Index`."""

    def __init__(self) -> None:
        super().__init__(set)

    def add_pod(self, pod_id: PodId, block_size: int) -> None:
        self[pod_id].clear()

    def remove_pod(self, pod_id: PodId) -> None:
        self.pop(pod_id, None)

    def stored(self, pod_id: PodId, keys: Sequence[BlockId]) -> None:
        self[pod_id].update(keys)

    def removed(self, pod_id: PodId, keys: Sequence[BlockId]) -> None:
        self[pod_id].difference_update(keys)

    def replace(self, pod_id: PodId, keys: Iterable[BlockId]) -> None:
        self[pod_id] = set(keys)

    def clear(self, pod_id: PodId) -> None:  # type: ignore[override]
        self.pop(pod_id, None)


def engine(pod_id: str, epoch: str) -> Any:
    """All that an `EventLog` asks of one."""
    return types.SimpleNamespace(info=types.SimpleNamespace(pod_id=PodId(pod_id), epoch=Epoch(epoch), model="model"))
