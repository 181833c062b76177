"""A store without its servers: the arena, the tiers, the pods' sessions, the index, and the way to other nodes."""

import asyncio
import contextlib
from collections.abc import Iterator

from kvrelay.common.access import PodAccess
from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import Epoch, NodeId
from kvrelay.common.nodes import NodeDirectory
from kvrelay.kvstore import audit
from kvrelay.kvstore.announcer import Announcer
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.assembly import bucket_of, make_arena, make_tiers, make_transport
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.index import Index
from kvrelay.kvstore.location import node_key
from kvrelay.kvstore.memory import MemoryTier
from kvrelay.kvstore.peers.arrivals import Arrivals
from kvrelay.kvstore.peers.elsewhere import Peers
from kvrelay.kvstore.peers.fetcher import Fetcher
from kvrelay.kvstore.peers.sender import Sender
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.sessions import Sessions
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.transfer.transport import Transport


class Node:
    """Before `open` has ended there are `index` and `announcer` only."""

    chain: Chain
    sessions: Sessions
    peers: Peers
    sender: Sender | None

    def __init__(self, settings: KvStoreSettings, epoch: Epoch) -> None:
        self.id = NodeId(settings.node)
        self.epoch = epoch
        url = settings.index_url or settings.redis_url
        self.index = Index(url, settings.cluster, sharded=settings.index_sharded)
        self.announcer = Announcer(self.index, node_key(self.id), epoch)
        self.is_open = False
        self._settings = settings
        self._making: asyncio.Task[Arena] | None = None
        self._transport: Transport | None = None
        self._opened: Chain | None = None

    async def open(self) -> None:
        """Raises Internal. To be closed in any case."""
        settings = self._settings
        tiers = make_tiers(settings)
        # In a thread: its pages are made, which takes most of a second for a GiB.
        self._making = asyncio.create_task(asyncio.to_thread(make_arena, settings, self.epoch), name="arena")
        arena = await asyncio.shield(self._making)
        memory = MemoryTier(arena, make_policy(settings.tiers[0].policy, arena.size))
        self.chain = self._opened = Chain(memory, tiers, self.announcer)
        await self.chain.open()
        self.peers = await self._meet()
        self.sessions = Sessions(self.chain, self.peers)
        self.announcer.start(self.chain)
        self.is_open = True

    async def _meet(self) -> Peers:
        settings = self._settings
        arrivals = Arrivals(self.chain.memory.arena)
        self.sender, fetcher = None, None
        transport = self._transport = make_transport(settings)
        if transport is not None:
            transport.start(arrivals)
            own = {"cert": settings.tls_cert, "key": settings.tls_key}
            access = PodAccess.load(settings.token, ca=settings.peer_tls_ca, name=settings.peer_tls_name, **own)
            fetcher = Fetcher(transport, arrivals, access, settings.peer_timeout_seconds)
            self.sender = Sender(self.chain, transport)
        directory = NodeDirectory(settings.redis_url, settings.cluster)
        objects = self.chain.health("s3")
        peers = Peers(self.id, self.index, directory, fetcher, objects, bucket_of(settings))
        await peers.start()
        return peers

    @property
    def transfer_address(self) -> bytes:
        """Empty: others cannot take blocks from here."""
        return b"" if self._transport is None else self._transport.address

    def reports(self) -> Iterator[audit.TierReport]:
        """Of all tiers, the nearest first."""
        if self.is_open:
            yield from audit.tiers(self.chain, self.peers.health)

    def tasks(self) -> list[asyncio.Task[None]]:
        """What ends only by `close`, or by a fault of ours."""
        assert self.announcer.task is not None
        return [self.announcer.task, *self.chain.sinks]

    async def close(self) -> None:
        """Also of one that has not been opened, or half. No session may be open."""
        if self.is_open:
            await self.peers.close()
            if self.sender is not None:
                self.sender.close()
        if self._transport is not None:
            await self._transport.close()
        await self.announcer.stop()
        if self._opened is not None:
            await self._opened.close()
        if self._making is not None:
            with contextlib.suppress(KvrelayError):  # `open` has raised it
                (await self._making).close()
        await self.index.close()
