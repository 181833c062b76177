"""A KV store killed a thousand times in the midst of writes."""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.soak.case import Case, Figures, Plan
from tests.fixtures_redis import RedisServer
from tests.kvstore.killing import kill_again_and_again


def _some(folder: Path, kills: int, seed: int) -> int:
    """In a process of its own, with a server of its own."""
    folder.mkdir(parents=True)
    server = RedisServer(folder)
    server.start()
    try:
        return asyncio.run(kill_again_and_again(folder, server.url, kills, seed))
    finally:
        server.kill()


def _kills(plan: Plan) -> Figures:
    workers = len(os.sched_getaffinity(0))
    shares = [plan.kills // workers + (i < plan.kills % workers) for i in range(workers)]
    folders = [plan.scratch / f"kvstore-kills-{i}" for i in range(workers)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_some, folders, shares, range(workers)))
    if not all(found):
        raise AssertionError("nothing was kept over a last kill: nothing was tested")
    return {"kills": plan.kills, "stores_at_a_time": workers, "blocks_found_in_the_last_lives": found}


CASES = [
    Case(
        "kvstore-kills",
        "kill -9 of a KV store at random points of its writes: no torn block is served, files are taken over and announced",
        _kills,
    )
]
