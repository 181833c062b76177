"""Takes in what tickets let in. A frame lands in staging; only a checked frame of an open ticket is written to its sink.

header ─ belongs to the ticket? ─ expected ── payload ─ in staging ─ Sink.write: checksum, rows ── written ─ all there? ─ Ack
"""

import asyncio
import functools
import logging
from concurrent.futures import Future

import numpy as np

from kvrelay.common.errors import Internal, KvrelayError, StaleEpoch, TransferFailed, error_from
from kvrelay.common.layout import KvLayout
from kvrelay.common.request import Ticket
from kvrelay.transfer import control
from kvrelay.transfer.checksum import leaves
from kvrelay.transfer.control import Abort, Ack, Begin, Nack
from kvrelay.transfer.copies import Copy, Done, settle, when_done
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.frame import (
    HEADER_BYTES,
    ChecksumError,
    FrameRejected,
    decode_final,
    make_tag,
    open_header,
    split_tag,
)
from kvrelay.transfer.link import Acceptor, Link
from kvrelay.transfer.opened import Expected, OpenTicket, Sink
from kvrelay.transfer.staging import Room, Staging
from kvrelay.transfer.transport import Buffer, Landing, Memory, Verdict

log = logging.getLogger(__name__)


class Receiver:
    def __init__(
        self,
        acceptor: Acceptor,
        staging: Staging,
        layout: KvLayout,
        counters: Counters,
        *,
        frame_bytes: int,
        grace_seconds: float,
    ) -> None:
        self._acceptor = acceptor
        self.staging = staging
        self._layout = layout
        self._counters = counters
        self._frame_bytes = frame_bytes
        self._grace_seconds = grace_seconds
        self._tickets: dict[int, OpenTicket] = {}
        acceptor.on_lost = self._on_lost

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    def open(self, ticket: Ticket, sink: Sink) -> None:
        """Lets one push fill the ticket's token range, in all layers of its group. Before the ticket is handed out."""
        if len(ticket.targets) != 1 or ticket.targets[0].group >= len(self._layout.groups):
            raise ValueError("one rank and one group are served")
        target = ticket.targets[0]
        if target.ticket_bits == 0 or target.ticket_bits in self._tickets or target.end_token >= 1 << 32:
            raise ValueError("ticket_bits must be new and not 0, and token numbers have 32 bits")
        self._tickets[target.ticket_bits] = OpenTicket(ticket.generation, target, self._layout, sink)

    def close(self, ticket: Ticket, reason: str = "the ticket was revoked") -> None:
        """Revokes. When this returns, nothing writes to the sink any more; what still comes is drained. Unknown: ignored."""
        known = self._tickets.get(ticket.targets[0].ticket_bits)
        if known is not None:
            self._revoke(known, reason)

    def _revoke(self, ticket: OpenTicket, reason: str) -> None:
        self._end(ticket)
        self._nack(ticket, StaleEpoch(reason))

    # The receive path: accept → (header) → expect → accept → (payload in staging) → take → written → complete.

    def accept(self, tag: int, length: int) -> Landing | Verdict:
        bits, number, is_header = split_tag(tag)
        ticket = self._tickets.get(bits)
        if ticket is None or ticket.link is None:
            self._counters.messages_stray += 1
            return Verdict.DRAIN
        if is_header and length == HEADER_BYTES:
            return HeaderLanding(self, ticket, ticket.link, number)
        expected = ticket.expected.get(number)
        if is_header or expected is None or expected.header.payload_bytes != length:
            self._counters.messages_stray += 1
            self._fail(ticket, FrameRejected(f"a message of {length} bytes that was not announced"))
            return Verdict.DRAIN
        if expected.header.final:
            del ticket.expected[number]
            return PayloadLanding(self, ticket, ticket.link, expected, np.empty(length, np.uint8), None)
        room = self.staging.try_acquire(length)
        if room is None:
            return Verdict.WAIT
        del ticket.expected[number]
        return PayloadLanding(self, ticket, ticket.link, expected, room.memory, room)

    def expect(self, ticket: OpenTicket, link: Link, number: int, buffer: Buffer) -> None:
        """A header has come."""
        if ticket.closed:
            self._counters.messages_stray += 1
            return
        try:
            checked = link.remote.checksum > 0
            header, value = open_header(buffer, checked=checked)
            if number in ticket.expected:
                raise FrameRejected("two headers of one frame")
            if not header.final and header.payload_bytes > self._frame_bytes:
                raise FrameRejected(f"a frame of {header.payload_bytes} bytes")
            ticket.admit(header, ticket.dtype(link))
            ticket.expected[number] = Expected(make_tag(ticket.bits, number), header, value if checked else None)
        except KvrelayError as error:
            self._fail(ticket, error)

    def take(self, landing: "PayloadLanding") -> None:
        """A payload lies in staging, and its landing holds it until it was written."""
        ticket, part = landing.ticket, landing.expected.header.part
        if ticket.closed:
            self._counters.messages_stray += 1
            landing.release()
            return
        copy: Copy[None]
        try:
            if part is None:
                copy = self._take_final(landing)
            else:
                copy = ticket.sink.write(part, landing.buffer, landing.expected.check)
        except Exception as error:  # noqa: BLE001 - of the sink: it ends this transfer, and no other
            landing.release()
            self._fault(ticket, error)
            return
        if isinstance(copy, Future):
            ticket.writing.add(copy)
        when_done(copy, functools.partial(self._written, landing))

    def _written(self, landing: "PayloadLanding", copy: Copy[None]) -> None:
        """From here on nothing reads the staging, or writes to the sink."""
        ticket, part = landing.ticket, landing.expected.header.part
        landing.release()
        if isinstance(copy, Future):
            ticket.writing.discard(copy)
        if ticket.closed:
            return
        try:
            copy.result()
            if part is not None:
                ticket.written(part)
                self._counters.frames_received += 1
                self._counters.payload_bytes_received += landing.expected.header.payload_bytes
            if ticket.whole:
                self._complete(ticket, landing.link)
        except Exception as error:  # noqa: BLE001 - of the sink: it ends this transfer, and no other
            self._fault(ticket, error)

    def _take_final(self, landing: "PayloadLanding") -> Done[None]:
        payload = landing.buffer
        assert isinstance(payload, np.ndarray)
        if (check := landing.expected.check) is not None:
            check(leaves(payload.data))
        landing.ticket.final = decode_final(payload.data)
        return Done(None)

    def _fault(self, ticket: OpenTicket, error: Exception) -> None:
        if not isinstance(error, KvrelayError):
            self._counters.handler_errors += 1
            log.error("a frame could not be written", exc_info=error)
            error = Internal(f"a frame could not be written: {error}")
        self._fail(ticket, error)

    def lose(self, landing: "PayloadLanding", error: TransferFailed) -> None:
        """A payload's receive ended without the payload."""
        landing.release()
        if not landing.ticket.closed:
            self._fail(landing.ticket, error)

    def _complete(self, ticket: OpenTicket, link: Link) -> None:
        assert ticket.final is not None
        self._end(ticket)
        ticket.sink.complete(ticket.final)
        self._counters.transfers_completed += 1
        self._counters.seconds += asyncio.get_running_loop().time() - ticket.began
        link.tell(Ack(ticket_bits=ticket.bits, generation=ticket.generation))

    # Ends.

    def _end(self, ticket: OpenTicket) -> None:
        """From here on the sink's blocks are the engine's alone."""
        self._tickets.pop(ticket.bits, None)
        ticket.closed = True
        settle(ticket.writing)
        if ticket.landing:
            asyncio.get_running_loop().call_later(self._grace_seconds, self._evict, ticket)

    def _evict(self, ticket: OpenTicket) -> None:
        """A sender that stopped in the middle of a frame must not hold staging: its link is broken."""
        if ticket.landing and ticket.link is not None:
            self._acceptor.drop(ticket.link, TransferFailed("the sender stopped in the middle of a frame"))

    def _fail(self, ticket: OpenTicket, error: KvrelayError) -> None:
        if isinstance(error, FrameRejected):
            self._counters.frames_rejected += 1
            self._counters.checksum_errors += isinstance(error, ChecksumError)
            error = TransferFailed(error.message)
        self._end(ticket)
        self._nack(ticket, error)
        self._counters.transfers_failed += 1
        try:
            ticket.sink.failed(error)
        except (
            Exception
        ):  # the sink is the engine's: its fault must not end the receiver, whose ticket is closed already
            self._counters.handler_errors += 1
            log.exception("a sink did not take its failure")

    def _nack(self, ticket: OpenTicket, error: KvrelayError) -> None:
        if ticket.link is not None and not ticket.link.peer.closed:
            message = error.message[: control.MAX_TEXT]
            ticket.link.tell(
                Nack(ticket_bits=ticket.bits, generation=ticket.generation, code=error.code, message=message)
            )

    # What senders say.

    def on_begin(self, message: Begin) -> None:
        link = self._acceptor.get(message.link)
        if link is None:
            self._counters.messages_stray += 1
            self._acceptor.disown(message.link, message.address)
            return
        ticket = self._tickets.get(message.ticket_bits)
        if ticket is None or ticket.generation != message.generation or ticket.link is not None:
            bits, generation = message.ticket_bits, message.generation
            link.tell(Nack(ticket_bits=bits, generation=generation, code=StaleEpoch.code, message="no such ticket"))
            return
        ticket.link = link
        ticket.began = asyncio.get_running_loop().time()

    def on_abort(self, message: Abort) -> None:
        ticket = self._tickets.get(message.ticket_bits)
        if ticket is None or ticket.link is None or ticket.generation != message.generation:
            return
        if ticket.link.number == message.link:
            self._fail(ticket, error_from(message.code, message.message))

    def _on_lost(self, link: Link, error: TransferFailed) -> None:
        for ticket in [ticket for ticket in self._tickets.values() if ticket.link is link]:
            self._fail(ticket, error)

    def close_all(self) -> None:
        for ticket in tuple(self._tickets.values()):
            self._revoke(ticket, "the pod stops")


