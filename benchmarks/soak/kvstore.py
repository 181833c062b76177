"""A KV store killed a thousand times in the midst of writes."""

import asyncio
import os

from benchmarks.soak.case import Case, Figures, Plan
from tests.fixtures_redis import RedisServer
from tests.kvstore.killing import kill_again_and_again


def _kills(plan: Plan) -> Figures:
    folder = plan.scratch / "kvstore-kills"
    folder.mkdir()
    server = RedisServer(folder)
    server.start()
    try:
        found = asyncio.run(kill_again_and_again(folder, server.url, plan.kills))
    finally:
        server.kill()
    if not found:
        raise AssertionError("nothing was kept over the last kill: nothing was tested")
    return {"kills": plan.kills, "blocks_found_in_the_last_life": found, "cores": os.cpu_count() or 0}


CASES = [
    Case(
        "kvstore-kills",
        "kill -9 of a KV store at random points of its writes: no torn block is served, files are taken over and announced",
        _kills,
    )
]
