"""The simulator on traces whose outcome is known."""

import itertools
import random
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from benchmarks.sim.__main__ import PROFILES
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.outcome import Outcome, capacity, measure
from benchmarks.sim.pods import read_profile
from benchmarks.sim.trace import BLOCK, Line, infinite_hit_rate, read, requests
from kvrelay.router.policies import PolicyName
from kvrelay.router.settings import RouterSettings

pytestmark = pytest.mark.unit

PROFILE = read_profile(PROFILES / "h200-8b.json")


def chat(first: int, turns: int, start: float, pause: float) -> list[Line]:
    """Each turn's prompt is two blocks longer than the one before; block 0 is everyone's."""
    return [
        Line(
            timestamp=start + turn * pause,
            input_length=(3 + 2 * turn) * BLOCK,
            output_length=50,
            hash_ids=[0, *range(first, first + 2 + 2 * turn)],
        )
        for turn in range(turns)
    ]


CHATS = sorted(
    (line for number in range(8) for line in chat(1 + 100 * number, 10, 700.0 * number, 9_000.0)),
    key=lambda line: line.timestamp,
)


def run(policy: PolicyName, num_pods: int, blocks: int | None = None, rate: float = 1.0, copies: int = 1) -> Outcome:
    arriving = requests(CHATS, copies=copies, rate=rate)
    return measure(policy, Cluster(num_pods, policy, PROFILE, capacity=blocks), arriving, PROFILE, rate, None)


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in reversed(CHATS)))
    assert [line.timestamp for line in read(path)] == [line.timestamp for line in CHATS]
    assert len(read(path, limit=5)) == 5


def test_one_request_takes_what_the_profile_says() -> None:
    (request,) = requests(CHATS[:1], copies=1, rate=1.0)
    Cluster(1, "least_loaded", PROFILE, capacity=None).run([request])
    assert request.first_token - request.arrival == pytest.approx(PROFILE.prefill_seconds(3 * BLOCK, 0))


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_one_pod_with_endless_memory_is_the_shared_cache(policy: PolicyName) -> None:
    outcome = run(policy, 1)
    assert outcome.hit_rate == pytest.approx(infinite_hit_rate(CHATS))
    assert outcome.load_max_to_mean == 1.0


def test_chats_find_their_pod() -> None:
    best = infinite_hit_rate(CHATS)
    assert run("prefix_aware", 3).hit_rate > 0.95 * best
    assert run("round_robin", 3).hit_rate < 0.9 * best


@pytest.mark.parametrize("events", [True, False])
def test_it_balances_without_reports(events: bool) -> None:
    """By what the router itself has sent."""
    arriving = requests(CHATS, copies=8, rate=10.0)
    cluster = Cluster(8, "prefix_aware", PROFILE, capacity=None, reports=False, events=events)
    outcome = measure("prefix_aware", cluster, arriving, PROFILE, 10.0, None)
    assert outcome.load_max_to_mean < 1.3
    assert outcome.ttft_p99 < 0.5


def unlike(count: int, rng: random.Random) -> list[Line]:
    """Prompts of very different lengths, ten a second, that share nothing."""
    lengths = [min(200, max(1, int(rng.lognormvariate(2.2, 1.0)))) for _ in range(count)]
    starts = itertools.accumulate(lengths, initial=0)
    return [
        Line(timestamp=100.0 * i, input_length=n * BLOCK, output_length=50, hash_ids=[*range(start, start + n)])
        for i, (n, start) in enumerate(zip(lengths, starts, strict=False))
    ]


@pytest.mark.parametrize("reports", [True, False])
def test_the_default_without_kv_events_is_as_good_as_the_least_loaded(reports: bool) -> None:
    """At five sixths of what the pods can do: by load alone, since nothing is heard of what pods have."""
    default: PolicyName = RouterSettings.model_fields["policy"].default
    assert default == "prefix_aware"
    lines = unlike(600, random.Random(1))
    blind = Cluster(8, default, PROFILE, capacity=None, reports=reports, events=False)
    for pod in blind.prefill:
        blind._index.remove_pod(pod.load.pod_id)
    known = Cluster(8, "least_loaded", PROFILE, capacity=None)
    outcome = measure(default, blind, requests(lines, copies=1, rate=3.0), PROFILE, 3.0, None)
    least = measure("least_loaded", known, requests(lines, copies=1, rate=3.0), PROFILE, 3.0, None)
    assert outcome.utilization > 0.8
    assert outcome.ttft_mean <= least.ttft_mean
    assert outcome.ttft_p99 <= 1.05 * least.ttft_p99  # the sixth longest of 600 waits
    assert outcome.load_max_to_mean <= least.load_max_to_mean


def test_a_small_cache_forgets() -> None:
    assert run("prefix_aware", 2, blocks=20).hit_rate < 0.5 * run("prefix_aware", 2).hit_rate


def test_copies_share_nothing() -> None:
    one, two = run("prefix_aware", 1), run("prefix_aware", 1, copies=2)
    assert two.hit_rate == pytest.approx(one.hit_rate)


def test_all_are_answered_whatever_the_rate() -> None:
    outcome = run("least_loaded", 2, rate=1_000.0)
    assert 0 < outcome.answered_in_time < 1
    assert outcome.ttft_p99 < float("inf")


@pytest.mark.parametrize("guess", [0.1, 3.0, 80.0])
def test_the_capacity_is_found_from_any_guess(guess: float) -> None:
    assert capacity(lambda rate: rate <= 3.3, guess) == pytest.approx(3.3, rel=0.02)
