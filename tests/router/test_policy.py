"""Where requests go, on loads without pods; and how long a choice takes among a thousand."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrelay.common.ids import Epoch, PodId
from kvrelay.router.load import Load, Report
from kvrelay.router.policy import LeastLoaded, PodsView, Route, RouteRequest

pytestmark = pytest.mark.unit

ROOMY = Report(credits=64, num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=1000, num_blocks=1000)


def pod(name: str, *, group: int = 0, both: bool = False, **report: int) -> Load:
    load = Load(PodId(name), Epoch(name), block_size=16, group=group, self_sufficient=both)
    values = {field: report.get(field, getattr(ROOMY, field)) for field in Report.__dataclass_fields__}
    load.report(Report(**values))
    return load


def view(*loads: Load) -> PodsView:
    """Names of prefill pods begin with p."""
    prefill: dict[int, list[Load]] = {}
    for load in loads:
        if load.pod_id.startswith("p"):
            prefill.setdefault(load.group, []).append(load)
    return PodsView([load for load in loads if not load.pod_id.startswith("p")], prefill)


def chosen(route: Route | None) -> tuple[str, str]:
    assert route is not None
    return (route.prefill.pod_id if route.prefill else "", route.decode.pod_id)


ASK = RouteRequest(num_prompt_tokens=100)


def test_fewest_requests_and_fewest_tokens_to_compute() -> None:
    pods = view(
        pod("p0", waiting_tokens=500),
        pod("p1", waiting_tokens=100),
        pod("d0", num_running=3),
        pod("d1", num_running=1, num_waiting=1),
    )
    assert chosen(LeastLoaded(32).choose(ASK, pods)) == ("p1", "d1")


def test_of_equal_decode_pods_the_emptier_one() -> None:
    pods = view(pod("d0", free_blocks=400), pod("d1", free_blocks=900))
    assert chosen(LeastLoaded(32).choose(ASK, pods)) == ("", "d1")


def test_own_requests_count_before_the_pod_reports_them() -> None:
    busy, idle = pod("d0"), pod("d1")
    busy.begin(100, 100)
    assert chosen(LeastLoaded(32).choose(ASK, view(busy, idle))) == ("", "d1")
    busy.report(ROOMY)  # the report may be older than what was begun: it still counts
    assert busy.decode_score >= 1
    busy.computed(100, 100)
    busy.end(100)
    assert busy.decode_score == idle.decode_score


def test_waits_without_room_or_credit() -> None:
    assert LeastLoaded(32).choose(ASK, view(pod("d0", free_blocks=6))) is None
    assert LeastLoaded(32).choose(ASK, view(pod("d0", credits=0))) is None
    assert LeastLoaded(32).choose(ASK, view(pod("p0", credits=0), pod("d0"))) is None
    assert LeastLoaded(32).choose(ASK, view()) is None


def test_a_refusal_counts_until_the_next_report() -> None:
    refusing = pod("d0")
    refusing.refused()
    assert LeastLoaded(32).choose(ASK, view(refusing)) is None
    refusing.report(ROOMY)
    assert chosen(LeastLoaded(32).choose(ASK, view(refusing))) == ("", "d0")


def test_what_is_larger_than_any_pod_takes_an_empty_one() -> None:
    """Its prompt fits, all its choices together do not: it must not wait for ever, with all others behind it."""
    small, large = pod("d0", free_blocks=10, num_blocks=10), pod("d1", free_blocks=19, num_blocks=20)
    ask, policy = RouteRequest(num_prompt_tokens=300, num_choices=128), LeastLoaded(1000)
    assert policy.choose(ask, view(small, large)) is None
    large.report(replace(ROOMY, free_blocks=20, num_blocks=20))
    assert chosen(policy.choose(ask, view(small, large))) == ("", "d1")


def test_when_the_decode_pod_computes_the_prompt() -> None:
    policy = LeastLoaded(32)
    both = view(pod("p0"), pod("d0"))
    assert chosen(policy.choose(RouteRequest(num_prompt_tokens=31), both)) == ("", "d0")
    assert chosen(policy.choose(RouteRequest(num_prompt_tokens=32), both)) == ("p0", "d0")
    assert chosen(LeastLoaded(0).choose(RouteRequest(num_prompt_tokens=1), both)) == ("p0", "d0")
    assert chosen(policy.choose(ASK, view(pod("p0"), pod("b0", both=True)))) == ("", "b0")
    assert chosen(policy.choose(ASK, view(pod("p0", group=1), pod("d0")))) == ("", "d0")


def test_failed_pods_come_last() -> None:
    p0, p1, d0, d1 = pod("p0"), pod("p1"), pod("d0"), pod("d1")
    policy, pods = LeastLoaded(32), view(p0, p1, d0, d1)
    assert chosen(policy.choose(RouteRequest(100, excluded=frozenset({p0, d0})), pods)) == ("p1", "d1")
    assert chosen(policy.choose(RouteRequest(100, excluded=frozenset({p0, p1, d0, d1})), pods)) == ("", "d0")
    assert chosen(policy.choose(RouteRequest(100, decode=d1), pods)) == ("p0", "d1")


def test_a_later_attempt_stays_with_its_model() -> None:
    pods = view(pod("d0"), pod("d1", group=1, num_running=9), pod("p1", group=1))
    assert chosen(LeastLoaded(32).choose(RouteRequest(100, group=1), pods)) == ("p1", "d1")


def test_a_thousand_pods(record_property: Callable[[str, object], None]) -> None:
    pods = view(*(pod(f"p{i}", waiting_tokens=i * 7 % 501) for i in range(500)), *(pod(f"d{i}") for i in range(500)))
    policy = LeastLoaded(32)
    begin = time.perf_counter()
    for _ in range(100):
        route = policy.choose(ASK, pods)
        assert route is not None
        assert route.prefill is not None
        route.decode.begin(0, 101)
        route.prefill.begin(100, 100)
    record_property("microseconds_per_choice", (time.perf_counter() - begin) * 1e4)
    print("microseconds a choice:", (time.perf_counter() - begin) * 1e4)
    assert sum(load.decode_score >= 1 for load in pods.decode) == 100  # spread: none was taken twice
