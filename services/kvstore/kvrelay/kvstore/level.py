"""A tier of the chain, and how it has been: what it did, how fast it reads of late, whether it is to be left alone."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from kvrelay.kvstore.tiers.base import Tier, TierFailed

log = logging.getLogger(__name__)

HIGH_SHARE = 0.9
"""Of a tier's limit, above which its coldest blocks go down."""
COOL_SECONDS = 5.0
"""For which a tier that failed is left alone."""
PRIOR_BYTES_PER_SECOND = {"file": 500e6, "s3": 50e6, "peer": 500e6}
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


@dataclass(slots=True)
class Level:
    """A tier below memory, and how it has been of late."""

    tier: Tier
    counters: Counters = field(default_factory=Counters)
    pace: Pace = field(init=False)
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    """Something was written there, or is to be."""
    shrunk: asyncio.Event = field(default_factory=asyncio.Event)
    """Its sink has made room."""
    wanted_bytes: int = 0
    """For a block that waits for room."""
    failed_until: float = 0.0
    reason: str = ""

    def __post_init__(self) -> None:
        self.pace = Pace(PRIOR_BYTES_PER_SECOND.get(self.tier.name, 500e6))

    @property
    def healthy(self) -> bool:
        return time.monotonic() >= self.failed_until

    @property
    def is_full(self) -> bool:
        """Its coldest blocks have to go down."""
        used, limit = self.tier.used_bytes, self.tier.limit_bytes
        return used > HIGH_SHARE * limit or used + self.wanted_bytes > limit

    def failed(self, error: TierFailed) -> None:
        if self.healthy:
            log.warning("the %s tier is left alone for %g s: %s", self.tier.name, COOL_SECONDS, error.message)
        self.counters.failures += 1
        self.failed_until = time.monotonic() + COOL_SECONDS
        self.reason = error.message
