"""Sends blocks of this store to others, who have asked for them."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence

import msgspec
import numpy as np

from kvrelay.common.errors import Overloaded, TransferFailed
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.memory import Slot
from kvrelay.transfer.transport import Peer, Transport

log = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""At a time."""
MAX_PEERS = 1024
MAX_SECONDS = 60.0


class Wanted(msgspec.Struct, frozen=True):
    """A block, and the message that it becomes. One with another size or checksum is another block."""

    id: BlockId
    tag: int
    size: int
    checksum: int


class Sender:
    """A block is pinned until the transport is done with its bytes."""

    def __init__(self, chain: Chain, transport: Transport) -> None:
        self._chain = chain
        self._transport = transport
        self._peers: OrderedDict[bytes, tuple[int, Peer]] = OrderedDict()
        """By address, with the number of the link that they serve, the longest unused first."""
        self._num_requests = 0
        self._arena = np.frombuffer(chain.memory.arena.view, np.uint8)

    async def send(
        self, address: bytes, link: int, blocks: Sequence[Wanted], seconds: float
    ) -> AsyncGenerator[list[int], None]:
        """Gives the places of blocks that are not here, as it finds out. When it ends, the others have been taken.

        Raises Overloaded, and TransferFailed where they are not taken in time. Then, or left before its end, the connection is cut: what
        was being sent would never be taken.
        """
        if self._num_requests >= MAX_REQUESTS:
            raise Overloaded(f"{MAX_REQUESTS} requests are served already")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(seconds, MAX_SECONDS)
        peer = self._peer(address, link)
        tasks = {asyncio.create_task(self._send(peer, wanted)): place for place, wanted in enumerate(blocks)}
        waiting = set(tasks)
        self._num_requests += 1
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise TransferFailed("the blocks are not taken in time")
                missing = [tasks[task] for task in done if not task.result()]
                if missing:
                    yield missing
        except BaseException:  # whatever it is: a block that no one takes would be pinned for ever
            self._drop(address, peer)
            raise
        finally:
            self._num_requests -= 1
            for task in waiting:
                task.cancel()

    async def _send(self, peer: Peer, wanted: Wanted) -> bool:
        slot = await self._chain.load(wanted.id)
        if slot is None:
            return False
        if (slot.info.size, slot.info.checksum) != (wanted.size, wanted.checksum):
            self._chain.release(slot)
            return False
        sent = peer.send(wanted.tag, self._arena[slot.offset : slot.offset + wanted.size])
        sent.add_done_callback(lambda done: self._sent(done, slot))
        await asyncio.shield(sent)
        return True

    def _sent(self, done: "asyncio.Future[None]", slot: Slot) -> None:
        if not done.cancelled():
            done.exception()  # who waits for it may have gone
        self._chain.release(slot)

    def _peer(self, address: bytes, link: int) -> Peer:
        """Raises TransferFailed."""
        known = self._peers.get(address)
        if known is not None and (known[0] != link or known[1].closed):
            self._drop(address, known[1])
            known = None
        if known is None:
            peer = self._transport.connect(address, lambda error: self._drop(address, peer))
            known = self._peers[address] = link, peer
        self._peers.move_to_end(address)
        while len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)[1][1].close()
        return known[1]

    def _drop(self, address: bytes, peer: Peer) -> None:
        """Sends under way end, with errors."""
        if address in self._peers and self._peers[address][1] is peer:
            del self._peers[address]
        peer.close()

    def close(self) -> None:
        """All sends end. Nothing is sent after it."""
        for _, peer in self._peers.values():
            peer.close()
        self._peers.clear()
        del self._arena
