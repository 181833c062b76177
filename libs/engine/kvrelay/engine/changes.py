"""What the prefix cache has gained and lost since it was last asked, as events for the pod's front."""

import dataclasses
from collections import deque
from collections.abc import Sequence

from kvrelay.common.blocks import SPAN
from kvrelay.common.ids import BlockId
from kvrelay.common.kvevents import BlockRemoved, BlockStored, Event
from kvrelay.engine.pool import StoredRun

MAX_TOKENS = 1 << 17
"""Whose blocks one message tells of, within one block: a prompt of any length is told in pieces."""


@dataclasses.dataclass(slots=True)
class _Stored:
    """`keys` of blocks, in order; `tokens` of all of them."""

    parent: BlockId
    extra_keys: tuple[str, ...]
    keys: list[BlockId]
    tokens: list[int]


class CacheChanges:
    """A `CacheListener`. Changes keep their order; neighbours of one kind, where they belong together, are one event."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._spans = block_size // SPAN
        self._max_blocks = max(1, MAX_TOKENS // block_size)
        self._events: deque[_Stored | list[BlockId]] = deque()
        """A list: keys that were removed. None is over `_max_blocks`."""

    def stored(self, runs: Sequence[StoredRun]) -> None:
        for run in runs:
            keys = run.ids[self._spans - 1 :: self._spans]
            parent, done = run.parent, 0
            while done < len(keys):
                event = self._open(parent, run.extra_keys)
                end = min(len(keys), done + self._max_blocks - len(event.keys))
                event.keys += keys[done:end]
                event.tokens += run.token_ids[done * self._block_size : end * self._block_size]
                parent, done = keys[end - 1], end

    def _open(self, parent: BlockId, extra_keys: tuple[str, ...]) -> _Stored:
        """The last event, where blocks after `parent` continue it and it has room; else a new one."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, _Stored)
            and last.keys[-1] == parent
            and last.extra_keys == extra_keys
            and len(last.keys) < self._max_blocks
        ):
            return last
        event = _Stored(parent, extra_keys, [], [])
        self._events.append(event)
        return event

    def removed(self, ids: Sequence[BlockId]) -> None:
        done = 0
        while done < len(ids):
            last = self._events[-1] if self._events else None
            if not isinstance(last, list) or len(last) >= self._max_blocks:
                self._events.append(last := [])
            room = self._max_blocks - len(last)
            last += ids[done : done + room]
            done += room

    def take(self) -> tuple[Event, ...]:
        """The oldest changes, as many as fit one message; empty when all were taken."""
        taken: list[Event] = []
        room = self._max_blocks
        while self._events:
            event = self._events[0]
            size = len(event.keys) if isinstance(event, _Stored) else len(event)
            if size > room:
                break
            room -= size
            taken.append(self._told(self._events.popleft()))
        return tuple(taken)

    def _told(self, event: _Stored | list[BlockId]) -> Event:
        if isinstance(event, list):
            return BlockRemoved(keys=tuple(event))
        return BlockStored(
            parent=event.parent,
            keys=tuple(event.keys),
            token_ids=tuple(event.tokens),
            block_size=self._block_size,
            extra_keys=event.extra_keys,
        )
