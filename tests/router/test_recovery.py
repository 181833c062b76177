"""Pods as processes that are killed, stopped and restarted: clients get every token once, living pods are left whole."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.engine.fake.config import from_model
from kvrelay.router.core import Router
from kvrelay.router.job import PreparedRequest
from tests.router.cluster import Answer, Real, expected_tokens, source, until

pytestmark = pytest.mark.integration


@pytest.fixture
async def real(model_dir: Path, tmp_path: Path) -> AsyncIterator[Real]:
    real = Real(model_dir, tmp_path)
    yield real
    await real.close()


class Asked:
    """A request under way."""

    def __init__(self, router: Router, prepared: PreparedRequest, model: Path) -> None:
        self.prepared = prepared
        self.answer = Answer(prepared.request.sampling.n)
        self._expected = [expected_tokens(prepared.request, from_model(model), choice) for choice in range(self.n)]
        self._router = router
        self.task = asyncio.create_task(self._read())

    @property
    def n(self) -> int:
        return self.prepared.request.sampling.n

    async def _read(self) -> None:
        async for event in self._router.generate(self.prepared):
            self.answer.add(event)

    def has(self, num_tokens: int) -> bool:
        return all(len(tokens) >= num_tokens for tokens in self.answer.tokens)

    async def ends_well(self, seconds: float = 15.0) -> None:
        async with asyncio.timeout(seconds):
            await self.task
        assert self.answer.tokens == self._expected
        assert self.answer.usage is not None


async def ask(real: Real, model: Path, number: int = 0, **fields: object) -> Asked:
    prompt = tuple(range(1000 + number, 1080 + number))
    return Asked(real.router, await real.router.prepare(source(prompt, **fields)), model)  # type: ignore[arg-type]


async def test_prefill_pods_die_in_a_push(real: Real, model_dir: Path) -> None:
    await real.start("p0", "p1", "d0")
    for name in ("p0", "p1"):
        await real.hold(name, "push")
    asked = await ask(real, model_dir, n=2, temperature=1.0)
    await until(lambda: asked.has(1))  # the first tokens do not wait for the push
    first = await real.holder_of("num_pushes", "p0", "p1")
    other = "p1" if first == "p0" else "p0"
    await real.hold(other, "")
    await real.pods[first].signal(signal.SIGKILL)
    await asked.ends_well()
    assert await real.count(other, "transfers_completed") == 1
    await real.whole("d0", other)

    await real.hold(other, "push")  # and with no other prefill pod the decode pod computes
    asked = await ask(real, model_dir, number=7, n=2, temperature=1.0)
    await until(lambda: asked.has(1))
    await real.pods[other].signal(signal.SIGKILL)
    await asked.ends_well()
    await real.whole("d0")


async def test_decode_pod_dies_in_mid_stream(real: Real, model_dir: Path) -> None:
    await real.start("p0", "d0", "d1")
    asked = await ask(real, model_dir, n=2, temperature=1.0, max_tokens=60, ignore_eos=True)
    await until(lambda: asked.has(5))
    victim = await real.holder_of("num_requests", "d0", "d1")
    await real.pods[victim].signal(signal.SIGKILL)
    await asked.ends_well()
    await real.whole("p0", "d1" if victim == "d0" else "d0")


async def test_decode_pod_is_stopped(real: Real, model_dir: Path) -> None:
    """It breaks no connection, and when it goes on, what it held is freed."""
    await real.start("d0", "d1")
    asked = await ask(real, model_dir, max_tokens=300, ignore_eos=True)
    await until(lambda: asked.has(5))
    victim = await real.holder_of("num_requests", "d0", "d1")
    await real.pods[victim].signal(signal.SIGSTOP)
    await asked.ends_well(25)
    await real.pods[victim].signal(signal.SIGCONT)
    await until(lambda: real.num_usable == 2, seconds=15)
    await real.whole("d0", "d1", seconds=8)


async def test_pods_die_and_return_at_random(real: Real, model_dir: Path) -> None:
    await real.start("p0", "p1", "d0", "d1")
    chance = random.Random(4)
    asked = [await ask(real, model_dir, i, n=1 + i % 2, temperature=1.0, max_tokens=50) for i in range(24)]
    for name in ("d0", "p1"):
        reached = chance.randrange(2, 20)
        await until(lambda reached=reached: sum(one.has(reached) for one in asked) >= 3)  # type: ignore[misc]
        await real.pods[name].signal(signal.SIGKILL)
        await real.launch(name)
    await asyncio.gather(*(one.ends_well(30) for one in asked))
    await until(lambda: real.num_usable == 4, seconds=20)
    await real.whole("p0", "p1", "d0", "d1")
    again = [await ask(real, model_dir, i) for i in range(20)]
    await asyncio.gather(*(one.ends_well() for one in again))


async def test_redis_goes_and_comes_back(real: Real, model_dir: Path) -> None:
    await real.start("p0", "d0")
    await real.stop_redis()
    for number in range(3):
        await (await ask(real, model_dir, number)).ends_well()
    await real.start_redis()
    await real.launch("d1")
    await until(lambda: real.num_usable == 3, seconds=20)
    await (await ask(real, model_dir, 9)).ends_well()
