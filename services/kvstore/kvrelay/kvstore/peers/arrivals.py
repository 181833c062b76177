"""Messages that are expected, each into a buffer of its own.

A buffer belongs to the transport from when its message is announced until it has landed or is lost; before and after, to who expects
it. What is expected no more is drained when it comes.
"""

import asyncio
import secrets

from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.transfer.transport import Buffer, Landing, Verdict


class Arrival:
    """One message, and where it goes."""

    def __init__(self, tag: int, buffer: Buffer) -> None:
        self.tag = tag
        self.buffer = buffer
        self.landing = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what `fail` was given, or TransferFailed. Then the buffer is not written any more."""

    def fail(self, error: KvrelayError) -> None:
        """It need not come. One that is landing goes on."""
        if not self.landing:
            self.lost(error)

    def landed(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def lost(self, error: KvrelayError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # who expects it may have gone


class Arrivals:
    """The inbox of a store's transport."""

    def __init__(self) -> None:
        self._expected: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, buffer: Buffer) -> Arrival:
        """Until it is there, or forgotten. Its tag is random: no one else can know it."""
        tag = secrets.randbits(64)
        while tag in self._expected:
            tag = secrets.randbits(64)
        arrival = self._expected[tag] = Arrival(tag, buffer)
        return arrival

    def forget(self, arrival: Arrival) -> None:
        self._expected.pop(arrival.tag, None)

    def accept(self, tag: int, length: int) -> Landing | Verdict:
        arrival = self._expected.pop(tag, None)
        if arrival is None or arrival.done.done():
            return Verdict.DRAIN
        if length != arrival.buffer.nbytes:
            arrival.fail(TransferFailed(f"a message of {length} bytes, where {arrival.buffer.nbytes} were expected"))
            return Verdict.DRAIN
        arrival.landing = True
        return arrival
