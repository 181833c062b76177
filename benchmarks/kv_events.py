"""KV events from pods into Redis and out of it into a router's index: rate, lag, and what each side costs.

    python -m benchmarks.kv_events --rates 50000,50000,100000 --out kv-events.json

One process is the pods: logs and publishers as they are, around caches that store and remove blocks at a given rate, with tokens of
16 to a block. This process is the router: the reader as it is, on an index of plain sets. Between them is a real server. Lag is
from a step's end on a pod to its blocks in the index.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from benchmarks.report import commit, machine, percentile
from kvrelay.common.blocks import NO_PARENT, SPAN
from kvrelay.common.discovery import PodRecord
from kvrelay.common.ids import BlockId, PodId
from kvrelay.common.kvevents import BlockRemoved, BlockStored
from kvrelay.common.tasks import end_task
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.engine.pod.kvredis import RedisPublisher
from kvrelay.router.kvevents import EventReader, KvEventMetrics
from kvrelay.router.snapshots import Snapshot
from tests.common.test_discovery import CLUSTER, record
from tests.fixtures_redis import RedisServer
from tests.kvevents import Sets, engine

BLOCKS_PER_POD = 10_000
"""In the steady state: each step removes as many as it stores."""
TICK_SECONDS = 0.001


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rate. Milliseconds; shares are of one core."""

    wanted_blocks_per_second: float
    blocks_per_second: float
    """Stored and removed, in the index."""
    batches_per_second: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    loop_late_p99_ms: float
    """Of a timer in the router's event loop."""
    loop_late_max_ms: float
    router_cpu: float
    pods_cpu: float
    load_average: float
    """Of the machine over the last minute: other work on its cores shows in the lag."""
    gaps: int
    snapshots: int
    index_is_true: bool
    """At the end it has as many blocks as the pods."""


class Counted(Sets):
    """How many blocks came and went."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0

    def stored(self, pod_id: PodId, keys: Any) -> None:
        self.changes += len(keys)
        super().stored(pod_id, keys)

    def removed(self, pod_id: PodId, keys: Any) -> None:
        self.changes += len(keys)
        super().removed(pod_id, keys)


class Source:
    """A pod's cache that forgets what is oldest."""

    def __init__(self, url: str, name: str, number: int) -> None:
        self.log = EventLog(engine(name, "e1"), (RedisPublisher(url, CLUSTER),))
        self.log.start()
        self._number = number << 64
        self._stored = self._removed = 0

    def step(self, count: int) -> None:
        """`count` blocks in all."""
        comes = count if self._stored - self._removed < BLOCKS_PER_POD else count // 2
        keys = tuple(map(self._key, range(self._stored, self._stored + comes)))
        self._stored += comes
        stored = BlockStored(parent=NO_PARENT, keys=keys, token_ids=tuple(range(comes * SPAN)), block_size=SPAN)
        if comes == count:
            self.log.take((stored,))
            return
        goes = range(self._removed, self._removed + count - comes)
        self._removed += count - comes
        self.log.take((BlockRemoved(keys=tuple(map(self._key, goes))), stored))

    def _key(self, place: int) -> BlockId:
        return BlockId((self._number + place).to_bytes(16, "little"))


async def publish(url: str, pods: int, rate: float, steps: float, seconds: float) -> None:
    """The pods' process. Says when it begins; then what it cost, and how many blocks its pods have."""
    sources = [Source(url, f"pod-{number}", number) for number in range(pods)]
    size = round(rate / steps / pods)
    print("begins", flush=True)
    started, cpu = time.monotonic(), time.process_time()
    for number in range(round(seconds * steps * pods)):
        sources[number % pods].step(size)
        early = started + (number + 1) / (steps * pods) - time.monotonic()
        if early > 0:
            await asyncio.sleep(early)
    elapsed, cpu = time.monotonic() - started, time.process_time() - cpu
    blocks = sum(len(source.log.snapshot().keys) for source in sources)
    print(msgspec.json.encode({"seconds": elapsed, "cpu": cpu / elapsed, "blocks": blocks}).decode(), flush=True)
    await asyncio.sleep(1)  # what is queued goes out
    for source in sources:
        await source.log.stop()


