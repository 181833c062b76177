"""Time to the first token of a prompt that is computed, against one that comes out of the store into a pod that has never seen it."""

import asyncio
import random
import statistics
import time
from pathlib import Path

import msgspec

from benchmarks.kv.cpu import kvstore
from kvrelay.common.ids import PodId, RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine import messages as m
from kvrelay.engine.client import AsyncEngine
from kvrelay.engine.config import EngineConfig, KvStoreOptions

STORED_SECONDS = 60.0


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cold_ms: float
    hit_ms: float
    ratio: float
    hit_tokens: int
    """That were loaded."""


class Pod:
    """An engine process, asked one request at a time."""

    def __init__(self, config: EngineConfig, name: str, address: str) -> None:
        self.engine = AsyncEngine(config, PodId(name), KvStoreOptions(addresses=(address,)))
        self._number = 0

    async def ask(self, prompt: tuple[int, ...]) -> tuple[float, int, int]:
        """Milliseconds to the first token, prompt tokens not computed, and the token."""
        self._number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
        request = EngineRequest(request_id=RequestId(f"ask-{self._number}"), prompt_token_ids=prompt, sampling=sampling)
        started, cached = time.perf_counter(), 0
        await self.engine.submit(request)
        async for step in self.engine.outputs():
            for notice in step.notices:
                if isinstance(notice.kind, m.PromptComputed):
                    cached = notice.kind.num_cached_tokens
                if isinstance(notice.kind, m.RequestFailed):
                    raise SystemExit(notice.kind.message)
            if step.deltas:
                return 1000 * (time.perf_counter() - started), cached, step.deltas[0].token_ids[0]
        raise SystemExit("the engine has ended")

    async def stored(self, num_tokens: int) -> None:
        """Waits until so many tokens went into the store. Steps bring the count: idle ones are made by a request of a token."""
        async with asyncio.timeout(STORED_SECONDS):
            while self.engine.stats.store.stored_tokens < num_tokens:
                await self.ask((1,))
                await asyncio.sleep(0.05)


async def measure(config: EngineConfig, lengths: list[int], runs: int, folder: Path, room: int) -> list[FirstToken]:
    async with kvstore(folder, f"[{{tier: cpu, bytes: {room}}}]") as address:
        computes, hits = Pod(config, "computes", address), Pod(config, "hits", address)
        try:
            for pod in (computes, hits):
                await pod.engine.start()
                await pod.ask(tuple(range(3, 600)))
            return [await _measure(computes, hits, length, runs) for length in lengths]
        finally:
            await computes.engine.close()
            await hits.engine.close()


async def _measure(computes: Pod, hits: Pod, length: int, runs: int) -> FirstToken:
    """The first run is not counted: pods have used all of their caches before, in which no page is written for the first time."""
    cold, hit, tokens = [], [], 0
    rng = random.Random(length)
    for _ in range(runs + 1):
        prompt = tuple(rng.randrange(3, 40_000) for _ in range(length))
        before = computes.engine.stats.store.stored_tokens
        cold_ms, _, expected = await computes.ask(prompt)
        await computes.stored(before + length // 16 * 16)
        hit_ms, tokens, token = await hits.ask(prompt)
        if token != expected or tokens != (length - 1) // 16 * 16:
            raise SystemExit(f"{tokens} tokens were loaded, and the next one is {token}, not {expected}")
        cold.append(cold_ms)
        hit.append(hit_ms)
    cold_ms, hit_ms = statistics.median(cold[1:]), statistics.median(hit[1:])
    return FirstToken(prompt_tokens=length, cold_ms=cold_ms, hit_ms=hit_ms, ratio=cold_ms / hit_ms, hit_tokens=tokens)
