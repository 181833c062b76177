"""Takes in what tickets let in. A frame lands in staging; only a checked frame of an open ticket is written to its sink."""

import asyncio
import logging
from typing import Protocol

from kvrelay.common.errors import Internal, KvrelayError, StaleEpoch, TransferFailed, error_from
from kvrelay.common.layout import KvDtype, KvLayout, wire_dtype
from kvrelay.common.request import Ticket, TicketTarget
from kvrelay.transfer import control
from kvrelay.transfer.control import Abort, Ack, Begin, Nack
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.frame import (
    CODES,
    HEADER_BYTES,
    MAX_FINAL_BYTES,
    ChecksumError,
    FinalFrame,
    FrameRejected,
    Header,
    decode_final,
    open_frame,
    split_tag,
)
from kvrelay.transfer.link import Acceptor, Link
from kvrelay.transfer.staging import Staging
from kvrelay.transfer.transport import Buffer, Landing, Verdict

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the KV of one ticket goes; the engine's. Called on the loop's thread, never after `Receiver.close` returned."""

    def write(self, layer: int, first_token: int, num_tokens: int, data: Buffer, dtype: KvDtype) -> None:
        """`data` is K of the tokens, then V: 2 × [num_tokens, heads, head size] of `dtype`, valid during the call only."""
        ...

    def complete(self, final: FinalFrame) -> None:
        """Each token of each layer has been written once. The ticket is closed."""
        ...

    def failed(self, error: KvrelayError) -> None:
        """It will not be completed. The ticket is closed."""
        ...


class OpenTicket:
    """What one ticket lets in, and what of it has come. Owned by the receiver from `open` until it is closed."""

    def __init__(self, generation: int, target: TicketTarget, layout: KvLayout, sink: Sink) -> None:
        self.bits = target.ticket_bits
        self.generation = generation
        self.group = target.group
        self.first = target.first_token
        self.end = target.end_token
        self.sink = sink
        self.closed = False
        self.link: Link | None = None
        self.final: FinalFrame | None = None
        self.began = 0.0
        self.landing = 0
        """Frames on their way into staging."""
        self._shape = layout.groups[target.group]
        self._coverage = {layer: Coverage() for layer in self._shape.layers}
        self._missing = len(self._coverage) * (self.end - self.first)

    @property
    def whole(self) -> bool:
        return self._missing == 0 and self.final is not None

    def dtype(self, link: Link) -> KvDtype:
        return wire_dtype(link.remote.layout.groups[self.group].dtype, self._shape.dtype)

    def admit(self, header: Header, payload_bytes: int, dtype: KvDtype) -> None:
        """Counts a frame's tokens as come. Raises FrameRejected where it does not belong here."""
        end = header.first_token + header.num_tokens
        if header.generation != self.generation or header.group != self.group or header.dtype != CODES[dtype]:
            raise FrameRejected("a frame of another generation, group or dtype")
        if header.layer not in self._coverage or not self.first <= header.first_token < end <= self.end:
            raise FrameRejected(f"layer {header.layer}, tokens {header.first_token} to {end} are not in the ticket")
        row_bytes = 2 * self._shape.shard_heads * self._shape.head_dim * dtype.itemsize
        if payload_bytes != header.num_tokens * row_bytes:
            raise FrameRejected(f"{payload_bytes} bytes for {header.num_tokens} tokens")
        if not self._coverage[header.layer].add(header.first_token, end):
            raise FrameRejected(f"layer {header.layer}, tokens {header.first_token} to {end} came twice")
        self._missing -= header.num_tokens


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
        self._max_bytes = HEADER_BYTES + max(frame_bytes, MAX_FINAL_BYTES)
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

    # The receive path: accept → (lands in staging) → take → write → complete.

    def accept(self, tag: int, length: int) -> Landing | Verdict:
        bits, _ = split_tag(tag)
        ticket = self._tickets.get(bits)
        if ticket is None or ticket.link is None:
            self._counters.messages_stray += 1
            return Verdict.DRAIN
        if not HEADER_BYTES <= length <= self._max_bytes:
            self._counters.messages_stray += 1
            self._fail(ticket, FrameRejected(f"a frame of {length} bytes"))
            return Verdict.DRAIN
        buffer = self.staging.try_acquire(length)
        if buffer is None:
            return Verdict.WAIT
        return FrameLanding(self, ticket, ticket.link, tag, buffer)

    def take(self, ticket: OpenTicket, link: Link, tag: int, buffer: Buffer) -> None:
        """A frame lies in staging, until this returns."""
        if ticket.closed:
            self._counters.messages_stray += 1
            return
        try:
            header = open_frame(buffer, tag, checked=link.remote.checksum > 0)
            if header.final:
                self._take_final(ticket, header, buffer)
            else:
                dtype = ticket.dtype(link)
                data = buffer[HEADER_BYTES:]
                ticket.admit(header, data.nbytes, dtype)
                self._counters.frames_received += 1
                self._counters.payload_bytes_received += data.nbytes
                ticket.sink.write(header.layer, header.first_token, header.num_tokens, data, dtype)
            if ticket.whole:
                self._complete(ticket, link)
        except KvrelayError as error:
            self._fail(ticket, error)
        except Exception as error:  # of the sink: it ends this transfer, and no other
            self._counters.handler_errors += 1
            log.exception("a frame could not be written")
            self._fail(ticket, Internal(f"a frame could not be written: {error}"))

    def lose(self, ticket: OpenTicket, error: TransferFailed) -> None:
        """A frame's receive ended without the frame."""
        if not ticket.closed:
            self._fail(ticket, error)

    def _take_final(self, ticket: OpenTicket, header: Header, buffer: Buffer) -> None:
        if header.generation != ticket.generation or ticket.final is not None:
            raise FrameRejected("a final frame of another generation, or a second one")
        ticket.final = decode_final(buffer.data[HEADER_BYTES:])

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


class FrameLanding:
    """Owns its staging buffer from `accept` until it was written, or lost."""

    __slots__ = ("_link", "_receiver", "_tag", "_ticket", "buffer")

    def __init__(self, receiver: Receiver, ticket: OpenTicket, link: Link, tag: int, buffer: Buffer) -> None:
        self.buffer = buffer
        self._receiver = receiver
        self._ticket = ticket
        self._link = link
        self._tag = tag
        ticket.landing += 1

    def landed(self) -> None:
        try:
            self._receiver.take(self._ticket, self._link, self._tag, self.buffer)
        finally:
            self._release()

    def lost(self, error: TransferFailed) -> None:
        try:
            self._receiver.lose(self._ticket, error)
        finally:
            self._release()

    def _release(self) -> None:
        self._ticket.landing -= 1
        self._receiver.staging.release(self.buffer)
