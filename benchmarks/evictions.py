"""What each eviction policy makes of a trace: hits of one cache of a given size, by policy.

    python -m benchmarks.evictions --trace mooncake_conversation.jsonl --fractions 0.05,0.1,0.2,0.5 --out evictions.json

The trace is in Mooncake's format: one request a line, `hash_ids` being those of its prompt's blocks. A request asks for its blocks
in order; what is not there is stored. The policies' references, from the tests, are independent simulations of them: another
count of hits is a fault, and ends in an error.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.report import commit, machine
from kvrelay.kvstore.policy import make_policy
from tests.kvstore.caches import REFERENCES, Cache


class Line(msgspec.Struct):
    """Of a trace: what is of use here."""

    hash_ids: list[int]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy at one size."""

    policy: str
    fraction: float
    """Of the trace's distinct blocks."""
    capacity: int
    """Blocks."""
    hits: int
    reference_hits: int
    hit_rate: float
    """Of all blocks asked for."""
    microseconds: float
    """For each block asked for, the cache around the policy included."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.evictions", description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines with hash_ids")
    parser.add_argument("--fractions", default="0.05,0.1,0.2,0.5", help="of the distinct blocks, cached [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


def read(trace: Path) -> list[int]:
    """The blocks asked for, in order."""
    decoder = msgspec.json.Decoder(Line)
    return [block for line in decoder.decode_lines(trace.read_bytes()) for block in line.hash_ids]


def replay(policy: str, blocks: Sequence[int], fraction: float, capacity: int) -> Outcome:
    cache, reference = Cache(make_policy(policy, capacity), capacity), REFERENCES[policy](capacity)
    started = time.perf_counter()
    hits = sum(map(cache.request, blocks))
    seconds = time.perf_counter() - started
    return Outcome(
        policy=policy,
        fraction=fraction,
        capacity=capacity,
        hits=hits,
        reference_hits=sum(map(reference.request, blocks)),
        hit_rate=hits / len(blocks),
        microseconds=1e6 * seconds / len(blocks),
    )


def show(outcomes: Iterable[Outcome], infinite: float) -> Table:
    lru = {outcome.capacity: outcome.hits for outcome in outcomes if outcome.policy == "lru"}
    shown = Table(title=f"hits of blocks; an infinite cache has {infinite:.2%}")
    for heading in ("cache", "blocks", "policy", "hit rate", "hits", "reference", "to LRU", "µs"):
        shown.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for each in outcomes:
        ratio = each.hits / lru[each.capacity]
        counts = (str(each.hits), str(each.reference_hits))
        figures = (f"{each.hit_rate:.2%}", *counts, f"{ratio:.3f}", f"{each.microseconds:.1f}")
        shown.add_row(f"{each.fraction:.0%}", str(each.capacity), each.policy, *figures)
    return shown


def main() -> None:
    args = arguments()
    blocks = read(args.trace)
    distinct = len(set(blocks))
    infinite = 1 - distinct / len(blocks)
    sizes = {fraction: max(1, round(fraction * distinct)) for fraction in map(float, args.fractions.split(","))}
    outcomes = [replay(policy, blocks, *size) for size in sizes.items() for policy in REFERENCES]
    Console().print(show(outcomes, infinite))
    if args.out:
        options = {"trace": args.trace.name, "fractions": args.fractions}
        figures = {"blocks": len(blocks), "distinct": distinct, "infinite_hit_rate": infinite, "outcomes": outcomes}
        result = {"machine": machine(), "commit": commit(), "options": options, **figures}
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    if any(outcome.hits != outcome.reference_hits for outcome in outcomes):
        raise SystemExit("a policy is not what its reference is")


if __name__ == "__main__":
    main()
