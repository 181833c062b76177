"""Threads for work that may block, at the price of little more than the switches to a thread and back."""

import asyncio
import contextlib
import errno
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
A = TypeVarTuple("A")
Then = Callable[[Any, BaseException | None], object]


class Threads:
    """`count` of them, for the event loop that makes and closes this. What runs when the process ends is cut off.

    As `ThreadPoolExecutor`, but without a second future for each call: each switch to the loop costs as much as a short read.
    """

    def __init__(self, count: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[Then, Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._closed = False
        self._count = count
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def call(
        self,
        then: Then,
        function: Callable[[Unpack[A]], object],
        *args: *A,
    ) -> None:
        """Calls the function in a thread, in order of asking, and `then` in the event loop: with what it gave, or raised."""
        if self._closed:
            then(None, OSError(errno.ECANCELED, "closed"))
        else:
            self._jobs.put((then, function, args))

    async def run(self, function: Callable[[Unpack[A]], T], *args: *A) -> T:
        """What the function gives. Cancelled, it is called all the same."""
        done: asyncio.Future[T] = self._loop.create_future()
        self.call(functools.partial(_settle, done), function, *args)
        return await done

    def close(self) -> None:
        """What has not begun fails, by OSError; what has goes on to its end."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[0](None, OSError(errno.ECANCELED, "closed"))
        for _ in range(self._count):
            self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            then, function, args = job
            result, error = None, None
            try:
                result = function(*args)
            except BaseException as raised:  # noqa: BLE001 - whatever it is, it is for the one who waits
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no one waits
                self._loop.call_soon_threadsafe(then, result, error)
            del job, then, function, args, result, error  # nothing is kept alive while there is nothing to do


def _settle(done: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if done.done():  # cancelled
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
