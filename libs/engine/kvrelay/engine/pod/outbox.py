"""What waits to be sent on one stream: bounded, with an end."""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from kvrelay.common.errors import KvrelayError, Overloaded

T = TypeVar("T")


class Outbox(Generic[T]):
    """One reader. Full means that the reader is too slow: the stream ends with Overloaded, what waited is dropped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._error: KvrelayError | None = None
        self._ended = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """False where it is not taken: the stream has ended, or ends by this."""
        if self.ended:
            return False
        if len(self._items) >= self._limit:
            self.fail(Overloaded(f"the receiver is {self._limit} messages behind"))
            return False
        self._items.append(item)
        self._ready.set()
        return True

    def end(self, error: KvrelayError | None = None) -> None:
        """After what waits, well or with an error."""
        self._ended = True
        self._error = self._error or error
        self._ready.set()

    def fail(self, error: KvrelayError) -> None:
        """At once."""
        if not self.ended:
            self._error = error
            self._items.clear()
            self._ready.set()

    @property
    def ended(self) -> bool:
        return self._ended or self._error is not None

    def move_to(self, other: "Outbox[T]") -> None:
        """What waits goes to another reader's."""
        other._items.extend(self._items)
        self._items.clear()
        if other._items:
            other._ready.set()

    async def get(self) -> T | None:
        """The next one, None at the end. Raises the error that ended the stream."""
        return self._items.popleft() if await self._waited() else None

    async def get_all(self, limit: int) -> list[T]:
        """What waits, `limit` of it at most; empty at the end. Raises the error that ended the stream."""
        if not await self._waited():
            return []
        return [self._items.popleft() for _ in range(min(limit, len(self._items)))]

    async def _waited(self) -> bool:
        """True when there is one, False at the end."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended:
                return False
            self._ready.clear()
            await self._ready.wait()
        return True
