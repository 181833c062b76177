"""Takes blocks out of other stores' memory. A store that fails is left alone for a while."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from kvrelay.common.access import PodAccess
from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.common.ids import NodeId
from kvrelay.common.nodes import NodeRecord
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.peers.arrivals import Arrivals
from kvrelay.kvstore.peers.link import Link
from kvrelay.kvstore.tiers.base import Corrupt, TierFailed
from kvrelay.transfer.transport import Transport

log = logging.getLogger(__name__)

COOL_SECONDS = 5.0
"""For which a store that failed is not asked."""


class Fetcher:
    def __init__(self, transport: Transport, arrivals: Arrivals, access: PodAccess, seconds: float) -> None:
        """`seconds`: within which something must come from a store that was asked."""
        self._transport = transport
        self._arrivals = arrivals
        self._access = access
        self._seconds = seconds
        self._links: dict[NodeId, Link] = {}
        self._cool_until: dict[NodeId, float] = {}

    def usable(self, record: NodeRecord) -> bool:
        """It can send, and has not failed of late."""
        return bool(record.transfer_address) and time.monotonic() >= self._cool_until.get(record.node_id, 0.0)

    async def get(self, record: NodeRecord, memory: MemoryTier, slots: Sequence[Slot]) -> list[KvrelayError | None]:
        """As `Source.get`, of another store's memory."""
        try:
            link = await self._link(record)
        except TransferFailed as error:
            return [await self._leave_alone(record, error)] * len(slots)
        outcomes = await link.get(slots)
        damaged = []
        for place, slot in enumerate(slots):
            outcome, info = outcomes[place], slot.info
            if isinstance(outcome, TransferFailed):
                outcomes[place] = await self._leave_alone(record, outcome)
            elif outcome is None and not memory.is_whole(slot):
                outcomes[place] = Corrupt(f"block {info.id.hex()} came damaged from {record.node_id}")
                damaged.append(info.id)
        if damaged:
            link.suspect(damaged)
        return outcomes

    async def keep(self, members: Mapping[NodeId, NodeRecord]) -> None:
        """Links to others than these are dropped."""
        for node_id, link in list(self._links.items()):
            record = members.get(node_id)
            if record is None or record.epoch != link.record.epoch:
                await self._drop(link)
        self._cool_until = {node_id: until for node_id, until in self._cool_until.items() if node_id in members}

    async def close(self) -> None:
        await asyncio.gather(*map(self._drop, list(self._links.values())))

    async def _link(self, record: NodeRecord) -> Link:
        """Raises TransferFailed."""
        link = self._links.get(record.node_id)
        if link is not None and (link.closed or link.record.epoch != record.epoch):
            await self._drop(link)
            link = self._links.get(record.node_id)  # others may have made one meanwhile
        if link is None:
            try:
                link = Link(record, self._transport, self._arrivals, self._access, self._seconds)
            except KvrelayError as error:
                raise TransferFailed(error.message) from error
            self._links[record.node_id] = link
        return link

    async def _leave_alone(self, record: NodeRecord, error: TransferFailed) -> TierFailed:
        if self.usable(record):
            log.warning("%s is left alone for %g s: %s", record.node_id, COOL_SECONDS, error.message)
        self._cool_until[record.node_id] = time.monotonic() + COOL_SECONDS
        link = self._links.get(record.node_id)
        if link is not None and link.record.epoch == record.epoch:
            await self._drop(link)
        return TierFailed(f"{record.node_id}: {error.message}")

    async def _drop(self, link: Link) -> None:
        if self._links.get(link.record.node_id) is link:
            del self._links[link.record.node_id]
        await link.close()
