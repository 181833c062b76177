"""Messages that are expected, each into a buffer of its own.

A buffer belongs to the transport from when its message is announced until it has landed or is lost; before and after, to who expects
it. What is expected no more is drained when it comes.
"""

import secrets
import struct
from collections.abc import Callable, Sequence

from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.transfer.transport import Buffer, Landing, Verdict


class Arrival:
    """One message, and where it goes."""

    __slots__ = ("_ended", "buffer", "error", "landing", "over", "tag")

    def __init__(self, tag: int, buffer: Buffer, ended: "Ended") -> None:
        self.tag = tag
        self.buffer = buffer
        self.landing = False
        self.over = False
        """The buffer is not written any more: it has the message, or there is an error."""
        self.error: KvrelayError | None = None
        self._ended = ended

    def fail(self, error: KvrelayError) -> None:
        """It need not come. One that is landing goes on."""
        if not self.landing:
            self.lost(error)

    def landed(self) -> None:
        self._end(None)

    def lost(self, error: KvrelayError) -> None:
        self._end(error)

    def _end(self, error: KvrelayError | None) -> None:
        if not self.over:
            self.over = True
            self.error = error
            self._ended(self)


Ended = Callable[[Arrival], None]
"""Called once, when the arrival is over."""


class Arrivals:
    """The inbox of a store's transport."""

    def __init__(self) -> None:
        self._expected: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, buffers: Sequence[Buffer], ended: Ended) -> list[Arrival]:
        """A message for each, until it is there, or forgotten. Their tags are random: no one else can know them."""
        tags = _random(len(buffers))
        while not self._expected.keys().isdisjoint(tags):
            tags = _random(len(buffers))
        arrivals = [Arrival(tag, buffer, ended) for tag, buffer in zip(tags, buffers, strict=True)]
        self._expected.update(zip(tags, arrivals, strict=True))
        return arrivals

    def forget(self, arrival: Arrival) -> None:
        self._expected.pop(arrival.tag, None)

    def accept(self, tag: int, length: int) -> Landing | Verdict:
        arrival = self._expected.pop(tag, None)
        if arrival is None or arrival.over:
            return Verdict.DRAIN
        if length != arrival.buffer.nbytes:
            arrival.fail(TransferFailed(f"a message of {length} bytes, where {arrival.buffer.nbytes} were expected"))
            return Verdict.DRAIN
        arrival.landing = True
        return arrival


def _random(count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}Q", secrets.token_bytes(8 * count))
