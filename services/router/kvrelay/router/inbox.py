"""What pods and the router itself tell a running request, and when it hears of it."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable

from kvrelay.common.request import ChoiceDelta, FinishReason
from kvrelay.router.news import News

MAX_PAUSE_SECONDS = 0.05
_FAILURES = (FinishReason.ABORT, FinishReason.ERROR)


class Inbox:
    """One reader. What waits is bounded by what one request may generate."""

    def __init__(self) -> None:
        self._items: deque[News] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: News) -> None:
        self._items.append(item)
        self.wake()

    def leave(self, item: News) -> None:
        """As `put`, but its reader hears of it at the next `wake` only."""
        self._items.append(item)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> News:
        """The next one. Tokens of a choice that follow each other come together."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        return self._joined(item) if self._items and isinstance(item, ChoiceDelta) else item

    def _joined(self, first: ChoiceDelta) -> ChoiceDelta:
        parts = [first]
        index = first.index + len(first.token_ids)
        while self._items and parts[-1].finish_reason is None:
            following = self._items[0]
            if not isinstance(following, ChoiceDelta) or following.index != index:
                break
            if (following.choice, following.attempt) != (first.choice, first.attempt):
                break
            if following.finish_reason in _FAILURES:  # what came before it still counts
                break
            parts.append(following)
            index += len(following.token_ids)
            self._items.popleft()
        if len(parts) == 1:
            return first
        last = parts[-1]
        return ChoiceDelta(
            request_id=first.request_id,
            choice=first.choice,
            index=first.index,
            token_ids=tuple(token for part in parts for token in part.token_ids),
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            finish_reason=last.finish_reason,
            stop_token_id=last.stop_token_id,
            error=last.error,
            attempt=first.attempt,
        )


class Pacer:
    """Wakes the readers that tokens came for: at once, as long as handing them on takes less than half of the time.

    Where it takes more, as long a pause follows as it took: several steps' tokens then pass together, each for a fraction of
    what it costs alone. So a router that has too much to do gets slower by some milliseconds, and does not fall behind.
    """

    def __init__(self) -> None:
        self._due: set[Inbox] = set()
        self._next: asyncio.Handle | None = None
        self._idle_from = 0.0
        """On the clock of `time.monotonic`, when the pause ends."""

    def wake(self, inboxes: Iterable[Inbox]) -> None:
        self._due.update(inboxes)
        if self._next is None and self._due:
            self._schedule()

    def _schedule(self) -> None:
        pause = self._idle_from - time.monotonic()
        if pause > 0:
            self._next = asyncio.get_running_loop().call_later(pause, self._hand_on)
        else:
            self._hand_on()

    def _hand_on(self) -> None:
        due, self._due = self._due, set()
        begin = time.monotonic()
        for inbox in due:
            inbox.wake()
        # Behind all that were woken, and behind the turn's end, when their writes reach the sockets.
        loop = asyncio.get_running_loop()
        self._next = loop.call_soon(loop.call_soon, self._handed_on, begin)

    def _handed_on(self, begin: float) -> None:
        now = time.monotonic()
        self._idle_from = now + min(now - begin, MAX_PAUSE_SECONDS)
        self._next = None
        if self._due:
            self._schedule()
