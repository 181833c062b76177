"""Where other nodes' blocks are, by the index, and how to get at them: out of a store's memory, or out of a bucket that both use."""

import asyncio
import functools
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import BlockId, NodeId
from kvrelay.common.nodes import NodeDirectory, NodeRecord
from kvrelay.common.tasks import end_task
from kvrelay.kvstore.index import Entry, Index
from kvrelay.kvstore.level import Health, Level, Offer, Source, outcome
from kvrelay.kvstore.location import Location, node_key
from kvrelay.kvstore.memory import MemoryTier, Slot
from kvrelay.kvstore.peers.fetcher import Fetcher
from kvrelay.kvstore.supply import Hello
from kvrelay.kvstore.tiers.objectkey import block_key
from kvrelay.kvstore.tiers.objects import ObjectTier
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""For which a look-up waits for the index."""
COOL_SECONDS = 2.0
"""For which an index that did not answer is not asked."""
RUN_BYTES = 4 << 20
"""That another store is asked for as one: so many cost little more than one block, and do not keep the first of them waiting for long."""
_COST = {"cpu": 0, "file": 1, "s3": 2}
"""The order in which locations are tried."""


class PeerSource:
    """Another store, which reads blocks for us from whatever tier of its own."""

    run_bytes = RUN_BYTES

    def __init__(self, fetcher: Fetcher, health: Health, record: NodeRecord) -> None:
        self.health = health
        self._fetcher = fetcher
        self._record = record

    @property
    def usable(self) -> bool:
        return self._fetcher.usable(self._record)

    async def get(self, memory: MemoryTier, slots: Sequence[Slot]) -> Sequence[KvrelayError | None]:
        return await self._fetcher.get(self._record, memory, slots)

    def failed(self, error: KvrelayError) -> None:
        """Only the one store is left alone, by the fetcher."""
        self.health.counters.failures += 1
        self.health.reason = error.message


class ObjectSource:
    """Another node's objects, in a bucket that this node uses as well."""

    run_bytes = 1

    def __init__(self, level: Level, tier: ObjectTier, prefix: str) -> None:
        self.health: Health = level
        self._tier = tier
        self._prefix = prefix

    @property
    def usable(self) -> bool:
        return self.health.healthy

    async def get(self, memory: MemoryTier, slots: Sequence[Slot]) -> Sequence[KvrelayError | None]:
        return [await outcome(memory, slot, functools.partial(self._get, slot.info)) for slot in slots]

    async def _get(self, info: BlockInfo, into: memoryview) -> None:
        await self._tier.get_at(block_key(self._prefix, info), info, into)

    def failed(self, error: KvrelayError) -> None:
        self.health.failed(error)


class _Other(NamedTuple):
    """Another node, and how its blocks can be had."""

    record: NodeRecord
    memory: PeerSource | None
    objects: ObjectSource | None

    def source(self, tier: str) -> Source | None:
        if tier == "s3" and self.objects is not None and self.objects.usable:
            return self.objects
        return self.memory if self.memory is not None and self.memory.usable else None


class Peers:
    """See `supply.Elsewhere`. `fetcher` None: no transport; `objects` None: no S3 tier, of which `bucket` is the place; empty: its objects
    are not for others."""

    def __init__(
        self,
        node_id: NodeId,
        index: Index,
        directory: NodeDirectory,
        fetcher: Fetcher | None,
        objects: Level | None,
        bucket: str,
    ) -> None:
        self.health = Health("peer")
        self._node_id = node_id
        self._index = index
        self._directory = directory
        self._fetcher = fetcher
        self._objects = objects
        self._bucket = bucket
        self._nodes: dict[int, _Other] = {}
        """The others, by what the index calls them."""
        self._cool_until = 0.0
        self._in_time = True
        """The index, as was logged last."""
        self._following: asyncio.Task[None] | None = None
        self._lookups: set[asyncio.Task[list[list[Location]]]] = set()

    async def start(self) -> None:
        await self._directory.start()
        self._following = asyncio.create_task(self._follow(), name="peers")

    async def close(self) -> None:
        """What is under way fails."""
        if self._following is not None:
            await end_task(self._following)
            await self._directory.stop()
        self._nodes = {}
        if self._fetcher is not None:
            await self._fetcher.close()
        for lookup in tuple(self._lookups):
            await asyncio.wait((lookup,))

    @property
    def exists(self) -> bool:
        return bool(self._nodes) and time.monotonic() >= self._cool_until

    @property
    def num_nodes(self) -> int:
        """The others."""
        return len(self._nodes)

    async def locate(self, entries: Sequence[Entry], hello: Hello) -> Mapping[BlockId, Offer]:
        if not entries or not self.exists:
            return {}
        # Not cancelled when it is late: the connection would be lost with it.
        lookup = asyncio.create_task(self._index.locate(entries), name="locate")
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)
        await asyncio.wait((lookup,), timeout=LOOK_SECONDS)
        if not lookup.done():
            if self._in_time:
                log.warning("the index is slow, it is asked only every %g s", COOL_SECONDS)
            self._in_time = False
            self._cool_until = time.monotonic() + COOL_SECONDS
            return {}
        found = lookup.result()
        if len(found) != len(entries):
            self._cool_until = time.monotonic() + COOL_SECONDS
            return {}
        if not self._in_time:
            log.info("the index answers in time again")
        self._in_time = True
        offers = (self._best(entry, locations, hello) for entry, locations in zip(entries, found, strict=True))
        return {offer.info.id: offer for offer in offers if offer is not None}

    def _best(self, entry: Entry, locations: Sequence[Location], hello: Hello) -> Offer | None:
        # Of equal ones any: load is spread.
        for location in sorted(locations, key=lambda location: (_COST[location.tier], random.random())):
            other = self._nodes.get(location.node)
            if other is None or other.record.epoch != location.epoch:
                continue  # of a former life, or a node that is gone
            info = _info(entry, location, hello)
            if hello.reads(info) and (source := other.source(location.tier)) is not None:
                return Offer(info, source)
        return None

    def _other(self, record: NodeRecord) -> _Other:
        memory = None if self._fetcher is None else PeerSource(self._fetcher, self.health, record)
        level, objects = self._objects, None
        if level is not None and self._bucket and record.bucket == self._bucket:
            assert isinstance(level.tier, ObjectTier), "only such a tier has a bucket that others read"
            objects = ObjectSource(level, level.tier, record.prefix)
        return _Other(record, memory, objects)

    async def _follow(self) -> None:
        async for members in self._directory.updates():
            others = {node_id: record for node_id, record in members.items() if node_id != self._node_id}
            self._nodes = {node_key(node_id): self._other(record) for node_id, record in others.items()}
            if self._fetcher is not None:
                await self._fetcher.keep(others)


def _info(entry: Entry, location: Location, hello: Hello) -> BlockInfo:
    """What the block is if it is what the pod looks for; its checksum, bound to all of it, says whether it is."""
    head, block_id = entry
    return BlockInfo(
        id=block_id,
        head=head,
        fingerprint=hello.fingerprint,
        shape=location.shape,
        dtype=location.dtype,
        size=location.size,
        encoding=location.encoding,
        checksum=location.checksum,
    )
