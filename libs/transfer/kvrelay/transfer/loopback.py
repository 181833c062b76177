"""The in-process twin of UCX: same interface and semantics, without a network, with faults on demand.

A send completes when the receiver has taken the message, as a rendezvous does.
"""

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from kvrelay.common.errors import TransferFailed
from kvrelay.transfer.transport import Buffer, CloseCallback, Inbox, Memory, Verdict

Tamper = Callable[[int, Buffer], Buffer]


class LoopbackNetwork:
    """Connects the transports made by `transport()`. `delay_seconds` passes before a message arrives; `tamper` may alter it."""

    def __init__(self, *, delay_seconds: float = 0.0) -> None:
        self.delay_seconds = delay_seconds
        self.tamper: Tamper = lambda tag, buffer: buffer
        self.members: dict[bytes, LoopbackTransport] = {}
        self._numbers = itertools.count()

    def transport(self) -> "LoopbackTransport":
        return LoopbackTransport(self, b"loopback-%d" % next(self._numbers))


@dataclasses.dataclass(slots=True, eq=False)
class _Message:
    peer: "LoopbackPeer"
    tag: int
    buffer: Buffer
    sent: asyncio.Future[None]


class LoopbackTransport:
    name = "loopback"

    def __init__(self, network: LoopbackNetwork, address: bytes) -> None:
        self.network = network
        self.address = address
        self.bytes_sent = 0
        self.bytes_received = 0
        self.messages_drained = 0
        self.frozen = False
        self.peers: set[LoopbackPeer] = set()
        self._queue: collections.deque[_Message] = collections.deque()

    def start(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.network.members[self.address] = self

    def connect(self, address: bytes, on_closed: CloseCallback) -> "LoopbackPeer":
        target = self.network.members.get(address)
        if target is None or self.address not in self.network.members:
            raise TransferFailed("nobody at this address")
        peer = LoopbackPeer(self, target, on_closed)
        self.peers.add(peer)
        return peer

    def freeze(self) -> None:
        """As a stopped process: takes nothing in until `thaw`."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.resume()

    def resume(self) -> None:
        asyncio.get_running_loop().call_soon(self._take)

    def kill(self) -> None:
        """As a killed process: those connected to it, or from it, see their connections lost."""
        if self.network.members.pop(self.address, None) is None:
            return
        for peer in tuple(self.peers):
            peer.close()
        for other in tuple(self.network.members.values()):
            for peer in tuple(other.peers):
                if peer.target is self:
                    peer.lose("closed by the other end")

    async def close(self) -> None:
        await asyncio.sleep(self.network.delay_seconds)
        self.kill()

    def deliver(self, message: _Message) -> None:
        self._queue.append(message)
        self._take()

    def _take(self) -> None:
        while self._queue and not self.frozen:
            message = self._queue[0]
            if message.peer.closed:
                self._queue.popleft()
                continue
            landing = self._inbox.accept(message.tag, message.buffer.nbytes)
            if landing is Verdict.WAIT:
                return
            self._queue.popleft()
            if isinstance(landing, Verdict):
                self.messages_drained += 1
            else:
                assert isinstance(landing.buffer, np.ndarray)
                landing.buffer[:] = self.network.tamper(message.tag, message.buffer)
                self.bytes_received += message.buffer.nbytes
                landing.landed()
            message.peer.finish(message.sent)


class LoopbackPeer:
    def __init__(self, source: LoopbackTransport, target: LoopbackTransport, on_closed: CloseCallback) -> None:
        self.closed = False
        self.source = source
        self.target = target
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Future[None]] = set()

    @property
    def carriers(self) -> tuple[str, ...]:
        return ("loopback",)

    def send(self, tag: int, buffer: Memory) -> asyncio.Future[None]:
        assert isinstance(buffer, np.ndarray), "only a host's memory is copied here"
        future: asyncio.Future[None] = self._loop.create_future()
        if self.closed:
            future.set_exception(TransferFailed("the connection is closed"))
            return future
        self._pending.add(future)
        self.source.bytes_sent += buffer.nbytes
        message = _Message(self, tag, buffer, future)
        if delay := self.source.network.delay_seconds:
            self._loop.call_later(delay, self.target.deliver, message)
        else:
            self._loop.call_soon(self.target.deliver, message)
        return future

    def finish(self, future: asyncio.Future[None]) -> None:
        self._pending.discard(future)
        if not future.done():
            future.set_result(None)

    def close(self) -> None:
        """Of this end only: what the other end opened towards this one does not notice."""
        if self.closed:
            return
        self.closed = True
        self.source.peers.discard(self)
        pending, self._pending = self._pending, set()
        for future in pending:
            if not future.done():
                future.set_exception(TransferFailed("the connection is closed"))

    def lose(self, reason: str) -> None:
        if not self.closed:
            self.close()
            self._loop.call_soon(self._on_closed, TransferFailed(f"the connection was lost: {reason}"))
