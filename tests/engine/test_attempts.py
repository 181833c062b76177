"""Whatever an engine says of a request names the attempt that it says it for."""

from typing import Any

import pytest

from kvrelay.common.request import ResumedChoice

pytestmark = pytest.mark.unit


def attempts(h: Any) -> list[int]:
    return [delta.attempt for delta in h.deltas]


def test_transferred_first_tokens_and_what_follows(harness: Any) -> None:
    h = harness()
    request = h.request("a", 40, n=2)
    h.deliver(h.engine.reserve(request, 3), request)
    h.run()
    h.check_output(request, 0)
    assert len(h.deltas) == 16
    assert set(attempts(h)) == {3}


def test_a_step_in_flight_says_nothing_for_the_next_attempt(harness: Any) -> None:
    h = harness()
    request = h.request("a", 40, max_tokens=20)
    h.deliver(h.engine.reserve(request, 1), request)
    h.step()
    batch = h.engine.schedule()
    former = len(h.deltas)
    again = h.request("a", 40, max_tokens=20, resume=(ResumedChoice(choice=0, token_ids=tuple(h.output("a"))),))
    h.engine.reserve_local(again, 2)
    h.take(h.engine.update(batch, h.engine.run(batch)))
    h.run()
    h.check_output(again)
    assert attempts(h) == [1] * former + [2] * (20 - former)


def test_a_choice_that_is_complete_already(harness: Any) -> None:
    h = harness()
    request = h.request("a", 40, n=2, max_tokens=2, resume=(ResumedChoice(choice=1, token_ids=(5, 6)),))
    h.tokens[request.request_id, 1] = [5, 6]
    h.deliver(h.engine.reserve(request, 4), request)
    h.run()
    assert [delta.token_ids for delta in h.deltas if delta.choice == 1] == [()]
    assert set(attempts(h)) == {4}


def test_prefill_tokens_are_of_their_ticket_s_attempt(harness: Any) -> None:
    h = harness()
    h.engine.prefill(h.request("a", 40, n=2, resume=(ResumedChoice(choice=0, token_ids=(5, 6)),)), 2)
    h.run()
    assert attempts(h) == [2, 2]
