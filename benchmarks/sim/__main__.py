"""Replays a trace through the router's policies and index, against simulated pods, in virtual time.

    python -m benchmarks.sim --trace mooncake_conversation.jsonl --pods 8,64 --rate-share 0.7,0.9 --out sim.json

The trace is in Mooncake's format: one request a line, with arrival, lengths and the ids of its prompt's blocks of 512 tokens. Rates
are shares of round_robin's capacity: the highest rate at which 95% of the requests have their first token when the last one
arrives, found by bisection, with the same pods and caches.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console

from benchmarks.report import commit, machine
from benchmarks.sim.cluster import Cluster
from benchmarks.sim.outcome import KEEPS_UP, Outcome, capacity, measure, table
from benchmarks.sim.pods import Profile, read_profile
from benchmarks.sim.trace import Line, infinite_hit_rate, read, requests
from kvrelay.router.policies import PolicyName

PROFILES = Path(__file__).parent / "profiles"
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines in Mooncake's format")
    parser.add_argument("--limit", type=int, help="requests of the trace that are used; default all")
    parser.add_argument("--pods", default="8", help="prefill pods [%(default)s]")
    parser.add_argument("--policy", default=",".join(POLICIES), help="[%(default)s]")
    parser.add_argument(
        "--cache-share", default="0.1", help="of the distinct blocks, in each pod's cache; or unlimited [%(default)s]"
    )
    parser.add_argument("--rate-share", default="0.7,0.9", help="of round_robin's capacity [%(default)s]")
    parser.add_argument("--rate", type=float, help="times the recorded rate, in place of shares of a capacity")
    parser.add_argument(
        "--copies", type=int, default=1, help="of the trace, side by side, sharing nothing [%(default)s]"
    )
    parser.add_argument("--no-reports", action="store_true", help="of load, from pods to the router")
    parser.add_argument("--no-events", action="store_true", help="of blocks, from pods to the router")
    parser.add_argument("--profile", default="h200-8b", help="of profiles/, what pods cost [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


class Experiment:
    """One trace, one kind of pod, one size of caches."""

    def __init__(
        self,
        lines: Sequence[Line],
        profile: Profile,
        cache_share: float | None,
        copies: int,
        *,
        reports: bool,
        events: bool,
    ) -> None:
        self._lines = lines
        self._reports = reports
        self._events = events
        self._profile = profile
        self._copies = copies
        distinct = len({block for line in lines for block in line.hash_ids})
        self._capacity = None if cache_share is None else max(1, round(cache_share * distinct))

    def run(self, policy: PolicyName, num_pods: int, rate: float, rate_share: float | None = None) -> Outcome:
        cluster = Cluster(
            num_pods, policy, self._profile, capacity=self._capacity, reports=self._reports, events=self._events
        )
        arriving = requests(self._lines, copies=self._copies, rate=rate)
        return measure(policy, cluster, arriving, self._profile, rate, rate_share)

    def capacity(self, num_pods: int) -> float:
        """Of round_robin."""
        seconds = sum(self._profile.prefill_seconds(line.input_length, 0) for line in self._lines) * self._copies
        span = (self._lines[-1].timestamp - self._lines[0].timestamp) / 1000
        return capacity(
            lambda rate: self.run("round_robin", num_pods, rate).answered_in_time >= KEEPS_UP,
            num_pods * span / seconds,
        )


def main() -> None:
    args = arguments()
    lines = read(args.trace, args.limit)
    share = None if args.cache_share == "unlimited" else float(args.cache_share)
    experiment = Experiment(
        lines,
        read_profile(PROFILES / f"{args.profile}.json"),
        share,
        args.copies,
        reports=not args.no_reports,
        events=not args.no_events,
    )
    best = infinite_hit_rate(lines)
    outcomes: list[Outcome] = []
    capacities: dict[int, float] = {}
    console = Console(width=150)
    for num_pods in map(int, args.pods.split(",")):
        if args.rate is None:
            capacities[num_pods] = experiment.capacity(num_pods)
            shares = [float(value) for value in args.rate_share.split(",")]
            rates = [(value * capacities[num_pods], value) for value in shares]
        else:
            rates = [(args.rate, None)]
        for rate, rate_share in rates:
            for policy in args.policy.split(","):
                began = time.perf_counter()
                outcomes.append(experiment.run(policy, num_pods, rate, rate_share))
                console.print(f"{num_pods} pods, {policy}: simulated in {time.perf_counter() - began:.0f} s")
    console.print(
        table(outcomes, f"cache: {args.cache_share} of the distinct blocks; infinite shared cache: {best:.2%}")
    )
    if args.out:
        options = {name: str(value) for name, value in vars(args).items() if name not in ("out", "trace")}
        result = {
            "machine": machine(),
            "commit": commit(),
            "options": {"trace": args.trace.name, **options},
            "requests": len(lines) * args.copies,
            "infinite_hit_rate": best,
            "round_robin_capacity": capacities,
            "outcomes": outcomes,
        }
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
