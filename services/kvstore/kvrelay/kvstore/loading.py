"""Blocks of a chain brought into memory in order, several at once."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.arena import rounded
from kvrelay.kvstore.memory import Slot
from kvrelay.kvstore.promotion import Coming
from kvrelay.kvstore.supply import Supply

FIRST_BLOCKS = 32
AHEAD_BLOCKS = 128
AHEAD_BYTES = 64 << 20
"""That a load has under way, or in hand, at most. It begins with fewer, so that the first come soon; when half of them are there, more
are asked for, together."""
TURN_BLOCKS = 256
"""After which others get their turn: what memory has comes without any wait."""


class Reader(Protocol):
    """For whom blocks are loaded."""

    def fits(self, ahead_bytes: int, num_bytes: int) -> bool:
        """It may hold a block of `num_bytes` beside what it holds and the `ahead_bytes` that come before. One block always fits
        who holds nothing."""
        ...

    async def let_go(self) -> None:
        """Returns when it holds less."""
        ...


class _Ahead(NamedTuple):
    block_id: BlockId
    coming: Slot | Coming
    size: int


class Loading:
    """Of the blocks of the chain `ids` from `first` on, up to the first that cannot be had or read. `give` hands a block and a pin of it
    over; before, both are the loading's own."""

    def __init__(
        self, supply: Supply, ids: Sequence[BlockId], first: int, reader: Reader, give: Callable[[Slot], None]
    ) -> None:
        self._supply = supply
        self._reader = reader
        self._give = give
        self._ids = ids
        self._rest = deque(ids[first:])
        self._ahead: deque[_Ahead] = deque()
        self._ahead_bytes = 0
        self._limit = FIRST_BLOCKS
        self._asked_at = -1
        """From which block on it has asked last where they can be had. What others hold is believed for a while only."""

    async def run(self) -> None:
        """Cancelled, it lets go what was not given."""
        num_given = 0
        try:
            while self._ahead or self._rest:
                self._look_ahead()
                if not self._ahead:
                    await self._wait()
                    continue
                slot = await self._following()
                if slot is None:
                    return
                self._give(slot)
                num_given += 1
                if num_given % TURN_BLOCKS == 0:
                    await asyncio.sleep(0)
        finally:
            for ahead in self._ahead:
                self._supply.drop(ahead.coming)

    async def _wait(self) -> None:
        """For what keeps it from looking ahead, if anything does."""
        if not self._rest:
            return
        at = len(self._ids) - len(self._rest)
        if self._supply.find(self._ids[at]) is not None:
            await self._reader.let_go()
        elif self._asked_at < at:
            self._asked_at = at
            await self._supply.look(self._ids, at)
        else:
            self._rest.clear()

    def _look_ahead(self) -> None:
        if len(self._ahead) > self._limit // 2 or self._ahead_bytes > AHEAD_BYTES // 2:
            return
        if self._ahead:
            self._limit = min(2 * self._limit, AHEAD_BLOCKS)
        while self._rest and len(self._ahead) < self._limit and self._ahead_bytes < AHEAD_BYTES:
            block_id = self._rest[0]
            found = self._supply.find(block_id)
            if found is None:
                return
            size = rounded(found[0].size)
            if not self._reader.fits(self._ahead_bytes, size):
                return
            self._ahead.append(_Ahead(block_id, self._supply.bring(block_id), size))
            self._ahead_bytes += size
            self._rest.popleft()

    async def _following(self) -> Slot | None:
        first = self._ahead[0]
        slot = first.coming if isinstance(first.coming, Slot) else await first.coming
        self._ahead_bytes -= self._ahead.popleft().size
        if slot is None:
            self._supply.missed(first.block_id)
        elif not self._supply.reads(slot.info):  # removed, and written anew by others meanwhile
            self._supply.drop(slot)
            return None
        return slot
