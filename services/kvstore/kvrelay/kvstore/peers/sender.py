"""Sends blocks of this store to others, who have asked for them."""

import asyncio
import functools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec
import numpy as np

from kvrelay.common.errors import Overloaded, TransferFailed
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.memory import Slot
from kvrelay.kvstore.promotion import Coming
from kvrelay.transfer.transport import Peer, Transport

log = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""At a time."""
MAX_PEERS = 1024
MAX_SECONDS = 60.0


class Wanted(msgspec.Struct, frozen=True):
    """A block, and the tag of its message. One with another size or checksum is another block."""

    id: BlockId
    tag: int
    size: int
    checksum: int
    joined: bool
    """It may come behind the block before it, in the same message."""


class _Request:
    """What has become of the blocks of one request."""

    def __init__(self, num_blocks: int) -> None:
        self._left = num_blocks
        self._missing: list[int] = []
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return not self._left and not self._missing

    def sent(self, num_blocks: int) -> None:
        self._left -= num_blocks
        if not self._left:
            self._news.set()

    def missed(self, place: int) -> None:
        self._missing.append(place)
        self._left -= 1
        self._news.set()

    def failed(self, error: BaseException) -> None:
        self._error = error
        self._news.set()

    async def missing(self, deadline: float) -> list[int]:
        """Places that were not given before: some, or none at its end. Raises what `failed` was given, and TransferFailed when it is
        late, in the loop's time."""
        try:
            async with asyncio.timeout_at(deadline):
                while self._left and not self._missing and self._error is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise TransferFailed("the blocks are not taken in time") from None
        if self._error is not None:
            raise self._error
        missing, self._missing = self._missing, []
        return missing


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
        deadline = asyncio.get_running_loop().time() + min(seconds, MAX_SECONDS)
        peer = self._peer(address, link)
        request = _Request(len(blocks))
        loads: list[Coming] = []
        self._num_requests += 1
        try:
            here: list[Slot | None] = []
            for place, wanted in enumerate(blocks):
                coming = self._chain.bring(wanted.id)
                if isinstance(coming, Slot):
                    here.append(self._checked(request, place, wanted, coming))
                else:
                    coming.add_done_callback(functools.partial(self._loaded, request, peer, place, wanted))
                    loads.append(coming)
                    here.append(None)
            for tag, slots in _messages(blocks, here):
                self._send(request, peer, tag, slots)
            while not request.is_over:
                missing = await request.missing(deadline)
                if missing:
                    yield missing
        except BaseException:  # whatever it is: a block that no one takes would be pinned for ever
            self._drop(address, peer)
            raise
        finally:
            self._num_requests -= 1
            for load in loads:
                load.cancel()

    def _loaded(self, request: _Request, peer: Peer, place: int, wanted: Wanted, load: Coming) -> None:
        if load.cancelled():
            return
        if (slot := load.result()) is None:
            request.missed(place)
        elif (slot := self._checked(request, place, wanted, slot)) is not None:
            self._send(request, peer, wanted.tag, [slot])

    def _checked(self, request: _Request, place: int, wanted: Wanted, slot: Slot) -> Slot | None:
        """The slot, if it has what is wanted; else its pin goes."""
        if (slot.info.size, slot.info.checksum) == (wanted.size, wanted.checksum):
            return slot
        self._chain.release(slot)
        request.missed(place)
        return None

    def _send(self, request: _Request, peer: Peer, tag: int, slots: Sequence[Slot]) -> None:
        """As one message. Takes over the pins."""
        end = slots[-1].offset + slots[-1].info.size
        sent = peer.send(tag, self._arena[slots[0].offset : end])
        sent.add_done_callback(functools.partial(self._sent, request, slots))

    def _sent(self, request: _Request, slots: Sequence[Slot], sent: "asyncio.Future[None]") -> None:
        for slot in slots:
            self._chain.release(slot)
        if (error := sent.exception()) is not None:
            request.failed(error)
        else:
            request.sent(len(slots))

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


def _messages(blocks: Sequence[Wanted], here: Sequence[Slot | None]) -> Iterator[tuple[int, list[Slot]]]:
    """Tags, and what goes as one: blocks that lie one behind the other, here and where they go."""
    tag, message = 0, list[Slot]()
    for wanted, slot in zip(blocks, here, strict=True):
        joined = wanted.joined and message and slot and message[-1].offset + message[-1].info.size == slot.offset
        if message and not joined:
            yield tag, message
            message = []
        if slot is not None:
            tag = tag if message else wanted.tag
            message.append(slot)
    if message:
        yield tag, message
