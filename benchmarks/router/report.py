"""From bursts to figures and tables."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.router.floor import Floor
from benchmarks.router.load import Wrk
from benchmarks.router.stack import Cores

_REFERENCE = """
import time
begin = time.process_time()
found = {}
for number in range(100_000):
    found[number % 1000] = (number, str(number))
print(1000 * (time.process_time() - begin))
"""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """Before a round: what else the machine had to do. A figure is only as good as these are low."""

    load_average: float
    """Over the last minute."""
    reference_ms: float
    """Processor time of a fixed piece of Python on the router's core: other work makes it longer, through caches and the host."""

    @classmethod
    def now(cls, cores: Cores) -> "Surroundings":
        line = ["taskset", "-c", str(cores.router), sys.executable, "-c", _REFERENCE]
        told = subprocess.run(line, check=True, capture_output=True, timeout=60).stdout
        return cls(load_average=os.getloadavg()[0], reference_ms=float(told))


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Of one burst at full load. `*_share`: of a core. `tokens` are those sent to clients, by the router's own count."""

    requests_per_second: float
    tokens_per_second: float
    p50_ms: float
    p99_ms: float
    router_us_per_request: float
    router_us_per_token: float
    router_share: float
    pods_share: float
    requests: int
    tokens: int
    surroundings: Surroundings


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """To the first byte of a stream, as a client sees it: all that client, router and pods take together."""

    requests: int
    p50_ms: float
    p99_ms: float
    surroundings: Surroundings


def burst(told: Wrk, *, tokens: int, router_seconds: float, pods_seconds: float, surroundings: Surroundings) -> Burst:
    """Raises RuntimeError where a request failed: a refusal is answered faster than a request."""
    if told.refused or told.broken or not told.requests:
        raise RuntimeError(f"{told.refused} of {told.requests} requests were refused, {told.broken} broke")
    return Burst(
        requests_per_second=told.requests / told.seconds,
        tokens_per_second=tokens / told.seconds,
        p50_ms=told.p50_ms,
        p99_ms=told.p99_ms,
        router_us_per_request=1e6 * router_seconds / told.requests,
        router_us_per_token=1e6 * router_seconds / tokens,
        router_share=router_seconds / told.seconds,
        pods_share=pods_seconds / told.seconds,
        requests=told.requests,
        tokens=tokens,
        surroundings=surroundings,
    )


def best(rounds: Sequence[Burst]) -> Burst:
    return max(rounds, key=lambda each: each.requests_per_second)


def quickest(rounds: Sequence[Latency]) -> Latency:
    return min(rounds, key=lambda each: each.p50_ms)


def burst_table(bursts: Mapping[str, Sequence[Burst]]) -> Table:
    shown = _table("full load, best round; of the router µs of processor time; of router and pods the share of a core")
    for heading in (
        "case",
        "req/s",
        "tok/s",
        "p50 ms",
        "p99 ms",
        "µs/req",
        "µs/tok",
        "router",
        "pods",
        "rounds' req/s",
    ):
        shown.add_column(heading, no_wrap=True, justify="left" if heading == "case" else "right")
    for name, rounds in bursts.items():
        b = best(rounds)
        rates = (f"{b.requests_per_second:.0f}", f"{b.tokens_per_second:.0f}", f"{b.p50_ms:.1f}", f"{b.p99_ms:.1f}")
        costs = (f"{b.router_us_per_request:.0f}", f"{b.router_us_per_token:.1f}")
        shares = (f"{b.router_share:.0%}", f"{b.pods_share:.0%}")
        shown.add_row(
            name,
            *rates,
            *costs,
            *shares,
            " ".join(f"{each.requests_per_second:.0f}" for each in rounds),
            f"{b.surroundings.reference_ms:.0f} ms",
        )
    return shown


def latency_table(latencies: Mapping[str, Sequence[Latency]], rate: float) -> Table:
    shown = _table(f"{rate:.0f} requests a second, best round: to the first token, client and pods included")
    for heading in ("case", "p50 ms", "p99 ms", "rounds' p50"):
        shown.add_column(heading, no_wrap=True, justify="left" if heading == "case" else "right")
    for name, rounds in latencies.items():
        best = quickest(rounds)
        shown.add_row(
            name, f"{best.p50_ms:.2f}", f"{best.p99_ms:.2f}", " ".join(f"{each.p50_ms:.2f}" for each in rounds)
        )
    return shown


def lowest(rounds: Sequence[Floor]) -> Floor:
    return min(rounds, key=lambda each: each.reserve_us + each.prefill_us)


def floor_table(rounds: Sequence[Floor]) -> Table:
    shown = _table("µs of processor time on the router's core, best round: a request's parts without a router")
    for heading in ("Reserve", "Prefill", "tokenization", "rounds' sums", "first token, ms"):
        shown.add_column(heading, no_wrap=True, justify="right")
    best = lowest(rounds)
    sums = (f"{each.reserve_us + each.prefill_us + each.tokenize_us:.0f}" for each in rounds)
    costs = (f"{each:.0f}" for each in (best.reserve_us, best.prefill_us, best.tokenize_us))
    shown.add_row(*costs, " ".join(sums), f"{min(each.first_token_ms for each in rounds):.2f}")
    return shown


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD)
