"""Connections between a sender's port and a receiver's: made once a pair, kept, and made anew after a failure.

    Dialer (sender's port)                     Acceptor (receiver's port)
        connect ── Hello ─────────────────────▶ layouts fit? ── connect back
        Link    ◀──────────── Welcome/Refused ─ Link
        Begin, frames, Abort ─────────────────▶
        ◀───────────────────────── Ack, Nack ──

A link breaks when an end dies, which the transport reports, or when one end drops it because the other does not move. The
transport does not report that: `Gone` does. The link's id, random and chosen by the dialer, tells the acceptor who speaks: the transport itself does not say.
"""

import asyncio
import dataclasses
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable

from kvrelay.common.errors import IncompatibleLayout, TransferFailed, error_from
from kvrelay.common.layout import check_compatible
from kvrelay.transfer import control
from kvrelay.transfer.control import Gone, Hello, Identity, Refused, Welcome
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.transport import Buffer, Peer, Transport

log = logging.getLogger(__name__)

MAX_LINKS = 4096
WHISPER_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class LinkSpeed:
    carriers: tuple[str, ...]
    """What carries messages, as the transport calls it: one of them the large ones."""
    bytes_per_second: float
    """0: not measured."""


class Link:
    """One open connection, at either end. `window` bounds the frames in flight over it."""

    def __init__(self, number: int, address: bytes, peer: Peer, remote: Identity, depth: int) -> None:
        self.number = number
        self.address = address
        self.peer = peer
        self.remote = remote
        self.window = asyncio.Semaphore(depth)
        self.speed = LinkSpeed((), 0.0)

    def tell(self, message: control.Control) -> None:
        tell(self.peer, message)

    def say(self, tag: int, message: Buffer) -> None:
        """As `tell`, a small message under a tag of its own."""
        say(self.peer, tag, message)


def tell(peer: Peer, message: control.Control) -> None:
    """Sends and does not wait: whoever needs to know whether it arrived waits for an answer, or for the link's loss."""
    say(peer, control.TAG, control.encode(message))


def say(peer: Peer, tag: int, message: Buffer) -> None:
    peer.send(tag, message).add_done_callback(_retrieve)


def whisper(transport: Transport, address: bytes, message: control.Control) -> None:
    """Says one thing to somebody without a link. It may not arrive."""
    try:
        peer = transport.connect(address, lambda error: None)
    except TransferFailed as error:
        log.debug("nobody to tell: %s", error)
        return
    tell(peer, message)
    asyncio.get_running_loop().call_later(WHISPER_SECONDS, peer.close)


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.debug("a small message was not sent: %s", error)


async def no_check(link: Link) -> None:
    """Any link will do."""


LostCallback = Callable[[Link, TransferFailed], None]


