"""Pushes KV where tickets say, layer by layer, while later layers are computed.

    engine:  push(ticket) ─ ready(layer, tokens) … ─ mark_last_layer() ─ ready(…) ─ finish(final) ─ await done
    push:    connect ─ Begin ─ [wait for ready → window → staging → Source.read] … ─ final frame ─ Ack
    frame:                                                   read ─ header, payload ─ sent ─ staging and window given back

A frame is read while those before it are on the wire. The blocks belong to the push from `push` until `done`: immutable and
pinned. Staging belongs to the read, and then to the transport until its future is done, even where the push has ended.
"""

import asyncio
import dataclasses
import functools
import logging
from typing import Protocol

import numpy as np

from kvrelay.common.errors import Cancelled, Internal, KvrelayError, StaleEpoch, TransferFailed, error_from
from kvrelay.common.layout import KvLayout, wire_dtype
from kvrelay.common.request import Ticket, TicketTarget
from kvrelay.transfer import control
from kvrelay.transfer.checksum import leaves
from kvrelay.transfer.control import Abort, Ack, Begin, Nack
from kvrelay.transfer.copies import Copy, Part, when_done
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.frame import IS_HEADER, MAX_FRAMES, FinalFrame, Header, encode_final, make_tag
from kvrelay.transfer.hold import Hold
from kvrelay.transfer.link import Dialer, Link
from kvrelay.transfer.pending import Pending
from kvrelay.transfer.staging import Room, Staging
from kvrelay.transfer.transport import Memory

log = logging.getLogger(__name__)


