"""One choice of a request is aborted: its blocks are free at once or after the step in flight, the others do not notice."""

from typing import Any

import pytest

from kvrelay.common.ids import RequestId
from kvrelay.common.request import ResumedChoice

pytestmark = pytest.mark.unit

A = RequestId("a")


def said(h: Any, choice: int) -> int:
    return sum(delta.choice == choice for delta in h.deltas)


@pytest.mark.parametrize("in_flight", [False, True])
def test_while_running(harness: Any, in_flight: bool) -> None:
    h = harness()
    request = h.request("a", 40, n=3, max_tokens=60)
    h.engine.add(request)
    for _ in range(20):
        h.step()
    before, free = said(h, 1), h.engine.inspect().free_blocks
    batch = h.engine.schedule() if in_flight else None
    h.engine.abort_choice(A, 1)
    h.check()
    assert (h.engine.inspect().free_blocks > free) is not in_flight
    if batch is not None:
        h.take(h.engine.update(batch, h.engine.launch(batch).result()))
        h.check()
        assert h.engine.inspect().free_blocks > free - 3
    h.run()
    assert said(h, 1) == before
    for choice in (0, 2):
        h.check_output(request, choice)
    h.check_empty()


@pytest.mark.parametrize("in_flight", [False, True])
def test_with_the_last_one_the_request_is_over(harness: Any, in_flight: bool) -> None:
    h = harness()
    h.engine.add(h.request("a", 40, n=2, max_tokens=60))
    for _ in range(3):
        h.step()
    batch = h.engine.schedule() if in_flight else None
    for choice in (0, 1, 1, 2, 7):
        h.engine.abort_choice(A, choice)
    assert A not in h.engine.request_ids
    if batch is not None:
        h.take(h.engine.update(batch, h.engine.launch(batch).result()))
    h.step()
    assert not h.finished
    assert h.notices[1:] == []
    h.check_empty()


def test_after_the_other_ended_by_itself(harness: Any) -> None:
    h = harness()
    request = h.request("a", 20, n=2, max_tokens=4, resume=(ResumedChoice(choice=0, token_ids=(1, 2)),))
    h.tokens[A, 0] = [1, 2]
    h.engine.reserve_local(request, 0)
    while (A, 0) not in h.finished:
        h.step()
    h.engine.abort_choice(A, 1)
    assert A not in h.engine.request_ids
    h.step()
    h.check_empty()


def test_before_the_choices_part(harness: Any) -> None:
    h = harness(max_num_batched_tokens=16)
    request = h.request("a", 40, n=3)
    h.engine.add(request)
    h.step()
    h.engine.abort_choice(A, 0)
    h.run()
    assert said(h, 0) <= 1
    for choice in (1, 2):
        h.check_output(request, choice)
    h.check_empty()


def test_before_the_transfer_came(harness: Any) -> None:
    h = harness()
    request = h.request("a", 40, n=3)
    reservation = h.engine.reserve(request, 1)
    h.engine.abort_choice(A, 0)
    h.deliver(reservation, request)
    h.check()
    h.run()
    assert said(h, 0) == 0
    for choice in (1, 2):
        h.check_output(request, choice)
    h.check_empty()


def test_all_before_the_transfer_came(harness: Any) -> None:
    h = harness()
    h.engine.reserve(h.request("a", 40, n=3, resume=(ResumedChoice(choice=2, token_ids=(1,), finished=True),)), 1)
    h.engine.abort_choice(A, 0)
    assert h.port.over == []
    h.engine.abort_choice(A, 1)
    assert h.port.over == ["a"]
    h.check_empty()


@pytest.mark.parametrize("resume", [(), (ResumedChoice(choice=1, token_ids=(3, 4)),)])
def test_before_the_prompt_is_computed_after_all(harness: Any, resume: tuple[ResumedChoice, ...]) -> None:
    h = harness()
    for choice in resume:
        h.tokens[A, choice.choice] = list(choice.token_ids)
    request = h.request("a", 40, n=3, resume=resume)
    h.engine.reserve(request, 1)
    h.engine.abort_choice(A, 0)
    h.engine.recompute(A)
    h.check()
    h.run()
    for choice in (1, 2):
        h.check_output(request, choice)
    assert (A, 0) not in h.finished
    assert h.kinds("a") == ["RecomputeStarted", "PromptComputed"]
    h.check_empty()


def test_a_push_keeps_what_all_its_choices_share(harness: Any) -> None:
    h = harness()
    h.engine.prefill(h.request("a", 40, n=2))
    h.engine.abort_choice(A, 0)
    h.run()
    h.engine.abort_choice(A, 0)
    assert h.engine.inspect().num_pushes == 1
    assert said(h, 0) == said(h, 1) == 1
    h.engine.push_done(A)
    h.check_empty()


def test_what_is_unknown_is_ignored(harness: Any) -> None:
    h = harness()
    request = h.request("a", 20, n=2)
    h.engine.add(request)
    h.engine.abort_choice(RequestId("b"), 0)
    h.engine.abort_choice(A, 2)
    h.run()
    h.check_output(request, 1)
    h.check_empty()
