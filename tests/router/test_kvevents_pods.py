"""A router whose policy wants an index, pods as processes, Redis: the index is what the pods say of their caches."""

import asyncio
from pathlib import Path

import pytest

from kvrelay.common.access import PodAccess
from kvrelay.common.ids import PodId
from kvrelay.router.snapshots import Snapshots
from tests.router.cluster import Real, collect, source

pytestmark = pytest.mark.integration


async def _ask(real: Real, *numbers: int) -> None:
    for number in numbers:
        prompt = tuple(range(1000 + 100 * number, 1080 + 100 * number))
        await collect(real.router, await real.router.prepare(source(prompt, max_tokens=2)))


async def _same(real: Real, *names: str) -> None:
    """Until the index has of each pod what the pod says, and something."""
    async with asyncio.timeout(10):
        for name in names:
            record = real.router._dispatcher.pods._directory.pods()[PodId(name)]
            while True:
                taken = await Snapshots(PodAccess())(record)
                keys = {key for piece in taken.pieces for key in piece}
                if keys and real.router.index.keys(name) == keys:
                    break
                await asyncio.sleep(0.02)


async def test_the_index_of_a_router(model_dir: Path, tmp_path: Path) -> None:
    real = Real(model_dir, tmp_path)
    try:
        await real.start("p0", "d0", policy="prefix_aware")
        await _ask(real, 1, 2, 3)
        await _same(real, "p0", "d0")
        await real.stop_redis()
        await _ask(real, 4, 5)
        await real.start_redis()
        await _same(real, "p0", "d0")
        assert real.router._metrics.registry.get_sample_value("kvrelay_router_kv_event_batches_total")
    finally:
        await real.close()


async def test_without_an_index_no_events_are_read(model_dir: Path, tmp_path: Path) -> None:
    real = Real(model_dir, tmp_path)
    try:
        await real.start("b0", policy="least_loaded")
        await _ask(real, 1)
        assert real.router._kv_events is None
    finally:
        await real.close()
