"""Where packed KV lies between blocks and the transport. Bounded; lent in order of asking."""

import asyncio
import collections
from collections.abc import Callable

import numpy as np

from kvrelay.transfer.transport import Buffer


class Staging:
    """Lends buffers of at most `capacity_bytes` together. Memory of `slot_bytes` a buffer is kept for reuse.

    The borrower owns a buffer from `acquire` to `release`, and releases it only when the transport is done with it.
    """

    def __init__(self, capacity_bytes: int, slot_bytes: int, on_release: Callable[[], None] = lambda: None) -> None:
        self.capacity_bytes = max(capacity_bytes, slot_bytes)
        self.slot_bytes = slot_bytes
        self.used_bytes = 0
        self._on_release = on_release
        self._free: list[Buffer] = []
        self._waiting: collections.deque[tuple[int, asyncio.Future[Buffer]]] = collections.deque()

    def try_acquire(self, size: int) -> Buffer | None:
        """A buffer of exactly `size` bytes, or None where there is no room for it now. Something larger than all of the
        capacity is lent when nothing else is."""
        if self.used_bytes and self.used_bytes + size > self.capacity_bytes:
            return None
        self.used_bytes += size
        if size > self.slot_bytes:
            return np.empty(size, np.uint8)
        slot = self._free.pop() if self._free else np.empty(self.slot_bytes, np.uint8)
        return slot[:size]

    async def acquire(self, size: int) -> Buffer:
        if not self._waiting and (buffer := self.try_acquire(size)) is not None:
            return buffer
        future: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            raise

    def release(self, buffer: Buffer) -> None:
        self.used_bytes -= buffer.nbytes
        slot = buffer.base
        if isinstance(slot, np.ndarray) and slot.nbytes == self.slot_bytes:
            self._free.append(slot)
        self._serve()
        self._on_release()

    def _serve(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.done():
                buffer = self.try_acquire(size)
                if buffer is None:
                    return
                future.set_result(buffer)
            self._waiting.popleft()