class HeaderLanding:
    __slots__ = ("_link", "_number", "_receiver", "_ticket", "buffer")

    def __init__(self, receiver: Receiver, ticket: OpenTicket, link: Link, number: int) -> None:
        self.buffer = np.empty(HEADER_BYTES, np.uint8)
        self._receiver = receiver
        self._ticket = ticket
        self._link = link
        self._number = number

    def landed(self) -> None:
        self._receiver.expect(self._ticket, self._link, self._number, self.buffer)

    def lost(self, error: TransferFailed) -> None:
        log.debug("a header was lost: %s", error)  # and with it its link, or its payload comes unannounced


class PayloadLanding:
    """Owns its room in staging from `accept` until it was written, or lost."""

    __slots__ = ("_receiver", "_room", "buffer", "expected", "link", "ticket")

    def __init__(
        self,
        receiver: Receiver,
        ticket: OpenTicket,
        link: Link,
        expected: Expected,
        memory: Memory,
        room: Room | None,
    ) -> None:
        self.buffer = memory
        self.ticket = ticket
        self.link = link
        self.expected = expected
        self._receiver = receiver
        self._room = room
        ticket.landing += 1

    def landed(self) -> None:
        self.ticket.landing -= 1
        self._receiver.take(self)

    def lost(self, error: TransferFailed) -> None:
        self.ticket.landing -= 1
        self._receiver.lose(self, error)

    def release(self) -> None:
        if self._room is not None:
            self._receiver.staging.release(self._room)
            self._room = None
