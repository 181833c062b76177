"""The tiers of a node, one below the other: hits promote into memory, evictions cascade down, and the index hears of both.

Blocks are written into memory, by pods, and served from there. While memory is nearly full, its coldest blocks are written to the
tier below and leave (`_sink`); that one does the same. A block that memory holds may be in a tier below as well: it then leaves memory
for nothing. A tier that fails is left alone for a while: what would go there is dropped, what is there is a miss.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from math import inf
from typing import Protocol

from kvrelay.common.ids import BlockId
from kvrelay.common.tasks import end_task
from kvrelay.kvstore.level import HIGH_SHARE, Counters, Level, Offer
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.promotion import Coming, Promotions
from kvrelay.kvstore.tiers.base import Corrupt, Missing, Sinking, Tier, TierFailed
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

REOPEN_SECONDS = 30.0
SPARE_BYTES = 16 << 10
"""What a tier may take for a block beside its bytes."""


class Listener(Protocol):
    """Hears of each block's highest tier."""

    def stored(self, info: BlockInfo, tier: str) -> None: ...

    def removed(self, info: BlockInfo) -> None: ...


class Chain:
    """Calls are for one event loop. `levels` are the tiers below memory, the nearest first."""

    def __init__(self, memory: MemoryTier, tiers: Sequence[Tier], listener: Listener) -> None:
        self.memory = memory
        self.levels = [Level(tier) for tier in tiers]
        self.counters = Counters()
        """Of memory."""
        self._listener = listener
        self._promotions = Promotions(self, self.levels, self.counters)
        self._full = asyncio.Event()
        self._idle = asyncio.Event()
        """Nothing goes down from memory now."""
        self._high_share = HIGH_SHARE
        self._sinks: list[asyncio.Task[None]] = []
        self._opening: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """A tier that cannot be opened is left alone, said to be so, and tried again every REOPEN_SECONDS."""
        for level in self.levels:
            if not await self._open(level):
                self._opening.append(asyncio.create_task(self._reopen(level), name=f"open {level.name}"))
        self._sinks = [asyncio.create_task(self._sink_memory(), name="sink memory")]
        for upper, lower in zip(self.levels, self.levels[1:], strict=False):
            self._sinks.append(asyncio.create_task(self._sink(upper, lower), name=f"sink {upper.tier.name}"))

    async def _open(self, level: Level) -> bool:
        try:
            infos = await level.tier.open()
        except TierFailed as error:
            if level.failed_until < inf:
                log.error("the %s tier cannot be opened: %s", level.name, error.message)
            level.failed_until, level.reason = inf, error.message
            return False
        level.failed_until = 0.0
        for info in infos:
            self.moved(info)
        return True

    async def _reopen(self, level: Level) -> None:
        await asyncio.sleep(REOPEN_SECONDS)
        while not await self._open(level):
            await asyncio.sleep(REOPEN_SECONDS)
        log.info("the %s tier is open", level.name)

    @property
    def sinks(self) -> Sequence[asyncio.Task[None]]:
        """They end only by `close`, or by a fault of ours."""
        return tuple(self._sinks)

    async def flush(self) -> None:
        """Before the end: what is in memory and not pinned goes down, as long as a tier takes it. The caller bounds it."""
        if self._next() is not None:
            self._high_share = 0.0
            self._idle.clear()
            self._full.set()
            await self._idle.wait()

    async def close(self) -> None:
        for task in (*self._sinks, *self._opening):
            await end_task(task)
        await self._promotions.close()
        for level in self.levels:
            await level.tier.close()

    # What is here.

    def ids(self) -> list[BlockId]:
        """Of what is in any tier that is not left alone, each once."""
        known = dict.fromkeys(self.memory.ids())
        for level in self.levels:
            if level.healthy:
                known.update(dict.fromkeys(level.tier.ids()))
        return list(known)

    def find(self, block_id: BlockId) -> tuple[BlockInfo, str] | None:
        """The block and its highest tier."""
        if (info := self.memory.find(block_id)) is not None:
            return info, "cpu"
        for level in self.levels:
            if level.healthy and (info := level.tier.find(block_id)) is not None:
                return info, level.tier.name
        return None

    def health(self, tier: str) -> Level | None:
        """Of the tier of that name; None for memory."""
        return next((level for level in self.levels if level.name == tier), None)

    # Write.

    def begin(self, info: BlockInfo) -> Slot | None:
        """Room in memory for a block to be written; None where it is here already, or there is no room now. Nothing waits."""
        slot = self.allocate(info)
        self.counters.refused += slot is None and not self.has(info.id)
        return slot

    def commit(self, slot: Slot, checksum: int) -> None:
        self.memory.commit(slot, checksum)
        self.counters.bytes_written += slot.info.size
        self._listener.stored(slot.info, "cpu")

    def give_up(self, slot: Slot) -> None:
        self.memory.give_up(slot)
        self._promotions.roomier.set()

    # Read.

    def take(self, block_id: BlockId) -> Slot | None:
        """The block, pinned, where it is in memory already."""
        slot = self.memory.pin(block_id)
        if slot is not None:
            self.counters.hits += 1
            self.counters.bytes_read += slot.info.size
        return slot

    def bring(self, block_id: BlockId, elsewhere: Offer | None = None) -> Slot | Coming:
        """The block in memory, pinned, brought there if need be. Several who ask at once share one reading.

        `elsewhere`: where it is had from when no tier has it. Who does not wait for the end drops it.
        """
        return self.take(block_id) or self._promotions.bring(block_id, elsewhere)

    async def load(self, block_id: BlockId) -> Slot | None:
        """`bring`, waited for; None for a miss."""
        coming = self.bring(block_id)
        if isinstance(coming, Slot):
            return coming
        try:
            return await coming
        except asyncio.CancelledError:
            self.drop(coming)
            raise

    def drop(self, coming: Slot | Coming) -> None:
        """What was brought, or is being brought, is not wanted any more."""
        if isinstance(coming, Slot):
            self.release(coming)
        elif not coming.cancel() and not coming.cancelled() and (slot := coming.result()) is not None:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        self.memory.unpin(slot)
        self._promotions.roomier.set()

    async def remove(self, block_id: BlockId) -> None:
        """From all tiers."""
        found = self.find(block_id)
        self.memory.remove(block_id)
        if found is not None:
            for level in self.levels:
                await self._forget(level, found[0])

    def verify(self, slot: Slot) -> bool:
        """Whether a pinned block's bytes are still what was committed; where not, it is removed from memory."""
        whole = self.memory.is_whole(slot)
        if not whole:
            self.distrust(slot)
        return whole

    def distrust(self, slot: Slot) -> None:
        """A pinned block's bytes are not what was committed: it is in memory no more. Below it may lie whole."""
        self.counters.corrupt += 1
        if self.memory.holds(slot):
            self.memory.remove(slot.info.id)
            self.moved(slot.info)

    async def _forget(self, level: Level, info: BlockInfo) -> None:
        try:
            await level.tier.remove(info.id)
        except TierFailed as error:
            level.failed(error)
        self.moved(info)

    def moved(self, info: BlockInfo) -> None:
        """A tier has got or lost the block: where it lies now, if anywhere, is news."""
        found = self.find(info.id)
        if found is None:
            self._listener.removed(info)
        else:
            self._listener.stored(*found)

    # Make room.

    def has(self, block_id: BlockId) -> bool:
        """In memory, or on its way there."""
        return block_id in self.memory or self.memory.is_writing(block_id)

    def allocate(self, info: BlockInfo) -> Slot | None:
        """Room in memory for a block, of what can leave it at once if need be; None where it is here, or on its way, or there is no room."""
        while (slot := self.memory.allocate(info)) is None:
            if self.has(info.id) or not self._drop_one(info.id):
                return None
        self._look()
        return slot

    @property
    def _is_full(self) -> bool:
        return self.memory.used_bytes > self._high_share * self.memory.limit_bytes

    def _look(self) -> None:
        if self.levels and self._is_full:
            self._full.set()

    def _drop_one(self, incoming: BlockId) -> bool:
        """The coldest block that can leave memory at once: one that lies below already, or all where there is nothing below."""
        victim = self.memory.coldest(incoming)
        if victim is None or (self._next() is not None and not self._below(victim.info.id)):
            self._full.set()
            return False
        self._leave(victim)
        return True

    def _next(self) -> Level | None:
        return next((level for level in self.levels if level.healthy), None)

    def _below(self, block_id: BlockId) -> bool:
        return any(level.tier.find(block_id) is not None for level in self.levels)

    def _leave(self, victim: Slot) -> None:
        self.counters.evictions += 1
        self.counters.dropped += not self._below(victim.info.id)
        self.memory.evict(victim.info.id)
        self._promotions.roomier.set()
        self.moved(victim.info)

    async def _sink_memory(self) -> None:
        while True:
            await self._full.wait()
            self._full.clear()
            while self._is_full:
                victim = self.memory.coldest(BlockId(bytes(16)))
                if victim is None:
                    break  # all is pinned or being written; `begin` looks again
                level = self._next()
                if level is None or self._below(victim.info.id):
                    self._leave(victim)
                else:
                    await self._demote(victim, level)
            self._idle.set()

    async def _demote(self, victim: Slot, level: Level) -> None:
        victim.pins += 1
        try:
            with self.memory.data(victim) as data:
                await self._write(level, victim.info, data)
        finally:
            self.memory.unpin(victim)
        if victim.doomed:  # removed meanwhile, and below it came after that
            await self._forget(level, victim.info)
        elif self.memory.holds(victim) and not victim.pins:
            self._leave(victim)

    async def _write(self, level: Level, info: BlockInfo, data: memoryview) -> None:
        await self._room_below(level, info)
        started = time.monotonic()
        try:
            evicted = await level.tier.put(info, data)
        except TierFailed as error:
            level.failed(error)
            return
        level.counters.seconds_writing += time.monotonic() - started
        level.counters.bytes_written += info.size
        level.grown.set()
        self.moved(info)
        for gone in evicted:
            level.counters.evictions += 1
            level.counters.dropped += self.find(gone.id) is None
            self.moved(gone)

    async def _room_below(self, level: Level, info: BlockInfo) -> None:
        """Waits until the level's own sink has made room: a tier that must evict by itself loses what it evicts."""
        if level is self.levels[-1]:
            return
        level.wanted_bytes = info.size + SPARE_BYTES
        while level.healthy and level.is_full and level.tier.used_bytes:
            level.shrunk.clear()
            level.grown.set()
            await level.shrunk.wait()
        level.wanted_bytes = 0

    async def _sink(self, upper: Level, lower: Level) -> None:
        """From one tier to the one below it."""
        tier: Sinking = upper.tier  # type: ignore[assignment]
        buffer = bytearray()
        while True:
            await upper.grown.wait()
            upper.grown.clear()
            while upper.healthy and upper.is_full:
                victim = tier.coldest()
                if victim is None:
                    break
                try:
                    if lower.healthy and lower.tier.find(victim.id) is None:
                        if len(buffer) < victim.size:
                            buffer = bytearray(victim.size)
                        with memoryview(buffer)[: victim.size] as data:
                            await tier.get(victim.id, data)
                            await self._write(lower, victim, data)
                    await tier.evict(victim.id)
                    upper.counters.evictions += 1
                    upper.counters.dropped += lower.tier.find(victim.id) is None
                except (Missing, Corrupt):
                    pass
                except TierFailed as error:
                    upper.failed(error)
                self.moved(victim)
                upper.shrunk.set()
            upper.shrunk.set()
