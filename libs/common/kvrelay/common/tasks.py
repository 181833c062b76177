"""Ending tasks for certain."""

import asyncio
import logging
from typing import Final

log = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 0.1


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
