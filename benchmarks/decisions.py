"""What routing costs a router: a prefix-aware decision among many pods, hashing a prompt, and taking in KV events.

    python -m benchmarks.decisions --pods 1000 --blocks 10000000 --out decisions.json

Half of the pods prefill, half decode. Each holds its share of the blocks: conversations of 250 spans (4,000 tokens), which all begin
with the same 32 spans; they lie on one prefill and one decode pod each. Prompts end where a conversation ends, in its middle, or after
the common spans. A decision is `choose`, ids given; accounting is what follows it: `placed`, and the claims on both loads. Events are
MessagePack as pods write them, 32 blocks a batch, one batch removed for each that is stored. Times are the thread's
own on its core: what else runs on the machine does not count.
"""

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.report import commit, machine, percentile
from kvrelay.common.blocks import SPAN, BlockHasher
from kvrelay.common.ids import BlockId, Epoch, Fingerprint, PodId
from kvrelay.common.kvevents import BlockRemoved, BlockStored, EventBatch
from kvrelay.router.costs import Costs
from kvrelay.router.load import Load, Report
from kvrelay.router.policy import PodsView, RouteRequest
from kvrelay.router.prefixaware import PrefixAware
from kvrelay.router.prefixindex import PrefixIndex

CONVERSATION = 250
COMMON = 32
BATCH = 32
MODEL = Fingerprint("model")
GROUP = 0


