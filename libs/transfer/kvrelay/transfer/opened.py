"""An open ticket on the receiver's side: what it lets in, what of it has come, and where that goes."""

import functools
from concurrent.futures import Future
from typing import Protocol

from kvrelay.common.errors import KvrelayError
from kvrelay.common.layout import KvDtype, KvLayout, wire_dtype
from kvrelay.common.request import TicketTarget
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.coverage import Coverage
from kvrelay.transfer.frame import MAX_FINAL_BYTES, FinalFrame, FrameRejected, Header
from kvrelay.transfer.link import Link
from kvrelay.transfer.transport import Memory


class Sink(Protocol):
    """Where the KV of one ticket goes; the engine's. Called on the loop's thread, never after `Receiver.close` returned."""

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        """Puts the part's rows where they belong, once `check` has found their leaves right."""
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
        """Payloads on their way into staging."""
        self.expected: dict[int, Expected] = {}
        """By frame number: those whose payload has not come."""
        self.writing: set[Future[None]] = set()
        self._shape = layout.groups[target.group]
        self._coverage = {layer: Coverage() for layer in self._shape.layers}
        self._missing = len(self._coverage) * (self.end - self.first)
        self._has_final = False

    @property
    def whole(self) -> bool:
        return self._missing == 0 and self.final is not None

    def dtype(self, link: Link) -> KvDtype:
        return wire_dtype(link.remote.layout.groups[self.group].dtype, self._shape.dtype)

    def admit(self, header: Header, dtype: KvDtype) -> None:
        """Counts a frame's tokens as come. Raises FrameRejected where it does not belong here."""
        part = header.part
        if header.generation != self.generation or header.group != self.group:
            raise FrameRejected("a frame of another generation or group")
        if part is None:
            if self._has_final or header.payload_bytes > MAX_FINAL_BYTES:
                raise FrameRejected("a second final frame, or one that is too large")
            self._has_final = True
            return
        if not part.num_layers or not self.first <= part.first_token < part.end_token <= self.end:
            raise FrameRejected(f"tokens {part.first_token} to {part.end_token} are not in the ticket")
        row_bytes = 2 * self._shape.shard_heads * self._shape.head_dim * dtype.itemsize
        if part.dtype is not dtype or header.payload_bytes != part.num_rows * row_bytes:
            raise FrameRejected(f"{header.payload_bytes} bytes for {part.num_rows} rows of {dtype}")
        for layer in part.layers:
            if layer not in self._coverage or not self._coverage[layer].add(part.first_token, part.end_token):
                raise FrameRejected(
                    f"layer {layer}, tokens {part.first_token} to {part.end_token}: no such layer, or came twice"
                )

    def written(self, part: Part) -> None:
        self._missing -= part.num_rows


class Expected:
    """A payload that a header announced, under the tag that it comes with."""

    __slots__ = ("checksum", "header", "tag")

    def __init__(self, tag: int, header: Header, checksum: int | None) -> None:
        self.tag = tag
        self.header = header
        self.checksum = checksum
        """None: the link's frames have none."""

    @property
    def check(self) -> Check | None:
        return None if self.checksum is None else functools.partial(self.header.check, self.tag, self.checksum)
