"""Whatever an engine says of a request names the attempt that it says it for."""

from typing import Any

import pytest

from kvrelay.common.errors import InvalidRequest, NoCapacity
from kvrelay.common.ids import RequestId
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
    h.take(h.engine.update(batch, h.engine.launch(batch).result()))
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


def test_a_higher_attempt_ends_the_former_push(harness: Any) -> None:
    h = harness()
    request = h.request("a", 40)
    h.engine.prefill(request, 1)
    with pytest.raises(InvalidRequest):
        h.engine.prefill(request, 1)
    with pytest.raises(NoCapacity):
        h.engine.prefill(request, 2)
    assert h.port.aborted == [request.request_id]
    h.engine.push_done(request.request_id)
    h.engine.prefill(request, 2)
    h.run()
    assert attempts(h) == [2]


def test_a_renewed_reservation_waits_for_what_it_says(harness: Any) -> None:
    h = harness()
    h.engine.reserve(h.request("a", 40, n=2), 1)
    h.engine.abort_choice(RequestId("a"), 1)
    again = h.request("a", 40, n=2, resume=(ResumedChoice(choice=0, token_ids=(5,), finished=True),))
    h.deliver(h.engine.reserve(again, 2), again)
    h.run()
    h.check_output(again, 1)
    h.check_empty()