class Prompt:
    def __init__(self, ids: Sequence[BlockId]) -> None:
        self._ids = ids

    def ids(self, fingerprint: Fingerprint) -> Sequence[BlockId]:
        return self._ids


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds."""

    p50: float
    p99: float
    mean: float


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.decisions", description=__doc__.partition("\n")[0])
    parser.add_argument("--pods", type=int, default=1000, help="[%(default)s]")
    parser.add_argument("--blocks", type=int, default=10_000_000, help="that they hold together [%(default)s]")
    parser.add_argument("--decisions", type=int, default=3000, help="of each kind [%(default)s]")
    parser.add_argument("--events", type=int, default=200_000, help="blocks stored, and as many removed [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


def random_ids(count: int) -> list[BlockId]:
    data = os.urandom(16 * count)
    return [BlockId(data[at : at + 16]) for at in range(0, len(data), 16)]


class Cluster:
    """An index full of conversations, and idle pods."""

    def __init__(self, num_pods: int, num_blocks: int) -> None:
        self.index = PrefixIndex()
        self.policy = PrefixAware(32, self.index, Costs())
        self.common = random_ids(COMMON)
        half = num_pods // 2
        self.prefill = [self._pod(f"p{i}") for i in range(half)]
        self.decode = [self._pod(f"d{i}") for i in range(num_pods - half)]
        self.view = PodsView(self.decode, {GROUP: self.prefill})
        self.conversations: list[list[BlockId]] = []
        each = num_blocks // num_pods - COMMON
        for prefill, decode in zip(self.prefill, self.decode, strict=False):
            keys = random_ids(each)
            for pod in (prefill, decode):
                self.index.stored(pod.pod_id, self.common)
                self.index.stored(pod.pod_id, keys)
            # A few suffice.
            own = CONVERSATION - COMMON
            self.conversations += [keys[at : at + own] for at in range(0, min(each, 2 * own) - own + 1, own)]

    def _pod(self, name: str) -> Load:
        load = Load(PodId(name), Epoch(name), block_size=SPAN, fingerprint=MODEL)
        load.report(
            Report(
                credits=1000, num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=1 << 20, num_blocks=1 << 20
            )
        )
        self.index.add_pod(name, SPAN)
        return load

    def prompt(self, num_known: int) -> Prompt:
        """Of 250 spans, the first `num_known` of which some pods have."""
        known = self.common + random.choice(self.conversations)
        return Prompt(known[:num_known] + random_ids(CONVERSATION - num_known))


def timing(seconds: Sequence[float]) -> Timing:
    micro = [1e6 * value for value in seconds]
    return Timing(p50=percentile(micro, 0.5) or 0.0, p99=percentile(micro, 0.99) or 0.0, mean=sum(micro) / len(micro))


def measured(work: Callable[[], None], seconds: list[float]) -> None:
    began = time.thread_time()
    work()
    seconds.append(time.thread_time() - began)


def decide(cluster: Cluster, num_known: int, count: int) -> tuple[Timing, Timing]:
    """Of decisions, and of the accounting after each."""
    choosing: list[float] = []
    accounting: list[float] = []
    for _ in range(count):
        request = RouteRequest(CONVERSATION * SPAN + 7, prompt=cluster.prompt(num_known))
        began = time.thread_time()
        route = cluster.policy.choose(request, cluster.view)
        chosen = time.thread_time()
        assert route is not None
        cluster.policy.placed(request, route)
        rest = request.num_prompt_tokens - route.num_cached_tokens
        route.decode.begin(0 if route.prefill else rest, request.num_prompt_tokens, route.seconds)
        if route.prefill is not None:
            route.prefill.begin(rest, request.num_prompt_tokens, route.seconds)
        accounting.append(time.thread_time() - chosen)
        choosing.append(chosen - began)
        # It is over at once: pods stay as idle as they were.
        for load, tokens in ((route.prefill, rest), (route.decode, 0 if route.prefill else rest)):
            if load is not None:
                load.computed(tokens, request.num_prompt_tokens, route.seconds)
                load.end(request.num_prompt_tokens)
    return timing(choosing), timing(accounting)


def hashing(num_tokens: int) -> Timing:
    tokens = [random.randrange(32_000) for _ in range(num_tokens)]
    seconds: list[float] = []
    for _ in range(50):
        measured(lambda: BlockHasher(MODEL).extend([], tokens), seconds)
    return timing(seconds)


def take_in(cluster: Cluster, num_blocks: int) -> float:
    """Blocks stored and removed a second, on one core."""
    batches = []
    pods = cluster.prefill + cluster.decode
    for sequence in range(num_blocks // BATCH):
        keys = tuple(random_ids(BATCH))
        stored = BlockStored(parent=keys[0], keys=keys, token_ids=tuple(range(BATCH * SPAN)), block_size=SPAN)
        events = (stored, BlockRemoved(keys=keys))
        batch = EventBatch(epoch=Epoch("e"), sequence=sequence, time=0.0, events=events)
        batches.append((random.choice(pods).pod_id, msgspec.msgpack.encode(batch)))
    decoder = msgspec.msgpack.Decoder(EventBatch)
    began = time.thread_time()
    for pod_id, data in batches:
        for event in decoder.decode(data).events:
            if isinstance(event, BlockStored):
                cluster.index.stored(pod_id, event.keys)
            elif isinstance(event, BlockRemoved):
                cluster.index.removed(pod_id, event.keys)
    return 2 * len(batches) * BATCH / (time.thread_time() - began)


def main() -> None:
    args = arguments()
    process = psutil.Process()
    before = process.memory_info().rss
    began = time.thread_time()
    cluster = Cluster(args.pods, args.blocks)
    filled = time.thread_time() - began
    collection: list[float] = []
    measured(lambda: gc.collect() and None, collection)
    kinds = {"cold": 0, "common": COMMON, "half": CONVERSATION // 2, "whole": CONVERSATION}
    decide(cluster, COMMON, 100)
    decisions = {name: decide(cluster, known, args.decisions) for name, known in kinds.items()}
    rate = take_in(cluster, args.events)
    seconds: list[float] = []
    measured(lambda: cluster.index.clear(cluster.prefill[0].pod_id), seconds)
    result = {
        "machine": machine(),
        "commit": commit(),
        "options": {"pods": args.pods, "blocks": args.blocks, "decisions": args.decisions, "events": args.events},
        "blocks": len(cluster.index),
        "bytes_a_block": (process.memory_info().rss - before) / len(cluster.index),
        "fill_seconds": filled,
        "full_collection_ms": 1e3 * collection[0],
        "decision_us": {name: choosing for name, (choosing, _) in decisions.items()},
        "accounting_us": {name: accounting for name, (_, accounting) in decisions.items()},
        "hash_4000_tokens_us": hashing(4_000),
        "event_blocks_a_second": rate,
        "clear_us": 1e6 * seconds[0],
    }
    shown = Table(title=f"{args.pods} pods, {len(cluster.index):,} blocks: microseconds")
    for heading in ("prompt's prefix", "decision p50", "p99", "accounting p50", "p99"):
        shown.add_column(heading, justify="right")
    for name, pair in decisions.items():
        shown.add_row(name, *(f"{value:.0f}" for each in pair for value in (each.p50, each.p99)))
    console = Console()
    console.print(shown)
    console.print(
        {name: value for name, value in result.items() if name not in ("machine", "decision_us", "accounting_us")}
    )
    if args.out:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
