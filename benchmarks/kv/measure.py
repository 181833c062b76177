"""What the parts of the benchmark share: pairs of ours and the raw medium, measured in turns."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import xxhash

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.transfer.block import BlockInfo, checksum

Work = Callable[[], Awaitable[object]]


class Medium(msgspec.Struct, frozen=True, kw_only=True):
    """GB/s (10^9 bytes), medians of the runs."""

    name: str
    ours: float
    raw: float
    """The medium alone."""
    bound: float
    """The medium, and then a pass of the checksum where ours takes one."""
    share: float
    """Of the bound, that ours reaches."""


async def seconds(work: Work) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def compare(
    name: str,
    num_bytes: int,
    runs: int,
    ours: Sequence[Work],
    raw: Work,
    check: Work | None = None,
    prepare: Sequence[Work] = (),
) -> Medium:
    """`ours` has one more than `runs`: the first of each kind warms up. `prepare`: unmeasured, one before each of ours."""
    times: list[tuple[float, float, float]] = []
    for run in range(runs + 1):
        raw_seconds = await seconds(raw)
        check_seconds = await seconds(check) if check else 0.0
        if prepare:
            await prepare[run]()
        times.append((await seconds(ours[run]), raw_seconds, check_seconds))
    ours_s, raw_s, check_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    speeds = [num_bytes / 1e9 / value for value in (ours_s, raw_s, raw_s + check_s)]
    return Medium(name=name, ours=speeds[0], raw=speeds[1], bound=speeds[2], share=speeds[0] / speeds[2])


async def all_of(concurrency: int, works: Sequence[Callable[[], Awaitable[object]]]) -> None:
    """All of them, `concurrency` at a time."""
    left = iter(works)

    async def worker() -> None:
        for work in left:
            await work()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


def make_blocks(count: int, size: int, seed: int) -> tuple[list[BlockInfo], np.ndarray]:
    """Blocks of one chain, and their bytes [count, size]."""
    ids = [BlockId(xxhash.xxh3_128_digest(f"{seed} {i}".encode())) for i in range(count)]
    payload = np.random.default_rng(seed).integers(0, 256, (count, size), np.uint8)
    infos = []
    for i, block_id in enumerate(ids):
        info = BlockInfo(
            id=block_id,
            head=ids[i - i % 64],
            fingerprint=Fingerprint("bench"),
            shape="0" * 16,
            dtype=KvDtype.BFLOAT16,
            size=size,
        )
        infos.append(msgspec.structs.replace(info, checksum=checksum(info, payload[i].data)))
    return infos, payload
