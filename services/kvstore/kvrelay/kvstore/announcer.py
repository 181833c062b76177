"""Keeps the index true to what a node holds: changes as they come, everything again when Redis has forgotten, all in good time."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from redis.exceptions import RedisError

from kvrelay.common.discovery import RetryPolicy
from kvrelay.common.ids import BlockId, Epoch
from kvrelay.common.tasks import end_task
from kvrelay.kvstore.index import TTL_SECONDS, Entry, Index
from kvrelay.kvstore.location import Location
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

BATCH_BLOCKS = 512
MAX_PENDING = 1 << 20
"""Changes that are remembered while Redis is away; beyond them everything is said again."""
CHECK_SECONDS = 1.0
REFRESH_SECONDS = TTL_SECONDS / 2
RETRY = RetryPolicy()


class Holdings(Protocol):
    """What a node holds, at the moment of the call."""

    def ids(self) -> Iterable[BlockId]: ...

    def find(self, block_id: BlockId) -> tuple[BlockInfo, str] | None:
        """The block and the tier that it lies in."""
        ...


class Announcer:
    """Tells the index of one node's blocks."""

    def __init__(
        self,
        index: Index,
        node: int,
        epoch: Epoch,
        retry: RetryPolicy = RETRY,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        self._index = index
        self._node = node
        self._epoch = epoch
        self._retry = retry
        self._refresh_seconds = refresh_seconds
        self._pending: dict[Entry, Location | None] = {}
        self._changed = asyncio.Event()
        self._mark = b""
        self._repeat: Iterator[BlockId] | None = None
        """Blocks that are still to be said again, as they are by then."""
        self.task: asyncio.Task[None] | None = None
        """Ends only by `stop`, or by a fault of ours."""
        self.failures = 0

    def stored(self, info: BlockInfo, tier: str) -> None:
        """The block lies in `tier` now, and not where it was before."""
        self._note((info.head, info.id), self._location(info, tier))

    def removed(self, info: BlockInfo) -> None:
        """The node has the block in no tier any more."""
        self._note((info.head, info.id), None)

    def start(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.task = asyncio.create_task(self._run(), name="announcer")

    async def stop(self) -> None:
        if self.task is not None:
            await end_task(self.task)

    @property
    def backlog(self) -> int:
        return len(self._pending)

    def _location(self, info: BlockInfo, tier: str) -> Location:
        return Location(
            node=self._node,
            epoch=self._epoch,
            tier=tier,
            dtype=info.dtype,
            encoding=info.encoding,
            size=info.size,
            shape=info.shape,
            checksum=info.checksum,
        )

    def _note(self, entry: Entry, location: Location | None) -> None:
        if len(self._pending) < MAX_PENDING or entry in self._pending:
            self._pending[entry] = location
        else:
            self._mark = b""  # all is said again, and what is lost here with it
        self._changed.set()

    async def _run(self) -> None:
        failures = 0
        next_refresh = time.monotonic() + self._refresh_seconds
        while True:
            try:
                if await self._forgotten() or time.monotonic() >= next_refresh:
                    self._repeat = iter(list(self._holdings.ids()))
                    next_refresh = time.monotonic() + self._refresh_seconds
                await self._say()
                if failures:
                    log.info("the index is told again")
                failures = 0
            except (RedisError, OSError) as error:
                failures += 1
                self.failures += 1
                if failures == 1:
                    log.warning("the index cannot be told of %d blocks, trying on: %s", len(self._pending), error)
                await asyncio.sleep(self._retry.delay(failures))
                continue
            if not self._pending and self._repeat is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), CHECK_SECONDS)

    async def _forgotten(self) -> bool:
        mark = await self._index.mark()
        if mark == self._mark:
            return False
        self._mark = mark
        return True

    async def _say(self) -> None:
        """One batch of changes, and one of what is to be said again."""
        self._changed.clear()
        batch = dict(itertools.islice(self._pending.items(), BATCH_BLOCKS))
        await self._index.update(self._node, batch)
        for entry, location in batch.items():
            if self._pending.get(entry, batch) is location:  # else it has changed again meanwhile
                del self._pending[entry]
        if self._repeat is not None:
            ids = list(itertools.islice(self._repeat, BATCH_BLOCKS))
            held = [found for block_id in ids if (found := self._holdings.find(block_id)) is not None]
            await self._index.update(self._node, {(i.head, i.id): self._location(i, tier) for i, tier in held})
            if not ids:
                self._repeat = None
