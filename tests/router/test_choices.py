"""With several choices, one that a stop string has ended does not run on at the decode pod until the others end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.common.request import FinishReason
from kvrelay.engine.fake.work import Work
from kvrelay.router.core import Router
from kvrelay.router.job import PreparedRequest
from tests.router.cluster import Local, collect, source, until

pytestmark = pytest.mark.integration


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[Local]:
    local = Local(model_dir)
    await local.add("p0", "prefill", fake_step_ms=5.0)
    await local.add("d0", "decode", fake_step_ms=5.0)
    await local.start()
    yield local
    await local.close()


async def stopping_early(router: Router, local: Local, position: int) -> PreparedRequest:
    """Two choices of 200 tokens: the first says its stop string at the position, the second never does."""
    decode = router._model.tokenizer.decode
    for seed in range(100):
        free = await router.prepare(source(n=2, seed=seed, ignore_eos=True, max_tokens=200))
        first, second = local.expected(free, 0), local.expected(free, 1)
        stop = decode(first[position : position + 1])
        if stop not in decode(first[:position]) + decode(second):
            return await router.prepare(source(n=2, seed=seed, ignore_eos=True, max_tokens=200, stop=(stop,)))
    raise AssertionError("no such seed")


def work_of(local: Local, prepared: PreparedRequest) -> Work | None:
    return local.pods["d0"].engine._core.works.get(prepared.request.request_id)


async def test_only_the_other_choice_runs_on(local: Local) -> None:
    prepared = await stopping_early(local.router, local, 8)
    asking = asyncio.create_task(collect(local.router, prepared))
    await until(lambda: (work := work_of(local, prepared)) is not None and work.finished[0])
    work = work_of(local, prepared)
    assert work is not None
    assert not work.finished[1]
    assert work.lengths[0] < 60
    answer = await asking
    assert work.lengths[0] < 60
    assert [answer.finish[choice].finish_reason for choice in (0, 1)] == [FinishReason.STOP, FinishReason.LENGTH]
    assert answer.tokens[1] == local.expected(prepared, 1)
    await local.whole()


async def test_a_first_token_that_stops(local: Local) -> None:
    """The decode pod hears of it before the KV came."""
    await local.pods["p0"].engine.set_hold("push")
    prepared = await stopping_early(local.router, local, 0)
    asking = asyncio.create_task(collect(local.router, prepared))
    await until(lambda: (work := work_of(local, prepared)) is not None and work.finished[0])
    await local.pods["p0"].engine.set_hold("")
    answer = await asking
    assert answer.text[0] == ""
    assert answer.tokens[1] == local.expected(prepared, 1)
    assert local.pods["d0"].engine.stats.generated_tokens < 200
    await local.whole()
