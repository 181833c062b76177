"""What waits for a running request to hear of it."""

import asyncio
from collections import deque

from kvrelay.common.request import ChoiceDelta, FinishReason
from kvrelay.router.news import News

_FAILURES = (FinishReason.ABORT, FinishReason.ERROR)


class Inbox:
    """One reader. What waits is bounded by what one request may generate."""

    def __init__(self) -> None:
        self._items: deque[News] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: News) -> None:
        self._items.append(item)
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