class Directory:
    """All pods, from the first moment on."""

    def __init__(self, pods: int) -> None:
        self._records = {PodId(f"pod-{number}"): record(f"pod-{number}") for number in range(pods)}

    def pods(self) -> dict[PodId, PodRecord]:
        return self._records

    async def updates(self) -> AsyncIterator[dict[PodId, PodRecord]]:
        yield self._records
        await asyncio.Event().wait()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def no_snapshot(record: PodRecord) -> Snapshot:
    """The streams are read from their beginning: a gap is a reader that is too slow, and shows as one."""
    return Snapshot(record.epoch, 1 << 40, [[]])


async def tick(late: list[float]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        late.append(loop.time() - due)


async def measure(url: str, args: argparse.Namespace, rate: float) -> Outcome:
    index, lags, late = Counted(), [], []
    metrics = KvEventMetrics(CollectorRegistry())
    metrics.lag = types.SimpleNamespace(observe=lags.append)  # type: ignore[assignment]
    reader = EventReader(url, CLUSTER, Directory(args.pods), index, no_snapshot, metrics)
    reader.start()
    ticker = asyncio.create_task(tick(late))
    options = (url, str(args.pods), str(rate), str(args.steps), str(args.seconds))
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.kv_events", "--publish", *options, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"begins\n"
    cpu, started = time.process_time(), time.monotonic()
    said = msgspec.json.decode(await child.stdout.readline())
    cpu, elapsed = time.process_time() - cpu, time.monotonic() - started
    assert await child.wait() == 0
    await end_task(ticker)
    await reader.stop()
    ms = [1000 * (percentile(values, share) or 0.0) for values in (lags, late) for share in (0.5, 0.99, 1.0)]
    return Outcome(
        wanted_blocks_per_second=rate,
        blocks_per_second=index.changes / said["seconds"],
        batches_per_second=len(lags) / said["seconds"],
        lag_p50_ms=ms[0],
        lag_p99_ms=ms[1],
        lag_max_ms=ms[2],
        loop_late_p99_ms=ms[4],
        loop_late_max_ms=ms[5],
        router_cpu=cpu / elapsed,
        pods_cpu=said["cpu"],
        load_average=os.getloadavg()[0],
        gaps=int(metrics.gaps._value.get()),
        snapshots=int(metrics.snapshots._value.get()),
        index_is_true=sum(map(len, index.values())) == said["blocks"],
    )


def show(outcomes: list[Outcome], pods: int) -> Table:
    shown = Table(title=f"KV events of {pods} pods through Redis into an index")
    for heading in (
        "blocks/s",
        "batches/s",
        "lag p50",
        "p99",
        "max ms",
        "loop late p99",
        "router",
        "pods",
        "load",
        "gaps",
        "true",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for each in outcomes:
        lag = (f"{each.lag_p50_ms:.1f}", f"{each.lag_p99_ms:.1f}", f"{each.lag_max_ms:.1f}")
        costs = (f"{each.loop_late_p99_ms:.1f}", f"{each.router_cpu:.0%}", f"{each.pods_cpu:.0%}")
        rates = (f"{each.blocks_per_second:,.0f}", f"{each.batches_per_second:,.0f}")
        shown.add_row(
            *rates, *lag, *costs, f"{each.load_average:.1f}", str(each.gaps), "yes" if each.index_is_true else "no"
        )
    return shown


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.kv_events", description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", default="50000", help="blocks stored and removed a second [%(default)s]")
    parser.add_argument("--pods", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--steps", type=float, default=100.0, help="of each pod, a second [%(default)s]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each rate [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--publish", nargs=5, help=argparse.SUPPRESS)  # the pods' process
    return parser.parse_args()


async def run(args: argparse.Namespace) -> list[Outcome]:
    outcomes = []
    for rate in map(float, args.rates.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            server = RedisServer(Path(folder))
            server.start()
            try:
                outcomes.append(await measure(server.url, args, rate))
            finally:
                server.kill()
    return outcomes


def main() -> None:
    args = arguments()
    if args.publish:
        url, pods, rate, steps, seconds = args.publish
        uvloop.run(publish(url, int(pods), float(rate), float(steps), float(seconds)))
        return
    outcomes = uvloop.run(run(args))
    Console(width=140).print(show(outcomes, args.pods))
    if args.out:
        options = {"pods": args.pods, "steps": args.steps, "seconds": args.seconds}
        result = {"machine": machine(), "commit": commit(), "options": options, "outcomes": outcomes}
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
