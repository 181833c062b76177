"""What carries messages: the interface that UCX and its in-process twin keep.

A message is a 64-bit tag and some bytes. No receive is ever posted ahead: a message that has arrived is announced to the
`Inbox`, which says where it goes, so nothing that was cancelled can swallow a later message. Messages of one peer are announced
in the order of their sending. Everything runs on one event loop's thread.
"""

import asyncio
import enum
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvrelay.common.errors import TransferFailed

Buffer = npt.NDArray[np.uint8]


class Memory(Protocol):
    """Bytes that lie together: an array of the host's, or a device's with `__cuda_array_interface__`."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> "Memory": ...


class Verdict(enum.Enum):
    DRAIN = enum.auto()
    """Take the message off the transport and forget it; its bytes are not kept."""
    WAIT = enum.auto()
    """No room now: leave it, and all behind it, until `Transport.resume`."""


class Landing(Protocol):
    """A message on its way into `buffer`. Exactly one of `landed` and `lost` follows; neither may raise."""

    @property
    def buffer(self) -> Memory: ...

    def landed(self) -> None: ...

    def lost(self, error: TransferFailed) -> None: ...


class Inbox(Protocol):
    def accept(self, tag: int, length: int) -> Landing | Verdict:
        """Where a message of `length` bytes goes: a landing whose buffer has exactly that size. May not raise."""
        ...


class Peer(Protocol):
    """A way to one other process, open until `close`, or until the other dies."""

    @property
    def closed(self) -> bool: ...

    @property
    def carriers(self) -> tuple[str, ...]:
        """What messages to it may go by, as the transport calls it. Known once a message came back."""
        ...

    def send(self, tag: int, buffer: Memory) -> asyncio.Future[None]:
        """Done when `buffer` may be used again; raises TransferFailed if the message may not have arrived."""
        ...

    def close(self) -> None:
        """By force: sends and receives in flight end, with errors, within moments. The close callback is not called.

        The other end learns nothing of it: its small messages still come, its large ones are never taken.
        """
        ...


CloseCallback = Callable[[TransferFailed], None]


class Transport(Protocol):
    @property
    def name(self) -> str:
        """For people: what carries the messages."""
        ...

    @property
    def address(self) -> bytes:
        """By which other processes connect. Known after `start`."""
        ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...

    def start(self, inbox: Inbox) -> None:
        """Called once, on the running loop that drives the transport from then on. Raises Internal."""
        ...

    def connect(self, address: bytes, on_closed: CloseCallback) -> Peer:
        """`on_closed` is called once, from the loop, when the other end is gone. Raises TransferFailed."""
        ...

    def resume(self) -> None:
        """There is room again after `Verdict.WAIT`."""
        ...

    async def close(self) -> None: ...
