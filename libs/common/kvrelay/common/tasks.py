"""Ending tasks, and what they wait for, for certain."""

import asyncio
import logging
from typing import Final, TypeVar

log = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 0.1

T = TypeVar("T")


async def end_task(task: "asyncio.Task[object]") -> None:
    """Returns when the task has ended; what it ended with is logged where it was an error.

    It is cancelled until it ends: before Python 3.12 `asyncio.wait_for`, which redis-py sends its commands by, loses a
    cancellation that comes in the moment of its success.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=AGAIN_SECONDS)
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s failed", task.get_name(), exc_info=error)


async def outlast(work: "asyncio.Future[T]") -> T:
    """What `work` gives, which is waited for in any case: a cancellation is heeded when it has ended."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return work.result()
    if not work.cancelled() and (failure := work.exception()) is not None:
        log.error("work that was cancelled has failed", exc_info=failure)
    raise cancelled
