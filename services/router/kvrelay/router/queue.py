"""Requests that wait for pods: by priority, then in order of arrival; bounded; each can leave at any time."""

import asyncio
import bisect
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.common.errors import Overloaded, Unavailable
from kvrelay.router.placement import Placement
from kvrelay.router.policy import RouteRequest

MAX_RETRY_AFTER_SECONDS = 60.0


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    newcomer: bool
    number: int
    request: RouteRequest = field(compare=False)
    placed: asyncio.Future[Placement] = field(compare=False)


class Queue:
    """`claim` asks the policy; `dispatch` is to be called whenever its answer may have changed."""

    def __init__(self, claim: Callable[[RouteRequest], Placement | None], *, max_waiting: int) -> None:
        self._claim = claim
        self._max_waiting = max_waiting
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._dispatching: asyncio.Handle | None = None
        self._seconds_between = 0.1
        """Between two placements from the queue, smoothed: what a newcomer's wait is estimated by."""
        self._last_placed = time.monotonic()

    def __len__(self) -> int:
        return len(self._waiting)

    async def place(
        self,
        request: RouteRequest,
        *,
        priority: int,
        readmitted: bool,
        serving: Callable[[], bool],
        patience_seconds: float,
    ) -> Placement:
        """Where to run, once there is room. `readmitted`: it ran before, so no bound applies, and it
        goes before newcomers of its priority.

        Raises Overloaded when the queue is full, and Unavailable when for `patience_seconds` no pod was `serving`. It has no
        deadline of its own: cancel it.
        """
        if not self._waiting and (placement := self._claim(request)) is not None:
            return placement
        if len(self._waiting) >= self._max_waiting and not readmitted:
            raise Overloaded("the queue is full", self._retry_after())
        placed: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(priority, not readmitted, next(self._numbers), request, placed)
        bisect.insort(self._waiting, waiter)
        self.dispatch()
        try:
            while not waiter.placed.done():
                was_serving = serving()
                await asyncio.wait({waiter.placed}, timeout=patience_seconds)
                if not (waiter.placed.done() or was_serving or serving()):
                    raise Unavailable("no pod that could serve this request is alive")
            return waiter.placed.result()
        except BaseException:  # a cancellation as well: a placement that no one takes is released
            if waiter.placed.done():  # placed in the same turn in which it was cancelled
                waiter.placed.result().release()
            raise
        finally:
            self._remove(waiter)

    def dispatch(self) -> None:
        """Places whom it can, soon: changes of one turn of the event loop make one pass."""
        if self._waiting and self._dispatching is None:
            self._dispatching = asyncio.get_running_loop().call_soon(self._pass)

    def close(self) -> None:
        if self._dispatching is not None:
            self._dispatching.cancel()
            self._dispatching = None

    def _pass(self) -> None:
        """In order. One that cannot be placed holds up those behind it, unless it is bound to pods of its own choice: so a
        large request is not starved by small ones."""
        self._dispatching = None
        for waiter in list(self._waiting):
            placement = self._claim(waiter.request)
            if placement is not None:
                self._waiting.remove(waiter)
                self._note_placed()
                waiter.placed.set_result(placement)
            elif waiter.request.decode is None and waiter.request.group is None:
                return

    def _remove(self, waiter: _Waiter) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self.dispatch()

    def _note_placed(self) -> None:
        now = time.monotonic()
        self._seconds_between += 0.1 * (min(now - self._last_placed, 10.0) - self._seconds_between)
        self._last_placed = now

    def _retry_after(self) -> float:
        return min(MAX_RETRY_AFTER_SECONDS, max(1.0, len(self._waiting) * self._seconds_between))