class Source(Protocol):
    """Where the KV of one push comes from; the engine's. Called on the loop's thread, never after `PushHandle.done`."""

    def read(self, part: Part, out: Memory, *, hashed: bool) -> Copy[bytes]:
        """Packs the part's rows into `out`. Gives the leaves of their checksum where it is `hashed`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class PushResult:
    payload_bytes: int
    seconds: float
    """From the first frame to the acknowledgement."""
    frames: int


@dataclasses.dataclass(frozen=True, slots=True)
class PushOptions:
    frame_bytes: int
    checksums: bool
    grace_seconds: float
    """What frames in flight get to end by themselves, once their push has ended."""


class PushHandle:
    """One push. Its methods are called on the loop's thread; none of them waits."""

    def __init__(self, sender: "Sender", ticket: Ticket, target: TicketTarget, source: Source) -> None:
        self.ticket = ticket
        self.target = target
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[PushResult] = loop.create_future()
        """Raises TransferFailed, StaleEpoch, IncompatibleLayout, Cancelled. Then nothing of the push is in use any more."""
        self.link: Link | None = None
        self._loop = loop
        self._sender = sender
        self._source = source
        self._group = sender.layout.groups[target.group]
        self._deadline = loop.time() + ticket.timeout_ms / 1000
        self._coverage = {layer: Coverage() for layer in self._group.layers}
        self._pending = Pending()
        self._unsent = len(self._coverage) * (target.end_token - target.first_token)
        self._woken = asyncio.Event()
        self._final: asyncio.Future[FinalFrame] = loop.create_future()
        self._acked: asyncio.Future[None] = loop.create_future()
        self._in_flight: set[asyncio.Future[None]] = set()
        self._num_reading = 0
        self._none_read = asyncio.Event()
        self._error: KvrelayError | None = None
        self._frames = 0
        self._payload_bytes = 0
        self._started = 0.0
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    # The engine's side.

    def ready(self, layer: int, start: int, end: int) -> None:
        """Tokens [start, end) of `layer` are computed. What lies outside the ticket is not sent. Each token once."""
        start, end = max(start, self.target.first_token), min(end, self.target.end_token)
        if start >= end or self._error is not None:
            return
        if layer not in self._coverage or not self._coverage[layer].add(start, end):
            raise ValueError(f"layer {layer}, tokens {start} to {end}: no such layer, or ready before")
        self._pending.add(layer, start, end)
        self._woken.set()

    def mark_last_layer(self) -> None:
        """The last chunk's last layer begins to compute: what is on its way by now was overlapped."""
        self._sender.counters.payload_bytes_overlapped += self._payload_bytes

    def finish(self, final: FinalFrame) -> None:
        """All is computed, or will be by the `ready` calls made; the final frame follows it."""
        if not self._final.done():
            self._final.set_result(final)

    def abort(self, reason: str = "the push was aborted") -> None:
        """Ends it, from any state. `done` tells when nothing is in use any more."""
        self.fail(Cancelled(reason))

    # The push path.

    async def _run(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._push()
        except TimeoutError:
            self._give_up(TransferFailed("the ticket's deadline passed during the push"))
        except asyncio.CancelledError:
            self._give_up(self._error or Cancelled("the process stops"))
        except Exception as error:  # noqa: BLE001 - of the source: it ends this push, and no other
            self._give_up(self._fault(error))
        await self._settle()

    def _fault(self, error: Exception) -> KvrelayError:
        if isinstance(error, KvrelayError):
            return error
        self._sender.counters.handler_errors += 1
        log.error("a push failed", exc_info=error)
        return Internal(f"the push failed: {error}")

    async def _push(self) -> None:
        link = await self._begin()
        dtype = wire_dtype(self._group.dtype, link.remote.layout.groups[self.target.group].dtype)
        row_bytes = 2 * self._group.shard_heads * self._group.head_dim * dtype.itemsize
        max_rows = max(1, min(self._sender.options.frame_bytes, link.remote.frame_bytes) // row_bytes)
        while self._unsent:
            while not self._pending:
                self._woken.clear()
                await self._woken.wait()
            await self._sender.holding.passes(self._frames)
            room = await self._room(link, max_rows * row_bytes)
            # Taken as late as can be: what became computed meanwhile goes along.
            layer, end_layer, start, end = self._pending.take(max_rows)
            part = Part(layer, end_layer - layer, start, end - start, dtype)
            self._unsent -= part.num_rows
            self._read(link, part, room, part.num_rows * row_bytes)
            await asyncio.sleep(0)  # the loop's others, and the wire, get their turn
        final = encode_final(await self._final)
        await self._sender.holding.passes(self._frames)
        number = self._next_number()
        await link.window.acquire()
        payload = np.frombuffer(final, np.uint8)
        header = Header(self.target.group, None, payload.nbytes, self.ticket.generation)
        hashed = leaves(payload.data) if self._sender.options.checksums else None
        self._post(link, number, header, hashed, payload, None)
        await self._acked

    async def _begin(self) -> Link:
        link = await self._sender.dialer.connect(self.target.address)
        if link.remote.epoch != self.ticket.epoch:
            raise StaleEpoch(
                f"the ticket is of {self.ticket.pod_id}'s epoch {self.ticket.epoch}, now {link.remote.epoch}"
            )
        if link.peer.closed:
            raise TransferFailed("the connection was lost")
        self.link = link
        bits, generation, address = self.target.ticket_bits, self.ticket.generation, self._sender.dialer.address
        link.tell(Begin(link=link.number, address=address, ticket_bits=bits, generation=generation))
        return link

    async def _room(self, link: Link, size: int) -> Room:
        """With a place in the link's window."""
        await link.window.acquire()
        try:
            return await self._sender.staging.acquire(size)
        except BaseException:  # a cancellation as well: the place in the window is given back
            link.window.release()
            raise

    def _return(self, link: Link, room: Room | None) -> None:
        link.window.release()
        if room is not None:
            self._sender.staging.release(room)

    def _next_number(self) -> int:
        if self._frames >= MAX_FRAMES:
            raise TransferFailed(f"over {MAX_FRAMES} frames")
        self._frames += 1
        return self._frames - 1

    def _read(self, link: Link, part: Part, room: Room, size: int) -> None:
        self._started = self._started or self._loop.time()
        try:
            number = self._next_number()
            payload = room.memory[:size]
            copy = self._source.read(part, payload, hashed=self._sender.options.checksums)
        except BaseException:  # of the source as well: the room and its place are given back
            self._return(link, room)
            raise
        header = Header(self.target.group, part, size, self.ticket.generation)
        self._num_reading += 1
        when_done(copy, functools.partial(self._was_read, link, number, header, payload, room))

    def _was_read(
        self, link: Link, number: int, header: Header, payload: Memory, room: Room, copy: Copy[bytes]
    ) -> None:
        self._num_reading -= 1
        self._none_read.set()
        try:
            found = copy.result()
        except Exception as error:  # noqa: BLE001 - of the source: it ends this push, and no other
            self._return(link, room)
            self.fail(self._fault(error))
            return
        if self._error is not None:
            self._return(link, room)
            return
        self._payload_bytes += header.payload_bytes
        self._sender.counters.payload_bytes_sent += header.payload_bytes
        self._post(link, number, header, found if self._sender.options.checksums else None, payload, room)

    def _post(
        self, link: Link, number: int, header: Header, hashed: bytes | None, payload: Memory, room: Room | None
    ) -> None:
        self._started = self._started or self._loop.time()
        self._sender.counters.frames_sent += 1
        tag = make_tag(self.target.ticket_bits, number)
        # What ends the header's send ends the payload's, too.
        link.say(tag | IS_HEADER, header.seal(tag, hashed))
        sent = link.peer.send(tag, payload)
        self._in_flight.add(sent)
        sent.add_done_callback(functools.partial(self._sent, link, room))

    def _sent(self, link: Link, room: Room | None, sent: asyncio.Future[None]) -> None:
        self._in_flight.discard(sent)
        self._return(link, room)
        if not sent.cancelled() and (error := sent.exception()) is not None:
            self.fail(TransferFailed(f"a frame was not sent: {error}"))

    # Ends.

    def acknowledge(self) -> None:
        if not self._acked.done():
            self._acked.set_result(None)

    def fail(self, error: KvrelayError) -> None:
        """Ends the push with `error`, unless it has ended or is ending."""
        if self._error is None and not self._acked.done():
            self._error = error
            self._task.cancel()

    def _give_up(self, error: KvrelayError) -> None:
        """Nothing more is read or sent; the receiver is told."""
        self._error = error
        link = self.link
        if link is not None and not link.peer.closed:
            message = error.message[: control.MAX_TEXT]
            bits, generation = self.target.ticket_bits, self.ticket.generation
            link.tell(
                Abort(link=link.number, ticket_bits=bits, generation=generation, code=error.code, message=message)
            )

    async def _settle(self) -> None:
        """Returns when no frame of this push is read or in flight: a link that does not let them go is broken."""
        while self._num_reading:
            self._none_read.clear()
            await self._none_read.wait()
        for breaking in (False, True):
            if self._in_flight and self.link is not None:
                if breaking:
                    self._sender.dialer.drop(self.link, TransferFailed("the receiver takes no frames in"))
                await asyncio.wait(self._in_flight, timeout=self._sender.options.grace_seconds)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task is over, or was cancelled before it began."""
        if task.cancelled():
            self._error = self._error or Cancelled("the process stops")
        seconds = self._loop.time() - self._started
        self._sender.end(self, self._error, seconds)
        if self.done.done():
            return
        if self._error is not None:
            self.done.set_exception(self._error)
        else:
            self.done.set_result(PushResult(self._payload_bytes, seconds, self._frames))


class Sender:
    def __init__(
        self, dialer: Dialer, staging: Staging, layout: KvLayout, counters: Counters, options: PushOptions
    ) -> None:
        self.dialer = dialer
        self.staging = staging
        self.layout = layout
        self.counters = counters
        self.options = options
        self.holding = Hold()
        self._pushes: dict[int, PushHandle] = {}
        dialer.on_lost = self._on_lost

    @property
    def num_pushes(self) -> int:
        return len(self._pushes)

    def push(self, ticket: Ticket, source: Source) -> PushHandle:
        """Starts a push; its deadline runs from here. Raises TransferFailed for a ticket that cannot be one of this port's."""
        if len(ticket.targets) != 1 or ticket.targets[0].group >= len(self.layout.groups):
            raise TransferFailed(f"a ticket of {len(ticket.targets)} targets, where one rank and one group are served")
        target = ticket.targets[0]
        if target.ticket_bits in self._pushes:
            raise TransferFailed("this ticket is being used already")
        handle = self._pushes[target.ticket_bits] = PushHandle(self, ticket, target, source)
        return handle

    def end(self, push: PushHandle, error: KvrelayError | None, seconds: float) -> None:
        del self._pushes[push.target.ticket_bits]
        if error is None:
            self.counters.transfers_completed += 1
            self.counters.seconds += seconds
        elif isinstance(error, Cancelled | StaleEpoch):  # no one waits for it any more
            self.counters.transfers_cancelled += 1
        else:
            self.counters.transfers_failed += 1

    def hold(self, after_frames: int) -> None:
        """Stops each push after so many frames, until `release`: for tests that end a process in the middle."""
        self.holding.hold(after_frames)

    def release(self) -> None:
        self.holding.release()

    def on_ack(self, message: Ack) -> None:
        push = self._pushes.get(message.ticket_bits)
        if push is not None and push.ticket.generation == message.generation:
            push.acknowledge()

    def on_nack(self, message: Nack) -> None:
        push = self._pushes.get(message.ticket_bits)
        if push is not None and push.ticket.generation == message.generation:
            error = error_from(message.code, message.message)
            push.fail(error if isinstance(error, StaleEpoch) else TransferFailed(f"refused there: {message.message}"))

    def _on_lost(self, link: Link, error: TransferFailed) -> None:
        for push in [push for push in self._pushes.values() if push.link is link]:
            push.fail(error)

    async def close(self) -> None:
        pushes = list(self._pushes.values())
        for push in pushes:
            push.abort("the process stops")
        await asyncio.gather(*(push.done for push in pushes), return_exceptions=True)
