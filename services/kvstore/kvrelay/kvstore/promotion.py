"""Blocks on their way up into memory. Each is read once, however many wait for it; what is asked of one source in one turn of the
event loop is asked together, in runs.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Protocol

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId
from kvrelay.common.tasks import end_task
from kvrelay.kvstore.level import Counters, Health, Level, LevelSource, Offer, Source
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

ROOM_SECONDS = 1.0
"""For which a block that comes up waits for room."""

Coming = asyncio.Future[Slot | None]
"""A block, pinned for the one who waits for it; None where it cannot be had."""


class Store(Protocol):
    """Where blocks go. See `chain.Chain`."""

    memory: MemoryTier

    def allocate(self, info: BlockInfo) -> Slot | None: ...

    def has(self, block_id: BlockId) -> bool: ...

    def commit(self, slot: Slot, checksum: int) -> None: ...

    def give_up(self, slot: Slot) -> None: ...

    def take(self, block_id: BlockId) -> Slot | None: ...

    def moved(self, info: BlockInfo) -> None: ...


class Promotions:
    """A slot is this one's from when there is room for its block until that is whole or given up. Readings end only by `close`: a block
    that no one waits for any more comes all the same."""

    def __init__(self, store: Store, levels: Sequence[Level], counters: Counters) -> None:
        """`counters`: of memory."""
        self.roomier = asyncio.Event()
        """Something of memory has been let go."""
        self._store = store
        self._levels = [(level, LevelSource(level)) for level in levels]
        self._counters = counters
        self._waiting: dict[BlockId, list[Coming]] = {}
        self._asked: dict[Source, list[BlockInfo]] = {}
        """In this turn of the loop."""
        self._tasks: set[asyncio.Task[None]] = set()

    def bring(self, block_id: BlockId, elsewhere: Offer | None) -> Coming:
        """From the nearest that has it whole, `elsewhere` being the farthest. To be waited for, or dropped."""
        coming: Coming = asyncio.get_running_loop().create_future()
        if (waiting := self._waiting.get(block_id)) is not None:
            waiting.append(coming)
            return coming
        self._waiting[block_id] = [coming]
        if any(level.holds(block_id) for level, _ in self._levels):
            self._begin(self._climb(block_id, elsewhere))
        elif elsewhere is not None:
            self._ask(elsewhere)
        else:
            self._settle(block_id)
        return coming

    async def close(self) -> None:
        """Who waits waits in vain."""
        self._asked.clear()
        for task in tuple(self._tasks):
            await end_task(task)
        for block_id in tuple(self._waiting):
            self._settle(block_id)

    # Which way.

    async def _climb(self, block_id: BlockId, elsewhere: Offer | None) -> None:
        try:
            for level, source in self._levels:
                info = level.tier.find(block_id) if level.healthy else None
                if info is not None:
                    if not await self._fetch(source, [info]):
                        return
                    self._store.moved(info)
            if elsewhere is not None:
                await self._fetch(elsewhere.source, [elsewhere.info])
        finally:
            self._settle(block_id)

    def _ask(self, offer: Offer) -> None:
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._fetch_asked)
        self._asked.setdefault(offer.source, []).append(offer.info)

    def _fetch_asked(self) -> None:
        asked, self._asked = self._asked, {}
        for source, infos in asked.items():
            for run in _runs(infos, source.run_bytes):
                self._begin(self._run(source, run))

    async def _run(self, source: Source, infos: Sequence[BlockInfo]) -> None:
        lost = infos
        try:
            lost = await self._fetch(source, infos)
        finally:
            for info in lost:  # not more: of what was whole, some may have left memory, and be on its way again
                self._settle(info.id)

    def _settle(self, block_id: BlockId) -> None:
        """Who waits has the block, if it is in memory now."""
        for coming in self._waiting.pop(block_id, ()):
            if not coming.done():
                slot = self._store.take(block_id)
                self._counters.misses += slot is None
                coming.set_result(slot)

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, name="promote")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a promotion failed", exc_info=error)  # a fault of ours: a miss for who waited

    # One source.

    async def _fetch(self, source: Source, infos: Sequence[BlockInfo]) -> Sequence[BlockInfo]:
        """As many at once as there is room for. Gives those that are not whole; who waits for the others is settled, also where no room
        comes for them."""
        lost: list[BlockInfo] = []
        rest = deque(infos)
        while rest:
            slots = self._room(rest) or await self._room_later(rest)
            lost += await self._fill(source, slots)
        return lost

    def _room(self, rest: deque[BlockInfo]) -> list[Slot]:
        """For the first of them that there is room for now, which it takes out. What others have written, or write, is settled."""
        slots = []
        while rest:
            slot = self._store.allocate(rest[0])
            if slot is not None:
                slots.append(slot)
            elif self._store.has(rest[0].id):
                self._settle(rest[0].id)
            else:
                break
            rest.popleft()
        return slots

    async def _room_later(self, rest: deque[BlockInfo]) -> list[Slot]:
        """As `_room`, when others' blocks have gone down. Where that takes too long, all are taken out and settled."""
        slots: list[Slot] = []
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while rest and not slots:
                    self.roomier.clear()
                    await self.roomier.wait()
                    slots = self._room(rest)
        except TimeoutError:
            self._counters.refused += len(rest)
            while rest:
                self._settle(rest.popleft().id)
        return slots

    async def _fill(self, source: Source, slots: Sequence[Slot]) -> list[BlockInfo]:
        """Commits what is whole, and settles it; of the others, which it gives, the room is given up."""
        outcomes: Sequence[KvrelayError | None] = [_ENDED] * len(slots)
        lost = []
        try:
            outcomes = await self._read(source, slots) if slots else ()
        finally:  # cancelled as well: then nothing more is written into them
            for slot, outcome in zip(slots, outcomes, strict=True):
                if outcome is None:
                    self._store.commit(slot, slot.info.checksum)
                    self._settle(slot.info.id)
                else:
                    self._store.give_up(slot)
                    lost.append(slot.info)
        return lost

    async def _read(self, source: Source, slots: Sequence[Slot]) -> Sequence[KvrelayError | None]:
        health = source.health
        started = time.monotonic()
        health.pace.begin(started)
        num_bytes = 0
        try:
            outcomes = await source.get(self._store.memory, slots)
            num_bytes = sum(slot.info.size for slot, outcome in zip(slots, outcomes, strict=True) if outcome is None)
        finally:
            ended = time.monotonic()
            health.counters.seconds_reading += ended - started
            health.pace.end(ended, num_bytes)
        health.counters.bytes_read += num_bytes
        for outcome in outcomes:
            _count(health, source, outcome)
        return outcomes


_ENDED = TierFailed("the store ends")


def _count(health: Health, source: Source, outcome: KvrelayError | None) -> None:
    match outcome:
        case None:
            health.counters.hits += 1
        case Missing():
            health.counters.misses += 1
        case Corrupt():
            health.counters.corrupt += 1
            log.warning("a block of the %s tier is corrupt: %s", health.name, outcome.message)
        case _:
            source.failed(outcome)


def _runs(infos: Sequence[BlockInfo], num_bytes: int) -> Iterator[list[BlockInfo]]:
    """In order, each of `num_bytes` at most, or of one block."""
    run: list[BlockInfo] = []
    left = num_bytes
    for info in infos:
        if run and info.size > left:
            yield run
            run, left = [], num_bytes
        run.append(info)
        left -= info.size
    if run:
        yield run
