"""The console's rows of requests and of pods by themselves: phases, order, bounds."""

import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrelay.common.errors import Overloaded
from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.router.console.roll import GONE_SECONDS, MAX_ROWS, Roll
from kvrelay.router.console.timeline import KEPT, MAX_PLACES, NOBODY, NoTimeline, Record, Timeline
from kvrelay.router.job import GenerateInput, PreparedRequest, UsageEvent
from kvrelay.router.load import Report
from kvrelay.router.placement import Times

pytestmark = pytest.mark.unit

# Requests.


def prepared_at(arrival: float, request_id: str = "a") -> PreparedRequest:
    return PreparedRequest(
        input=GenerateInput(request_id=RequestId(request_id), model="m", prompt=(1, 2)),
        request=EngineRequest(request_id=RequestId("req-1"), prompt_token_ids=(1, 2), sampling=SamplingParams()),
        deadline=arrival + 60,
        arrival=arrival,
        created=0,
    )


def no_usage() -> UsageEvent:
    return UsageEvent(prompt_tokens=2, completion_tokens=0, cached_tokens=0)


def phases_of(record: Record, now: float) -> list[tuple[str, float]]:
    return list(record.row(now).phases)


def test_phases_over_attempts_follow_each_other() -> None:
    record = Timeline().begin(prepared_at(100.0), no_usage)
    assert phases_of(record, 100.5) == [("queue", 500.0)]
    first = Times("p0", "d0", 101.0)
    record.placed(first)
    assert phases_of(record, 101.25) == [("queue", 1000.0), ("prefill", 250.0)]
    first.computed = 102.0
    assert phases_of(record, 102.5)[1:] == [("prefill", 1000.0), ("push", 500.0)]
    first.decoding = 103.0
    assert phases_of(record, 104.0)[2:] == [("push", 1000.0), ("decode", 1000.0)]
    first.released = 105.0  # its decode pod died
    assert phases_of(record, 105.5)[3:] == [("decode", 2000.0), ("queue", 500.0)]
    record.placed(Times("", "d1", 106.0, computed=107.0))
    assert phases_of(record, 109.0) == [
        ("queue", 1000.0),
        ("prefill", 1000.0),
        ("push", 1000.0),
        ("decode", 2000.0),
        ("queue", 1000.0),
        ("prefill", 1000.0),
        ("decode", 2000.0),
    ]


def test_an_attempt_that_failed_early_ends_where_it_failed() -> None:
    record = Timeline().begin(prepared_at(100.0), no_usage)
    record.placed(Times("p0", "d0", 100.0, released=101.0))
    record.placed(Times("p1", "d0", 103.0))
    assert phases_of(record, 104.0) == [("queue", 0.0), ("prefill", 1000.0), ("queue", 2000.0), ("prefill", 1000.0)]


def test_what_is_kept_is_bounded() -> None:
    timeline = Timeline()
    records = [timeline.begin(prepared_at(time.monotonic()), no_usage) for _ in range(3 * KEPT)]
    for record in records[: 2 * KEPT]:
        record.ended("ok")
    assert [row.number for row in timeline.rows()] == list(range(3 * KEPT, 2 * KEPT, -1)), (
        "live ones first, the latest first"
    )
    for record in records[2 * KEPT :]:
        for _ in range(100):
            record.placed(Times("", "d0", 0.0, released=0.0))
        record.ended("ok")
    rows = timeline.rows()
    assert len(rows) == KEPT
    assert {row.attempts for row in rows} == {100}
    assert max(len(row.phases) for row in rows) <= 4 * MAX_PLACES
    assert len(msgspec.json.encode(rows)) < 400_000


def test_an_ended_request_lets_go_of_what_it_was_asked_for() -> None:
    timeline = Timeline()
    usage = UsageEvent(prompt_tokens=2, completion_tokens=7, cached_tokens=1)
    calls = 0

    def asked() -> UsageEvent:
        nonlocal calls
        calls += 1
        return usage

    record = timeline.begin(prepared_at(time.monotonic()), asked)
    record.ended(Overloaded("full").code)
    assert calls == 1
    for _ in range(3):
        [row] = timeline.rows()
    assert calls == 1
    assert (row.status, row.output_tokens, row.cached_tokens) == ("overloaded", 7, 1)


def test_nobody_keeps_nothing() -> None:
    timeline = NoTimeline()
    record = timeline.begin(prepared_at(0.0), no_usage)
    assert record is NOBODY
    record.placed(Times("", "d0", 0.0))
    record.ended("ok")
    assert timeline.rows() == []


# Pods.


def pod(name: str, state: str = "ready", role: str = "decode") -> Any:
    said = Report(credits=1, num_running=2, num_waiting=3, waiting_tokens=4, free_blocks=5, num_blocks=6)
    record = SimpleNamespace(pod_id=name, role=role, transport="tcp", num_blocks=6)
    return SimpleNamespace(record=record, state=state, load=SimpleNamespace(reported=said))


def test_gone_pods_are_forgotten_in_time_and_when_they_are_back() -> None:
    now = 0.0
    roll = Roll(clock=lambda: now)
    assert [row.state for row in roll.rows([pod("d0")])] == ["ready"]
    now = 5.0
    [row] = roll.rows([])
    assert (row.state, row.gone_seconds, row.running, row.num_blocks) == ("gone", 0, 0, 6)
    now = 65.0
    assert [row.gone_seconds for row in roll.rows([])] == [60]
    assert [row.state for row in roll.rows([pod("d0")])] == ["ready"]
    assert [row.gone_seconds for row in roll.rows([])] == [0], "this is another end"
    now = 65.0 + GONE_SECONDS
    assert roll.rows([]) == []


def test_of_two_lives_of_a_pod_the_one_that_answers_counts() -> None:
    for lives in ([pod("d0"), pod("d0", "unreachable")], [pod("d0", "unreachable"), pod("d0")]):
        assert [row.state for row in Roll().rows(lives)] == ["ready"]


def test_the_roll_is_in_order_and_bounded() -> None:
    roll = Roll()
    rows = roll.rows([pod("d10"), pod("d9"), pod("b0", role="both"), pod("p0", role="prefill")])
    assert [row.id for row in rows] == ["p0", "d9", "d10", "b0"]
    roll.rows([pod(f"d{number}") for number in range(3 * MAX_ROWS)])
    rows = roll.rows([pod(f"p{number}", role="prefill") for number in range(3 * MAX_ROWS)])
    assert [row.state for row in rows] == ["ready"] * MAX_ROWS + ["gone"] * MAX_ROWS
