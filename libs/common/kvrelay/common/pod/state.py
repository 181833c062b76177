"""Where a pod is in its life, and who waits to hear of a change."""

import asyncio
import contextlib

from kvrelay.common.errors import Draining, Unavailable


class PodState:
    """starting → ready → draining → over. `reason` says why it is not ready."""

    def __init__(self) -> None:
        self.ready = False
        self.draining = False
        self.over = False
        self.reason = "the engine is starting"
        self.leaving = asyncio.Event()
        """Someone asked the pod to leave."""
        self.grace_seconds: float | None = None
        """The last asker's; None: the configured one."""
        self.num_changes = 0
        self._changed = asyncio.Event()

    def serve(self) -> None:
        self.ready = True
        self.reason = ""
        self.touch()

    def ask_to_leave(self, grace_seconds: float | None = None) -> None:
        self.grace_seconds = grace_seconds
        self.leaving.set()

    def drain(self) -> None:
        self.draining = True
        self.ready = False
        self.reason = "the pod is draining"
        self.touch()

    def finish(self, reason: str) -> None:
        self.over = True
        self.ready = False
        self.reason = reason
        self.touch()

    def check_accepting(self) -> None:
        """Raises Draining, Unavailable."""
        if self.draining or self.leaving.is_set():
            raise Draining("the pod is draining")
        if not self.ready:
            raise Unavailable(self.reason)

    def touch(self) -> None:
        """Something changed that watchers want to know."""
        self.num_changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, seconds: float, since: int | None = None) -> None:
        """Returns at the next change, or after that time; at once where there were more changes than `since`."""
        if since is not None and self.num_changes != since:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for may lose a cancellation in Python 3.11
                await self._changed.wait()
