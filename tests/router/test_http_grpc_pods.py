"""The table of cases through both fronts of the real router, over a prefill and a decode pod with fake engines."""

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.router.answers import Answer, ask_grpc, ask_http, ask_stream
from tests.router.cases import BAD, GOOD, Case
from tests.router.cluster import Local, until
from tests.router.mutations import attack
from tests.router.stack import Fronts, fronts_of

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
MODEL = "fake"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def local(model_dir: Path) -> AsyncGenerator[Local, None]:
    local = Local(model_dir)
    await local.add("p0", "prefill")
    await local.add("d0", "decode")
    await local.start()
    yield local
    await local.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(local: Local) -> AsyncGenerator[Fronts, None]:
    async with fronts_of(local.router) as running:
        yield running


def seeded(case: Case) -> Case:
    """Without a seed each request draws its own: answers would differ for that reason alone."""
    if "seed" in case.sampling or case.sampling.get("temperature") == 0.0:
        return case
    return Case(**{**vars(case), "sampling": {**case.sampling, "seed": 11}})


def without_cache_hits(answer: Answer) -> Answer:
    """The first of equal requests fills the prefix cache for the others."""
    answer.usage = (*answer.usage[:2], 0)
    return answer


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
async def test_answers_are_equal(served: Fronts, case: Case) -> None:
    case = seeded(case)
    whole = without_cache_hits(await ask_http(served.http, case, MODEL))
    assert (whole.error, whole.param) == ("", None)
    assert whole == without_cache_hits(await ask_stream(served.http, case, MODEL))
    assert whole == without_cache_hits(await ask_grpc(served.channel, case, MODEL))
    assert len(whole.choices) == case.sampling.get("n", 1)
    for choice in whole.choices.values():
        assert choice.finish in ("stop", "length")
        assert choice.finish == "stop" or case.num_tokens in (None, len(choice.token_ids))
        if "logprobs" in case.sampling:
            assert len(choice.logprobs) == len(choice.token_ids)
    assert whole.usage[:2] == (
        len(whole.prompt_token_ids),
        sum(len(choice.token_ids) for choice in whole.choices.values()),
    )
    if "prompt_logprobs" in case.sampling:
        assert len(whole.prompt_logprobs) == len(whole.prompt_token_ids) - 1


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
async def test_errors_are_equal(served: Fronts, local: Local, case: Case) -> None:
    before = [pod.engine.stats.prompt_tokens for pod in local.pods.values()]
    for answer, param in (
        (await ask_http(served.http, case, MODEL), case.param_in_http),
        (await ask_stream(served.http, case, MODEL), case.param_in_http),
        (await ask_grpc(served.channel, case, MODEL), case.param),
    ):
        assert (answer.error, answer.param) == (case.error, param)
    assert before == [pod.engine.stats.prompt_tokens for pod in local.pods.values()]


async def test_cached_tokens_are_told_by_both_fronts(served: Fronts) -> None:
    prompt = tuple(range(2000, 2100))
    case = Case("cached", prompt=prompt, sampling={"max_tokens": 2, "temperature": 0.0})
    assert (await ask_http(served.http, case, MODEL)).usage[2] == 0
    for answer in (await ask_stream(served.http, case, MODEL), await ask_grpc(served.channel, case, MODEL)):
        assert answer.usage == (100, 2, 96)


async def test_echo_with_logprobs_counts_through(served: Fronts) -> None:
    body = {"model": MODEL, "prompt": "Wärme 🏃 geht", "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 1}
    answer = (await served.http.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = answer["logprobs"]
    assert answer["text"].startswith("Wärme 🏃 geht")
    assert logprobs["token_logprobs"][0] is None
    assert len({len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        whole = not re.match(r"bytes:|<\|", token)
        assert not whole or answer["text"][offset:].startswith(token)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_pods(served: Fronts, local: Local, stream: bool) -> None:
    body = {"model": MODEL, "prompt": "word " * 100, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    asking = asyncio.ensure_future(served.http.post("/v1/completions", json=body))
    await until(lambda: local.pods["d0"].engine.stats.num_running > 0)
    asking.cancel()
    await local.whole()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_mutated_requests_leave_the_stack_healthy(served: Fronts, local: Local) -> None:
    seen = await attack(served.http, MODEL, 500, seed=5)
    assert {200, 400, 404} <= seen
    await local.whole()
    assert (await ask_http(served.http, GOOD[0], MODEL)).error == ""
