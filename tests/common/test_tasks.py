"""A task that loses a cancellation ends all the same."""

import asyncio
import contextlib
import logging

import pytest

from kvrelay.common.tasks import end_task, outlast

pytestmark = pytest.mark.unit


async def test_a_lost_cancellation_is_repeated() -> None:
    lost = 0

    async def stubborn() -> None:
        nonlocal lost
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            lost += 1
            if lost == 3:
                await asyncio.Event().wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end_task(task)
    assert task.cancelled()
    assert lost == 3


async def test_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> None:
        raise ValueError("why")

    with caplog.at_level(logging.ERROR):
        await end_task(asyncio.create_task(broken(), name="broken-one"))
        task = asyncio.create_task(broken(), name="broken-two")
        await asyncio.wait((task,))
        await end_task(task)
    assert "broken-two" in caplog.text


async def test_work_is_outlasted() -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(outlast(work))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not work.cancelled()
    work.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await outlast(work) == 1


async def test_work_that_fails_after_a_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(outlast(work))
    await asyncio.sleep(0)
    waiting.cancel()
    work.set_exception(ValueError("why"))
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await waiting
    assert "ValueError: why" in caplog.text
    with pytest.raises(ValueError, match="why"):
        await outlast(work)
