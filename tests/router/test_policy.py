"""Where requests go, on loads without pods; and how long a choice takes among a thousand."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from kvrelay.router.costs import Costs
from kvrelay.router.policies import PolicyName, make_policy
from kvrelay.router.policy import LeastLoaded, PodsView, RoundRobin, RouteRequest, Session
from kvrelay.router.prefixindex import PrefixIndex
from tests.router.loads import ROOMY, chosen, pod, view

pytestmark = pytest.mark.unit

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


def go(policy: LeastLoaded | RoundRobin | Session, ask: RouteRequest, pods: PodsView) -> tuple[str, str]:
    route = policy.choose(ask, pods)
    assert route is not None
    policy.placed(ask, route)
    return chosen(route)


def test_one_after_the_other() -> None:
    policy = RoundRobin(32)
    pods = view(pod("p0"), pod("p1"), pod("p2", waiting_tokens=900), pod("d0"), pod("d1", num_running=9))
    taken = [go(policy, ASK, pods) for _ in range(6)]
    assert taken == [("p0", "d0"), ("p1", "d1"), ("p2", "d0"), ("p0", "d1"), ("p1", "d0"), ("p2", "d1")]


def test_a_turn_that_is_not_taken_does_not_count() -> None:
    policy, pods = RoundRobin(32), view(pod("p0"), pod("p1"), pod("d0"))
    assert [chosen(policy.choose(ASK, pods))[0] for _ in range(3)] == ["p0"] * 3


def test_in_turn_around_a_full_pod_and_with_a_new_one() -> None:
    policy, p1 = RoundRobin(32), pod("p1", credits=0)
    p0, p2, d0 = pod("p0"), pod("p2"), pod("d0")
    pods = view(p0, p1, p2, d0)
    assert [go(policy, ASK, pods)[0] for _ in range(3)] == ["p0", "p2", "p0"]
    p1.report(ROOMY)
    assert go(policy, ASK, pods)[0] == "p1"
    assert go(policy, ASK, view(p0, p1, p2, pod("p3"), d0))[0] == "p3"


def test_a_session_stays_where_it_is() -> None:
    policy = Session(32)
    prefill, decode = [pod(f"p{i}") for i in range(8)], [pod(f"d{i}") for i in range(8)]
    asks = [RouteRequest(100, session=f"session {i}") for i in range(400)]
    before = [go(policy, ask, view(*prefill, *decode)) for ask in asks]
    assert before == [go(policy, ask, view(*prefill, *decode)) for ask in asks]
    share = [sum(place[0] == load.pod_id for place in before) for load in prefill]
    assert min(share) >= 25, share  # 50 each, more or less
    # Only the sessions of the pod that is gone move.
    after = [go(policy, ask, view(*prefill[1:], *decode)) for ask in asks]
    assert all(a == b for a, b in zip(after, before, strict=True) if b[0] != "p0")
    assert all(a[0] != "p0" for a in after)


def test_a_session_whose_pod_is_full_goes_on_elsewhere_and_comes_back() -> None:
    policy, loads = Session(32), [pod(f"p{i}") for i in range(4)]
    pods, ask = view(*loads, pod("d0")), RouteRequest(100, session="mine")
    home = next(load for load in loads if load.pod_id == go(policy, ask, pods)[0])
    home.refused()
    assert go(policy, ask, pods)[0] not in ("", home.pod_id)
    home.report(ROOMY)
    assert go(policy, ask, pods)[0] == home.pod_id


def test_without_a_session_load_decides() -> None:
    assert go(Session(32), ASK, view(pod("p0", waiting_tokens=5), pod("p1"), pod("d0")))[0] == "p1"


def test_policies_have_names() -> None:
    made = {name: make_policy(name, 32, PrefixIndex(), Costs()) for name in get_args(PolicyName)}
    assert {name: type(policy).__name__ for name, policy in made.items()} == {
        "least_loaded": "LeastLoaded",
        "round_robin": "RoundRobin",
        "prefix_aware": "PrefixAware",
        "session": "Session",
    }


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
