"""Where packed KV lies between blocks and the transport: one arena, made once, in slots that are lent in order of asking."""

import asyncio
import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from kvrelay.transfer.transport import Memory

Allocate = Callable[[int], Memory]
"""An arena of so many bytes. What it needs so that the transport takes it fast (registration, pinning) happens here, once."""


def host_memory(num_bytes: int) -> Memory:
    """The pages are there when they are first used."""
    return np.empty(num_bytes, np.uint8)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What is lent: `memory` of the asked size, the first bytes of `slot`."""

    memory: Memory
    slot: Memory


class Staging:
    """The borrower owns a room from `acquire` to `release`, and releases it only when the transport and all copies are done with it."""

    def __init__(self, arena: Memory, slot_bytes: int, on_release: Callable[[], None] = lambda: None) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = arena.nbytes // slot_bytes
        self.used_bytes = 0
        self._on_release = on_release
        # The one that was used last is lent first.
        self._free = [arena[i * slot_bytes : (i + 1) * slot_bytes] for i in reversed(range(self.num_slots))]
        self._waiting: collections.deque[tuple[int, asyncio.Future[Room]]] = collections.deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def try_acquire(self, size: int) -> Room | None:
        """Room for `size` bytes, at most a slot's, or None where there is none now."""
        assert size <= self.slot_bytes
        if not self._free:
            return None
        self.used_bytes += size
        slot = self._free.pop()
        return Room(slot[:size], slot)

    async def acquire(self, size: int) -> Room:
        if not self._waiting and (room := self.try_acquire(size)) is not None:
            return room
        future: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, room: Room) -> None:
        self.used_bytes -= room.memory.nbytes
        self._free.append(room.slot)
        self._serve()
        self._on_release()

    def _serve(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.done():
                room = self.try_acquire(size)
                if room is None:
                    return
                future.set_result(room)
            self._waiting.popleft()
