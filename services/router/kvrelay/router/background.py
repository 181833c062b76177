"""Work that outlives the request it was for: telling pods that it is over."""

import asyncio
import contextlib
from collections.abc import Coroutine

CLOSE_SECONDS = 2.0


class Background:
    """Holds its tasks until they end. Each must be bounded in time, and handle its own errors."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[None, None, None], name: str) -> None:
        self.adopt(asyncio.create_task(work, name=name))

    def adopt(self, task: asyncio.Task[None], timeout_seconds: float | None = None) -> None:
        """Cancels it after the timeout, where one is given."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if timeout_seconds is not None:
            timer = asyncio.get_running_loop().call_later(timeout_seconds, task.cancel)
            task.add_done_callback(lambda _: timer.cancel())

    async def close(self) -> None:
        """Lets the tasks end for CLOSE_SECONDS, then cancels them."""
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*late, return_exceptions=True)
