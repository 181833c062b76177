"""What a simulation came to, and the rate that a policy keeps up with."""

from collections.abc import Callable, Sequence

import msgspec
from rich.table import Table

from benchmarks.report import percentile
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.pods import Profile
from benchmarks.sim.trace import Request

KEEPS_UP = 0.95
"""Of the requests have their first token when the last one arrives, at a rate that pods keep up with."""
TARGET_SECONDS = 2.0
TARGET_TIMES = 2.0
"""A request's target for its first token: so many seconds, and so many times what its prompt takes on an idle pod without a cache."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy at one rate. Times in seconds."""

    policy: str
    pods: int
    rate: float
    """Times the recorded one."""
    rate_share: float | None
    """Of round_robin's capacity."""
    hit_rate: float
    """Share of prompt tokens that were not computed."""
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    load_max_to_mean: float
    """Of the tokens that each prefill pod computed."""
    utilization: float
    """Of the prefill pods, until the last first token."""
    target_attainment: float
    """Share of requests whose first token met its target."""
    answered_in_time: float
    """Share of requests whose first token came before the last arrival."""


def measure(
    policy: str, cluster: Cluster, requests: Sequence[Request], profile: Profile, rate: float, rate_share: float | None
) -> Outcome:
    """Runs the cluster."""
    cluster.run(requests)
    times = [request.first_token - request.arrival for request in requests]
    computed = [pod.computed_tokens for pod in cluster.prefill]
    targets = [TARGET_SECONDS + TARGET_TIMES * profile.prefill_seconds(request.num_prompt, 0) for request in requests]
    last_arrival = max(request.arrival for request in requests)
    end = max(request.first_token for request in requests)
    return Outcome(
        policy=policy,
        pods=len(computed),
        rate=rate,
        rate_share=rate_share,
        hit_rate=sum(request.num_cached for request in requests) / sum(request.num_prompt for request in requests),
        ttft_mean=sum(times) / len(times),
        ttft_p50=percentile(times, 0.5) or 0.0,
        ttft_p99=percentile(times, 0.99) or 0.0,
        load_max_to_mean=max(computed) * len(computed) / sum(computed),
        utilization=sum(pod.busy_seconds for pod in cluster.prefill) / len(computed) / end,
        target_attainment=sum(time <= target for time, target in zip(times, targets, strict=True)) / len(times),
        answered_in_time=sum(request.first_token <= last_arrival for request in requests) / len(requests),
    )


def capacity(keeps_up: Callable[[float], bool], guess: float, steps: int = 6) -> float:
    """The highest rate that is kept up with, by bisection, to a hundredth part or so."""
    low, high = guess * 0.7, guess * 1.4
    while not keeps_up(low):
        low, high = low * 0.7, low
    while keeps_up(high):
        low, high = high, high * 1.4
    for _ in range(steps):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def table(outcomes: Sequence[Outcome], title: str) -> Table:
    shown = Table(title=title)
    headings = ("pods", "rate", "of RR's", "policy", "hits", "TTFT mean", "p50", "p99", "max/mean", "busy", "in target")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for each in outcomes:
        shown.add_row(
            str(each.pods),
            f"{each.rate:.2f}",
            "" if each.rate_share is None else f"{each.rate_share:.0%}",
            each.policy,
            f"{each.hit_rate:.2%}",
            *(f"{value:.2f}" for value in (each.ttft_mean, each.ttft_p50, each.ttft_p99, each.load_max_to_mean)),
            f"{each.utilization:.0%}",
            f"{each.target_attainment:.1%}",
        )
    return shown
