"""How many pods of each kind keep a target, and what a number of pods can keep."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvrelay.cli.plan import pods
from kvrelay.cli.plan.demand import Request, faster, rate_of
from kvrelay.cli.plan.pods import Load
from kvrelay.cli.plan.profile import Profile

MOST_PODS = 4096
FASTEST = 1024.0
"""Times the rate that was given."""
_RATE_STEPS = 10
"""Halvings between a rate that is kept up with and twice that."""


class Target(NamedTuple):
    ttft: float
    """Seconds."""
    ttft_times: float
    """Of what the prompt takes alone on an idle pod: the later of both counts."""
    tpot: float
    """Seconds."""
    share: float
    """Of the requests that keep both."""

    def first_by(self, request: Request, profile: Profile) -> float:
        """Seconds after the arrival."""
        return max(self.ttft, self.ttft_times * profile.prefill_seconds(request.num_prompt, request.num_cached))


class Outcome(NamedTuple):
    """Of so many pods under a load."""

    num_prefill: int
    num_decode: int
    rate: float
    """Requests a second."""
    share: float
    """Of the requests that keep both targets."""
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    prefill_busy: float
    decode: Load

    @property
    def num_pods(self) -> int:
        return self.num_prefill + self.num_decode

    @property
    def goodput(self) -> float:
        """Requests a second that keep both targets."""
        return self.rate * self.share


def evaluate(
    requests: Sequence[Request], profile: Profile, target: Target, num_prefill: int, num_decode: int
) -> Outcome:
    computed, busy = pods.prefill(requests, profile, num_prefill)
    served, load = pods.decode(requests, computed, profile, num_decode)
    kept = sum(
        each.ttft <= target.first_by(request, profile) and each.tpot <= target.tpot
        for each, request in zip(served, requests, strict=True)
    )
    ttfts, tpots = (sorted(times) for times in zip(*served, strict=True))
    return Outcome(
        num_prefill,
        num_decode,
        rate_of(requests),
        kept / len(served),
        _quantile(ttfts, 0.5),
        _quantile(ttfts, 0.99),
        _quantile(tpots, 0.5),
        _quantile(tpots, 0.99),
        busy,
        load,
    )


def fewest(requests: Sequence[Request], profile: Profile, target: Target) -> Outcome:
    """The least pods that keep the target under the load. Raises ValueError where none do."""

    def in_time(num_prefill: int) -> bool:
        computed, _ = pods.prefill(requests, profile, num_prefill)
        kept = sum(
            end - request.arrival <= target.first_by(request, profile)
            for end, request in zip(computed, requests, strict=True)
        )
        return kept >= target.share * len(requests)

    least = _least(in_time, "the target for the first token cannot be kept: too many prompts take longer even alone")
    best = None
    for num_prefill in range(least, least + 3):  # more of them may spare a decode pod: first tokens come apart
        if best is not None and num_prefill + 1 >= best.num_pods:
            break
        found: dict[int, Outcome] = {}

        def keeps(num_decode: int, num_prefill: int = num_prefill, found: dict[int, Outcome] = found) -> bool:
            found[num_decode] = evaluate(requests, profile, target, num_prefill, num_decode)
            return found[num_decode].share >= target.share

        why = "the target for tokens after the first cannot be kept: a step takes longer even with few sequences"
        outcome = found[_least(keeps, why)]
        if best is None or outcome.num_pods < best.num_pods:
            best = outcome
    assert best is not None
    return best


def best_split(requests: Sequence[Request], profile: Profile, target: Target, num_pods: int) -> Outcome:
    """Of so many pods, the split with the highest goodput at a rate at which the target is kept: that rate's outcome.

    Raises ValueError for under two pods, and where no rate is low enough.
    """
    if num_pods < 2:
        raise ValueError("a prefill and a decode pod are two pods")
    outcomes = [
        outcome
        for num_prefill in range(1, num_pods)
        if (outcome := fastest(requests, profile, target, num_prefill, num_pods - num_prefill)) is not None
    ]
    if not outcomes:
        raise ValueError("the target cannot be kept at any rate")
    return max(outcomes, key=lambda outcome: outcome.goodput)


def fastest(
    requests: Sequence[Request], profile: Profile, target: Target, num_prefill: int, num_decode: int
) -> Outcome | None:
    """At the highest rate at which so many pods keep the target; None where they do at none."""

    def at(factor: float) -> Outcome | None:
        outcome = evaluate(faster(requests, factor), profile, target, num_prefill, num_decode)
        return outcome if outcome.share >= target.share else None

    factor = 1 / FASTEST
    best = at(factor)
    if best is None:
        return None
    while factor < FASTEST and (outcome := at(2 * factor)) is not None:
        factor, best = 2 * factor, outcome
    step = factor / 2
    for _ in range(_RATE_STEPS):
        if (outcome := at(factor + step)) is not None:
            factor, best = factor + step, outcome
        step /= 2
    return best


def _least(holds: Callable[[int], bool], why: str) -> int:
    """The least number from 1 on for which it holds, as for all above. Raises ValueError, `why`, where there is none."""
    high = 1
    while not holds(high):
        high *= 2
        if high > MOST_PODS:
            raise ValueError(why)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
