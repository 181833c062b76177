"""A tier of the chain, and how it has been: what it did, how fast it reads of late, whether it is to be left alone."""

import asyncio
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.tiers.base import Corrupt, Missing, Tier, TierFailed
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

HIGH_SHARE = 0.9
"""Of a tier's limit, above which its coldest blocks go down."""
COOL_SECONDS = 5.0
"""For which a tier that failed is left alone."""
PRIOR_BYTES_PER_SECOND = defaultdict(lambda: 500e6, {"file": 500e6, "s3": 50e6, "peer": 500e6})
"""What a tier is taken to read before it has read much."""
PRIOR_SECONDS = 0.05
"""Of reading, which the prior weighs as much as."""
MEMORY_SECONDS = 4.0
"""Of reading, after which half of it is forgotten."""


@dataclass(slots=True)
class Counters:
    """Of one tier; bytes of blocks, seconds of calls."""

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    failures: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_reading: float = 0.0
    seconds_writing: float = 0.0
    evictions: int = 0
    dropped: int = 0
    """Evicted with nowhere to go."""
    refused: int = 0
    """Not stored, for want of room."""


class Pace:
    """Bytes a second of late, of the time in which anything at all was being read: what several calls at once give together."""

    def __init__(self, prior: float) -> None:
        self._bytes = prior * PRIOR_SECONDS
        self._seconds = PRIOR_SECONDS
        self._running = 0
        self._since = 0.0

    @property
    def bytes_per_second(self) -> float:
        return self._bytes / self._seconds

    def begin(self, now: float) -> None:
        if not self._running:
            self._since = now
        self._running += 1

    def end(self, now: float, num_bytes: int) -> None:
        """`num_bytes` is 0 for a call that gave nothing: its time counts."""
        self._running -= 1
        self._seconds += now - self._since
        self._since = now
        self._bytes += num_bytes
        if self._seconds > MEMORY_SECONDS:
            self._seconds /= 2
            self._bytes /= 2


class Health:
    """What a tier has done, and whether it is to be left alone."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = Counters()
        self.pace = Pace(PRIOR_BYTES_PER_SECOND[name])
        self.failed_until = 0.0
        self.reason = ""

    @property
    def healthy(self) -> bool:
        return time.monotonic() >= self.failed_until

    def failed(self, error: KvrelayError) -> None:
        if self.healthy:
            log.warning("the %s tier is left alone for %g s: %s", self.name, COOL_SECONDS, error.message)
        self.counters.failures += 1
        self.failed_until = time.monotonic() + COOL_SECONDS
        self.reason = error.message


class Level(Health):
    """A tier below memory."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier.name)
        self.tier = tier
        self.grown = asyncio.Event()
        """Something was written there, or is to be."""
        self.shrunk = asyncio.Event()
        """Its sink has made room."""
        self.wanted_bytes = 0
        """For a block that waits for room."""

    def holds(self, block_id: BlockId) -> bool:
        """And can be asked for it."""
        return self.healthy and self.tier.find(block_id) is not None

    @property
    def is_full(self) -> bool:
        """Its coldest blocks have to go down."""
        used, limit = self.tier.used_bytes, self.tier.limit_bytes
        return used > HIGH_SHARE * limit or used + self.wanted_bytes > limit


class Source(Protocol):
    """Where blocks can be brought from into memory."""

    health: Health
    """What is read is counted there."""
    run_bytes: int
    """That it is best asked for at once; a block that is larger comes alone."""

    async def get(self, memory: MemoryTier, slots: Sequence[Slot]) -> Sequence[KvrelayError | None]:
        """Each slot's block to where it lies in `memory`. What has become of each: None where it is there, verified; Missing, Corrupt or
        TierFailed. Once it returns, or raises, nothing is written there any more."""
        ...

    def failed(self, error: KvrelayError) -> None:
        """What blocks come from is to be left alone."""
        ...


class Offer(NamedTuple):
    """A block, and where it can be had."""

    info: BlockInfo
    source: Source


class LevelSource:
    """A tier of the node."""

    run_bytes = 1

    def __init__(self, level: Level) -> None:
        self.health: Health = level
        self._tier = level.tier

    async def get(self, memory: MemoryTier, slots: Sequence[Slot]) -> Sequence[KvrelayError | None]:
        return [await outcome(memory, slot, functools.partial(self._tier.get, slot.info.id)) for slot in slots]

    def failed(self, error: KvrelayError) -> None:
        self.health.failed(error)


async def outcome(
    memory: MemoryTier, slot: Slot, get: Callable[[memoryview], Awaitable[object]]
) -> KvrelayError | None:
    """Of a tier's `get` into a slot: what it raised of what it may raise."""
    with memory.data(slot) as data:
        try:
            await get(data)
        except (Missing, Corrupt, TierFailed) as error:
            return error
    return None
