"""The cluster's KV stores, asked again and again for as long as somebody looks, and not at all otherwise."""

import asyncio
import contextlib
import logging
import time
from typing import Final

import grpc
import grpc.aio
import msgspec

from kvrelay.common.access import PodAccess
from kvrelay.common.ids import NodeId
from kvrelay.common.nodes import NodeDirectory, NodeRecord
from kvrelay.common.rpc import CHANNEL_OPTIONS
from kvrelay.common.tasks import end_task
from kvrelay.v1 import kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 2.0
"""Between two questions, and for an answer."""
INTEREST_SECONDS: Final = 10.0
"""After somebody looked, how long the stores are still asked."""
MAX_STORES: Final = 64
_TIERS: Final = {
    kvstore_pb2.TIER_CPU: "cpu",
    kvstore_pb2.TIER_FILE: "file",
    kvstore_pb2.TIER_S3: "s3",
    kvstore_pb2.TIER_PEER: "peer",
}


class TierRow(msgspec.Struct, frozen=True, kw_only=True):
    """Since the store's start. `limit_bytes` 0: the tier holds nothing of its own."""

    tier: str
    healthy: bool
    reason: str
    num_blocks: int
    used_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    bytes_read: int
    bytes_written: int


class StoreRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    answers: bool
    num_pods: int = 0
    tiers: tuple[TierRow, ...] = ()
    """The last that were told, from the nearest on."""


class Stores:
    """`rows` shows interest, and answers with what is known; the first time that is nothing yet."""

    def __init__(self, redis_url: str, cluster: str, access: PodAccess) -> None:
        self._redis_url = redis_url
        self._cluster = cluster
        self._access = access
        self._rows: dict[NodeId, StoreRow] = {}
        self._wanted_until = 0.0
        self._task: asyncio.Task[None] | None = None

    def rows(self) -> list[StoreRow]:
        self._wanted_until = time.monotonic() + INTEREST_SECONDS
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="console-stores")
        return list(self._rows.values())

    @property
    def asking(self) -> bool:
        return self._task is not None and not self._task.done()

    async def close(self) -> None:
        if self._task is not None:
            await end_task(self._task)

    async def _watch(self) -> None:
        directory = NodeDirectory(self._redis_url, self._cluster)
        await directory.start()
        try:
            while time.monotonic() < self._wanted_until:
                nodes = sorted(directory.members().values(), key=lambda node: node.node_id)[:MAX_STORES]
                rows = await asyncio.gather(*map(self._ask, nodes))
                self._rows = {node.node_id: row for node, row in zip(nodes, rows, strict=True)}
                await asyncio.sleep(ASK_SECONDS)
        finally:
            self._rows = {}
            await directory.stop()

    async def _ask(self, node: NodeRecord) -> StoreRow:
        """Over a connection of its own: a store that is back is not waited for. One that does not answer keeps its numbers."""
        async with self._access.channel(node.grpc_address, CHANNEL_OPTIONS) as channel:
            stat = kvstore_pb2_grpc.KvStoreStub(channel).Stat
            request = kvstore_pb2.StatRequest(unchecked=True)
            with contextlib.suppress(grpc.aio.AioRpcError):
                said = await stat(request, timeout=ASK_SECONDS, metadata=self._access.metadata)
                tiers = tuple(map(_tier, said.tiers))
                return StoreRow(id=node.node_id, answers=True, num_pods=said.num_pods, tiers=tiers)
        known = self._rows.get(node.node_id)
        return StoreRow(id=node.node_id, answers=False, tiers=known.tiers if known is not None else ())


def _tier(said: kvstore_pb2.TierStat) -> TierRow:
    return TierRow(
        tier=_TIERS.get(said.tier, "other"),
        healthy=said.healthy,
        reason=said.reason,
        num_blocks=said.num_blocks,
        used_bytes=said.used_bytes,
        limit_bytes=said.limit_bytes,
        hits=said.counters.hits,
        misses=said.counters.misses,
        bytes_read=said.counters.bytes_read,
        bytes_written=said.counters.bytes_written,
    )
