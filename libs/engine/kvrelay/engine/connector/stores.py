"""Computed blocks into the KV store, behind the steps.

A step's full blocks are noted by their keys. Some at a time, those that the cache still has are lent to a copy: they stay as they are
until it is done. What the cache loses before its turn is lost; so is what the store has no room for.

Where the cache is nearly full, the blocks that it will give away next are offered again, first of all: a store that has lost them, or had no
room before, takes them now. So a request that was preempted finds what it had computed.
"""

import asyncio
import dataclasses
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor

from kvrelay.common.blocks import NO_PARENT
from kvrelay.common.ids import BlockId
from kvrelay.common.tasks import outlast
from kvrelay.engine.connector.base import Connector, Room, Writing
from kvrelay.engine.connector.copies import Copier
from kvrelay.engine.core import Engine
from kvrelay.engine.sequence import Sequence
from kvrelay.transfer.segments import head

log = logging.getLogger(__name__)

MAX_WAITING = 1 << 16
"""Blocks; beyond them those that wait longest are dropped."""
BATCH_SPANS = 64
POLL_SECONDS = 1.0
"""Between two looks at whether a store that was away is back."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    key: BlockId
    ids: tuple[BlockId, ...]
    heads: tuple[BlockId, ...]


@dataclasses.dataclass(slots=True)
class StoreCounters:
    spans: int = 0
    num_bytes: int = 0
    dropped: int = 0
    """Blocks that the cache lost first, or that waited too long."""
    refused: int = 0
    """Batches of which the store had no room for some."""


class Stores:
    """Everything runs on the event loop but for the copies."""

    def __init__(
        self, engine: Engine, connector: Connector, copier: Copier, thread: Executor, on_change: Callable[[], None]
    ) -> None:
        self.counters = StoreCounters()
        self._engine = engine
        self._manager = engine.manager
        self._connector = connector
        self._copier = copier
        self._thread = thread
        self._on_change = on_change
        self._waiting: deque[_Waiting] = deque()
        self._known: dict[BlockId, _Waiting] = {}
        """Of what the cache has, by its keys, and of some that it had."""
        self._leaving: OrderedDict[BlockId, None] = OrderedDict()
        """Keys that were offered again, the last ones."""
        self._num_lent = 0
        self._news = asyncio.Event()
        # Blocks that are lent cannot be given to others: only ever a small part of them.
        most = max(1, self._manager.pool.num_blocks // 32)
        self._batch_blocks = min(most, max(1, BATCH_SPANS // self._manager.spans))
        engine.manager.on_cached = self._offer

    @property
    def num_waiting(self) -> int:
        """Blocks, those that are being copied included."""
        return len(self._waiting) + self._num_lent

    def _offer(self, seq: Sequence, first: int, end: int, new: bool) -> None:
        spans, chain = self._manager.spans, seq.block_ids
        for block in range(first, end):
            part = range(block * spans, (block + 1) * spans)
            ids, heads = tuple(chain[i] for i in part), tuple(head(chain, i) for i in part)
            entry = self._known[ids[-1]] = _Waiting(ids[-1], ids, heads)
            if new:
                self._waiting.append(entry)
        self._offer_leaving()
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self.counters.dropped += 1
        if len(self._known) > 2 * self._manager.pool.num_blocks:
            self._known = {key: self._known[key] for key in self._manager.pool.cached if key in self._known}
        if self._waiting:
            self._news.set()

    def _offer_leaving(self) -> None:
        pool = self._manager.pool
        if len(pool.blank) >= self._batch_blocks:
            return
        for block in list(itertools.islice(pool.idle, self._batch_blocks)):
            entry = self._known.get(pool.keys[block] or NO_PARENT)
            if entry is not None and entry.key not in self._leaving:
                self._leaving[entry.key] = None
                self._waiting.appendleft(entry)
        while len(self._leaving) > pool.num_blocks:
            self._leaving.popitem(last=False)

    async def run(self) -> None:
        """For as long as the engine lives."""
        while True:
            await self._news.wait()
            if not self._connector.ready:
                await asyncio.sleep(POLL_SECONDS)
                continue
            self._news.clear()
            while self._waiting and self._connector.ready:
                try:
                    await self._store_some()
                except Exception:  # a fault of ours costs these blocks, and not all that come after them
                    log.exception("blocks were not stored")
            if self._waiting:
                self._news.set()

    async def _store_some(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(self._batch_blocks, len(self._waiting)))]
        here = [entry for entry in batch if entry.key in self._manager.pool.cached]
        self.counters.dropped += len(batch) - len(here)
        blocks = [self._manager.pool.cached[entry.key] for entry in here]
        self._manager.lend(blocks)
        self._num_lent = len(blocks)
        try:
            await self._write(here, blocks)
        finally:
            self._num_lent = 0
            self._manager.take_back(blocks)
            if self._engine.has_work:  # for want of these blocks it may not have gone on
                self._on_change()

    async def _write(self, entries: list[_Waiting], blocks: list[int]) -> None:
        ids = [block_id for entry in entries for block_id in entry.ids]
        in_heads = [head for entry in entries for head in entry.heads]
        if not ids:
            return
        writing = await self._connector.begin(ids, in_heads, self._copier.identity.size)
        self.counters.refused += writing.is_refused
        if writing.rooms:
            await self._copy(writing, ids, blocks)

    async def _copy(self, writing: Writing, ids: list[BlockId], blocks: list[int]) -> None:
        rooms = list(writing.rooms)
        infos = [self._copier.info(ids[room.index]) for room in rooms]
        slots = [self._slot(blocks, room) for room in rooms]
        loop = asyncio.get_running_loop()
        try:
            checksums = await outlast(loop.run_in_executor(self._thread, self._copier.store, rooms, infos, slots))
        except BaseException:  # whatever it was, nobody else can give the rooms back
            writing.give_up(rooms)
            raise
        writing.commit(rooms, checksums)
        self.counters.spans += len(rooms)
        self.counters.num_bytes += sum(info.size for info in infos)

    def _slot(self, blocks: list[int], room: Room) -> int:
        block, within = divmod(room.index, self._manager.spans)
        return blocks[block] * self._manager.block_size + within * 16