class Dialer:
    """Links to receivers, by address. `on_lost` is called once for each link that breaks."""

    def __init__(
        self, transport: Transport, identity: Identity, counters: Counters, depth: int, timeout_seconds: float
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._counters = counters
        self._depth = depth
        self._timeout_seconds = timeout_seconds
        self._dials: dict[bytes, asyncio.Task[Link]] = {}
        self._answers: dict[int, asyncio.Future[Welcome]] = {}
        self.check: Callable[[Link], Awaitable[None]] = no_check
        """Of a link that is about to be used; raises TransferFailed where it must not be."""
        self.on_lost: LostCallback = lambda link, error: None

    @property
    def address(self) -> bytes:
        return self._transport.address

    async def connect(self, address: bytes) -> Link:
        """The open link to a receiver's transport address. Raises IncompatibleLayout, TransferFailed."""
        dial = self._dials.get(address)
        if dial is None:
            dial = self._dials[address] = asyncio.create_task(self._dial(address))
            dial.add_done_callback(functools.partial(self._dialed, address))
        return await asyncio.shield(dial)

    def _dialed(self, address: bytes, dial: asyncio.Task[Link]) -> None:
        if (dial.cancelled() or dial.exception() is not None) and self._dials.get(address) is dial:
            del self._dials[address]

    async def _dial(self, address: bytes) -> Link:
        number = secrets.randbits(63)
        answer: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        links: list[Link] = []

        def lost(error: TransferFailed) -> None:
            if not answer.done():
                answer.set_exception(error)
            for link in links:
                self._lost(link, error)

        try:
            peer = self._transport.connect(address, lost)
            try:
                hello = Hello(
                    protocol=control.PROTOCOL,
                    link=number,
                    address=self._transport.address,
                    identity=self._identity,
                )
                tell(peer, hello)
                async with asyncio.timeout(self._timeout_seconds):
                    welcome = await answer
                check_compatible(self._identity.layout, welcome.identity.layout)
                link = Link(number, address, peer, welcome.identity, self._depth)
                async with asyncio.timeout(self._timeout_seconds):
                    await self.check(link)
                if peer.closed:
                    raise TransferFailed("the connection was lost during the handshake")
                links.append(link)
            except TimeoutError:
                raise TransferFailed(f"no answer to the handshake within {self._timeout_seconds:g} s") from None
            finally:
                if not links:
                    peer.close()
        finally:
            del self._answers[number]
        self._counters.links_opened += 1
        return links[0]

    @property
    def links(self) -> list[Link]:
        """Those that are open."""
        dials = [dial for dial in self._dials.values() if dial.done() and not dial.cancelled()]
        return [dial.result() for dial in dials if dial.exception() is None]

    def drop(self, link: Link, error: TransferFailed) -> None:
        """Breaks a link that does not move."""
        if link in self.links:
            link.peer.close()
            whisper(self._transport, link.address, Gone(link=link.number))
            self._lost(link, error)

    def on_gone(self, message: Gone) -> None:
        for link in self.links:
            if link.number == message.link:
                link.peer.close()
                self._lost(link, TransferFailed("the receiver broke the connection"))

    def _lost(self, link: Link, error: TransferFailed) -> None:
        self._dials.pop(link.address, None)
        self._counters.links_lost += 1
        self.on_lost(link, error)

    def on_welcome(self, message: Welcome) -> None:
        answer = self._answers.get(message.link)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def on_refused(self, message: Refused) -> None:
        self._counters.links_refused += 1
        answer = self._answers.get(message.link)
        if answer is not None and not answer.done():
            answer.set_exception(error_from(message.code, message.message))

    async def close(self) -> None:
        dials = list(self._dials.values())
        self._dials.clear()
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)


class Acceptor:
    """Links from senders, by their number. A sender that comes back takes the place of its former self."""

    def __init__(self, transport: Transport, identity: Identity, counters: Counters, depth: int) -> None:
        self._transport = transport
        self._identity = identity
        self._counters = counters
        self._depth = depth
        self._links: dict[int, Link] = {}
        self.on_lost: LostCallback = lambda link, error: None

    def get(self, number: int) -> Link | None:
        return self._links.get(number)

    def on_hello(self, hello: Hello) -> None:
        if hello.link in self._links or len(self._links) >= MAX_LINKS:
            raise TransferFailed("this link is open already, or there are too many")
        try:
            if hello.protocol != control.PROTOCOL:
                raise IncompatibleLayout(f"transfer protocol {hello.protocol} here, {control.PROTOCOL} there")
            check_compatible(hello.identity.layout, self._identity.layout)
        except IncompatibleLayout as error:
            self._counters.links_refused += 1
            message = error.message[: control.MAX_TEXT]
            whisper(self._transport, hello.address, Refused(link=hello.link, code=error.code, message=message))
            return
        for former in tuple(self._links.values()):
            if former.remote.place == hello.identity.place:
                self.drop(former, TransferFailed("the sender connected anew"))
        peer = self._transport.connect(hello.address, functools.partial(self._lost, hello.link))
        link = Link(hello.link, hello.address, peer, hello.identity, self._depth)
        self._links[hello.link] = link
        self._counters.links_opened += 1
        link.tell(Welcome(link=hello.link, identity=self._identity))

    def drop(self, link: Link, error: TransferFailed) -> None:
        """Breaks a link that does not move, or that a new one replaces."""
        if self._links.get(link.number) is link:
            link.peer.close()
            self.disown(link.number, link.address)
            self._lost(link.number, error)

    def disown(self, number: int, address: bytes) -> None:
        """Says to a sender that there is no such link."""
        whisper(self._transport, address, Gone(link=number))

    def on_gone(self, message: Gone) -> None:
        link = self._links.get(message.link)
        if link is not None:
            link.peer.close()
            self._lost(link.number, TransferFailed("the sender broke the connection"))

    def _lost(self, number: int, error: TransferFailed) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            self._counters.links_lost += 1
            self.on_lost(link, error)
