"""Messages that are expected, each into the room of one block, or of several that lie one behind the other.

Rooms belong to the transport from when a message for them is announced until it has landed or is lost; before and after, to who expects
it. What is expected no more is drained when it comes.
"""

import itertools
import secrets
import struct
from collections.abc import Callable, Sequence

import numpy as np

from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.kvstore.arena import Arena
from kvrelay.kvstore.memory import Slot
from kvrelay.transfer.transport import Buffer, Verdict


class Arrival:
    """One block, and where it goes."""

    __slots__ = ("_ended", "behind", "error", "landing", "over", "slot", "tag")

    def __init__(self, tag: int, slot: Slot, ended: "Ended") -> None:
        self.tag = tag
        self.slot = slot
        self.behind: Arrival | None = None
        """Whose room begins where this one's ends: its block may come in the same message."""
        self.landing = False
        self.over = False
        """The room is not written any more: it has the block, or there is an error."""
        self.error: KvrelayError | None = None
        self._ended = ended

    def fail(self, error: KvrelayError) -> None:
        """It need not come. One that is landing goes on."""
        if not self.landing:
            self.end(error)

    def end(self, error: KvrelayError | None) -> None:
        if not self.over:
            self.over = True
            self.error = error
            self._ended(self)


Ended = Callable[[Arrival], None]
"""Called once, when the arrival is over."""


class Message:
    """On its way into the rooms of these."""

    def __init__(self, arrivals: Sequence[Arrival], buffer: Buffer) -> None:
        self.buffer = buffer
        self._arrivals = arrivals
        for arrival in arrivals:
            arrival.landing = True

    def landed(self) -> None:
        for arrival in self._arrivals:
            arrival.end(None)

    def lost(self, error: TransferFailed) -> None:
        for arrival in self._arrivals:
            arrival.end(error)


class Arrivals:
    """The inbox of a store's transport, for blocks that go into its arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._expected: dict[int, Arrival] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, slots: Sequence[Slot], ended: Ended) -> list[Arrival]:
        """The blocks of these slots, until they are there, or forgotten. Their tags are random: no one else can know them."""
        tags = _random(len(slots))
        while not self._expected.keys().isdisjoint(tags):
            tags = _random(len(slots))
        arrivals = [Arrival(tag, slot, ended) for tag, slot in zip(tags, slots, strict=True)]
        for before, after in itertools.pairwise(arrivals):
            if before.slot.offset + before.slot.info.size == after.slot.offset:
                before.behind = after
        self._expected.update(zip(tags, arrivals, strict=True))
        return arrivals

    def forget(self, arrival: Arrival) -> None:
        self._expected.pop(arrival.tag, None)

    def accept(self, tag: int, length: int) -> Message | Verdict:
        arrivals: list[Arrival] = []
        arrival, left = self._expected.get(tag), length
        while arrival is not None and left > 0:
            arrivals.append(arrival)
            self.forget(arrival)
            left -= arrival.slot.info.size
            arrival = arrival.behind
        if arrivals and left == 0 and not any(arrival.over or arrival.landing for arrival in arrivals):
            return Message(arrivals, self._room(arrivals[0].slot.offset, length))
        for arrival in arrivals:
            arrival.fail(TransferFailed(f"a message of {length} bytes, which is not what was expected"))
        return Verdict.DRAIN

    def _room(self, offset: int, length: int) -> Buffer:
        return np.frombuffer(self._arena.part(offset, length), np.uint8)


def _random(count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}Q", secrets.token_bytes(8 * count))
