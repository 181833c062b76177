"""What waits for a request: in order, and tokens that follow each other together."""

import asyncio

import pytest

from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta, FinishReason, PositionLogprobs, TokenLogprob
from kvrelay.router.inbox import Inbox
from kvrelay.router.news import News, PushCompleted

pytestmark = pytest.mark.unit


def _delta(
    index: int, *tokens: int, choice: int = 0, attempt: int = 1, finish_reason: FinishReason | None = None
) -> ChoiceDelta:
    return ChoiceDelta(
        request_id=RequestId("r"),
        choice=choice,
        index=index,
        token_ids=tokens,
        logprobs=tuple(PositionLogprobs(TokenLogprob(token, -1.0, 1), ()) for token in tokens),
        finish_reason=finish_reason,
        stop_token_id=tokens[-1] if finish_reason is FinishReason.STOP else None,
        error="internal: x" if finish_reason is FinishReason.ERROR else "",
        attempt=attempt,
    )


async def _read(*items: News) -> list[News]:
    """All that a reader gets of them."""
    inbox = Inbox()
    for item in (*items, PushCompleted(99)):
        inbox.put(item)
    found: list[News] = []
    while (item := await inbox.get()) != PushCompleted(99):
        found.append(item)
    return found


async def test_tokens_that_follow_each_other_come_together() -> None:
    found = await _read(_delta(0, 5), _delta(1, 6, 7), _delta(3, 8, finish_reason=FinishReason.STOP))
    assert found == [_delta(0, 5, 6, 7, 8, finish_reason=FinishReason.STOP)]


@pytest.mark.parametrize(
    "second",
    [
        _delta(1, 6, choice=1),
        _delta(1, 6, attempt=2),
        _delta(2, 6),
        _delta(0, 5),
        _delta(1, finish_reason=FinishReason.ERROR),
        _delta(1, finish_reason=FinishReason.ABORT),
        PushCompleted(1),
    ],
    ids=["other choice", "other attempt", "gap", "again", "failure", "given up", "no tokens"],
)
async def test_what_does_not_follow_comes_by_itself(second: News) -> None:
    assert await _read(_delta(0, 5), second) == [_delta(0, 5), second]


async def test_nothing_follows_the_end_of_a_choice() -> None:
    end = _delta(0, 5, finish_reason=FinishReason.LENGTH)
    assert await _read(end, _delta(1, 6)) == [end, _delta(1, 6)]


async def test_a_reader_that_waits_is_told_once_for_all_that_came() -> None:
    inbox = Inbox()
    reading = asyncio.ensure_future(inbox.get())
    await asyncio.sleep(0)
    inbox.put(_delta(0, 5))
    inbox.put(_delta(1, 6))
    assert await reading == _delta(0, 5, 6)


async def test_a_reader_that_gave_up_takes_nothing_along() -> None:
    inbox = Inbox()
    reading = asyncio.ensure_future(inbox.get())
    await asyncio.sleep(0)
    reading.cancel()
    inbox.put(_delta(0, 5))
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await inbox.get() == _delta(0, 5)
