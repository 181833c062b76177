"""The router's core on pods with fake engines: the whole path, its refusals, cancellation and deadlines in every state."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from kvrelay.common.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from kvrelay.common.ids import RequestId
from kvrelay.common.request import FinishReason
from kvrelay.router.core import Router
from kvrelay.router.job import Chat, ChatMessage
from tests.router.cluster import LONG, Local, collect, source, until

pytestmark = pytest.mark.integration

TOPOLOGIES = {"1P1D": ("p0", "d0"), "2P2D": ("p0", "p1", "d0", "d1"), "both": ("b0",), "1D": ("d0",)}
ROLES = {"p": "prefill", "d": "decode", "b": "both"}


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[Local]:
    local = Local(model_dir)
    yield local
    await local.close()


async def started(local: Local, topology: str = "1P1D", **options: object) -> Router:
    for name in TOPOLOGIES[topology]:
        await local.add(name, ROLES[name[0]])  # type: ignore[arg-type]
    return await local.start(**options)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_tokens_text_and_usage(local: Local, topology: str) -> None:
    router = await started(local, topology)
    for fields in ({"max_tokens": 20}, {"n": 3, "temperature": 1.0}, {"temperature": 0.0, "max_tokens": 1}):
        prepared = await router.prepare(source(**fields))
        answer = await collect(router, prepared)
        for choice in range(prepared.request.sampling.n):
            tokens = local.expected(prepared, choice)
            assert answer.tokens[choice] == tokens
            shown = tokens[:-1] if answer.finish[choice].finish_reason is FinishReason.STOP else tokens
            assert answer.text[choice] == router._model.tokenizer.decode(shown)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(LONG)
        assert answer.usage.completion_tokens == sum(map(len, answer.tokens))
    await local.whole()


async def test_many_at_once(local: Local) -> None:
    router = await started(local, "2P2D")
    jobs = [await router.prepare(source(tuple(range(i + 3, i + 90)), n=1 + i % 2)) for i in range(32)]
    answers = await asyncio.gather(*(collect(router, job) for job in jobs))
    for job, answer in zip(jobs, answers, strict=True):
        assert answer.tokens == [local.expected(job, choice) for choice in range(job.request.sampling.n)]
    await local.whole()


async def test_prefix_hits_are_counted_once(local: Local) -> None:
    router = await started(local)
    first = await collect(router, await router.prepare(source(max_tokens=2)))
    again = await collect(router, await router.prepare(source(max_tokens=2)))
    other = await collect(router, await router.prepare(source(max_tokens=2, cache_salt="other tenant")))
    assert [answer.usage.cached_tokens for answer in (first, again, other) if answer.usage] == [0, 64, 0]


async def test_short_prompts_stay_on_the_decode_pod(local: Local) -> None:
    router = await started(local, local_prefill_tokens=32)
    short = await router.prepare(source(LONG[:31], max_tokens=3))
    assert (await collect(router, short)).tokens == [local.expected(short)]
    assert local.pods["p0"].engine.stats.prompt_tokens == 0
    long = await router.prepare(source(LONG[:32], max_tokens=3))
    assert (await collect(router, long)).tokens == [local.expected(long)]
    assert local.pods["p0"].engine.stats.prompt_tokens == 32


async def test_stop_string_truncates_and_frees(local: Local) -> None:
    router = await started(local)
    free = await collect(router, await router.prepare(source(temperature=0.0, ignore_eos=True, max_tokens=200)))
    tokenizer = router._model.tokenizer
    stop = tokenizer.decode(free.tokens[0][5:7])
    prepared = await router.prepare(source(temperature=0.0, ignore_eos=True, max_tokens=2000, stop=(stop,)))
    answer = await collect(router, prepared)
    assert answer.text[0] == free.text[0][: free.text[0].index(stop)]
    assert answer.finish[0].finish_reason is FinishReason.STOP
    assert answer.finish[0].stop_reason == stop
    assert len(answer.tokens[0]) <= 8
    await local.whole()


async def test_logprobs(local: Local) -> None:
    router = await started(local, "2P2D")
    prepared = await router.prepare(source(max_tokens=5, logprobs=2, prompt_logprobs=1, echo=True))
    answer = await collect(router, prepared)
    assert answer.prompt is not None
    assert len(answer.prompt.prompt_logprobs) == len(LONG) - 1
    assert [at.chosen.token_id for at in answer.prompt.prompt_logprobs] == list(LONG[1:])
    assert answer.prompt.text == await router.detokenize("fake", LONG)
    positions = [at for event in answer.events for at in event.logprobs]
    assert [at.chosen.token_id for at in positions] == answer.tokens[0]
    assert all(len(at.top) == 2 for at in positions)
    assert [at.text_offset for at in positions] == sorted(at.text_offset for at in positions)
    assert b"".join(at.chosen.utf8 for at in positions).decode("utf-8", "replace") == answer.text[0]


async def test_seed_is_given_and_kept(local: Local) -> None:
    router = await started(local)
    seeds = {(await router.prepare(source())).request.sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    assert (await router.prepare(source(seed=-7))).request.sampling.seed == -7


async def test_chat_and_text_prompts(local: Local) -> None:
    router = await started(local)
    chat = Chat(messages=(ChatMessage(role="user", content="Hello there"),))
    prepared = await router.prepare(source(chat, max_tokens=4))
    assert "Hello there" in await router.detokenize("fake", prepared.request.prompt_token_ids)
    assert (await collect(router, prepared)).tokens == [local.expected(prepared)]
    tokens = await router.tokenize("fake", "Hello there, world")
    assert (await router.prepare(source("Hello there, world"))).request.prompt_token_ids == tokens
    assert await router.detokenize("fake", tokens) == "Hello there, world"
    assert await router.tokenize("fake", "") == ()


async def test_what_takes_long_is_not_done_in_the_event_loop(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await started(local, "1D")
    threads: list[int] = []

    def noting(function: Callable[..., str]) -> Callable[..., str]:
        def call(*args: object) -> str:
            threads.append(threading.get_ident())
            return function(*args)

        return call

    monkeypatch.setattr(router._preparer._tokenizer, "render", noting(router._preparer._tokenizer.render))
    monkeypatch.setattr(router._entries, "text", noting(router._entries.text))
    messages = tuple(ChatMessage(role="user", content=f"{number}") for number in range(500))
    tokens = await router.tokenize("fake", Chat(messages=messages))
    assert "499" in await router.detokenize("fake", tokens)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


BAD = {
    "empty ids": ({"prompt": ()}, "prompt"),
    "empty text": ({"prompt": ""}, "prompt"),
    "surrogate": ({"prompt": "a\ud800b"}, "prompt"),
    "id out of range": ({"prompt": (1, 49152)}, "prompt"),
    "negative id": ({"prompt": (-1,)}, "prompt"),
    "prompt too long": ({"prompt": (5,) * 8192}, "prompt"),
    "chat too long": ({"prompt": Chat(messages=(ChatMessage(role="user", content="word " * 9000),))}, "messages"),
    "no messages": ({"prompt": Chat(messages=())}, "messages"),
    "max_tokens over the rest": ({"max_tokens": 8192}, "max_tokens"),
    "min_tokens over the rest": ({"min_tokens": 8192}, "min_tokens"),
    "nan": ({"temperature": float("nan")}, "temperature"),
    "many stops": ({"stop": ("x",) * 10_000}, "stop"),
    "bad stop": ({"stop": ("\udc00",)}, "stop"),
    "priority": ({"priority": 2**31}, "priority"),
    "timeout": ({"timeout_ms": 0}, "timeout_ms"),
    "salt": ({"cache_salt": "s" * 1000}, "cache_salt"),
}


async def test_bad_requests_touch_no_pod(local: Local) -> None:
    router = await local.start()
    named: dict[str, str | None] = {}
    too_long = set()
    for case, (fields, _) in BAD.items():
        with pytest.raises(InvalidRequest) as caught:
            await router.prepare(source(**fields))  # type: ignore[arg-type]
        named[case] = caught.value.param
        if isinstance(caught.value, ContextLengthExceeded):
            too_long.add(case)
    assert too_long == {"prompt too long", "chat too long", "max_tokens over the rest", "min_tokens over the rest"}
    assert named == {case: param for case, (_, param) in BAD.items()}


async def test_readiness_counts_pods(local: Local) -> None:
    router = await started(local, "2P2D")
    seen = router.ready()
    assert (seen.ready, seen.num_prefill, seen.num_decode) == (True, 2, 2)
    for name in ("p0", "d0", "d1"):
        local.pods[name].pod.state.drain()
    await until(lambda: local.num_usable == 1)
    seen = router.ready()
    assert (seen.ready, seen.num_prefill, seen.num_decode) == (False, 1, 0)


async def test_a_long_models_name_is_not_said_back(local: Local) -> None:
    router = await started(local, "1D")
    with pytest.raises(ModelNotFound) as raised:
        router.model_info("x" * 1_000_000)
    assert len(raised.value.message) < 300


async def test_other_models_are_not_found(local: Local) -> None:
    router = await local.start()
    with pytest.raises(ModelNotFound):
        await router.prepare(source(model="other"))
    assert [info.name for info in router.models()] == ["fake"]
    assert not router.ready().ready


HOLDS = ("queue", "prefill", "push", "decode")


async def held(
    local: Local, router: Router, point: str, *, timeout_ms: int | None = None, request_id: str = ""
) -> tuple[asyncio.Task[None], RequestId]:
    """A request that stands at the point."""
    if point != "queue":
        for pod in local.pods.values():
            await pod.engine.set_hold(point)
    else:
        for pod in local.pods.values():
            pod.pod.state.drain()
        await until(lambda: local.num_usable == 0)
    prepared = await router.prepare(
        source(request_id=request_id, timeout_ms=timeout_ms, ignore_eos=True, max_tokens=500)
    )

    async def read() -> None:
        async with contextlib.aclosing(router.generate(prepared)) as events:
            async for _ in events:
                pass

    task = asyncio.create_task(read())
    if point == "queue":
        await until(lambda: len(router._dispatcher.queue) == 1)
    else:
        await until(lambda: stands_at(local, point))
    return task, prepared.request_id


def stands_at(local: Local, point: str) -> bool:
    prefill, decode = local.pods["p0"].engine, local.pods["d0"].engine
    match point:
        case "prefill":
            return bool(prefill._core.works)
        case "push":
            return prefill.stats.num_pushes > 0
        case _:
            return decode.stats.num_running > 0


@pytest.mark.parametrize("point", HOLDS)
async def test_cancel_in_every_state_frees_all(local: Local, point: str) -> None:
    router = await started(local)
    task, _ = await held(local, router, point)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await local.whole()
    assert len(router._dispatcher.queue) == 0


@pytest.mark.parametrize("point", HOLDS)
async def test_abort_in_every_state(local: Local, point: str) -> None:
    router = await started(local)
    task, request_id = await held(local, router, point)
    assert await router.abort(request_id)
    with pytest.raises(Cancelled):
        await task
    await local.whole()
    assert not await router.abort(request_id)


@pytest.mark.parametrize("point", HOLDS)
async def test_deadline_in_every_state(local: Local, point: str) -> None:
    router = await started(local)
    task, _ = await held(local, router, point, timeout_ms=500)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await task
    assert time.monotonic() - begin < 3.0
    await local.whole()


async def test_full_queue_is_refused(local: Local) -> None:
    router = await started(local, max_queue=1)
    waiting, _ = await held(local, router, "queue")
    with pytest.raises(Overloaded) as caught:
        await collect(router, await router.prepare(source()))
    assert caught.value.retry_after_seconds >= 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


def waits(router: Router, at_least: int) -> bool:
    return len(router._dispatcher.queue) >= at_least


async def test_queue_is_left_in_order_of_priority(local: Local) -> None:
    await local.add("d0", "decode", max_num_seqs=1)
    router = await local.start()
    await local.pods["d0"].engine.set_hold("decode")
    order: list[int] = []

    async def ask(priority: int) -> None:
        await collect(router, await router.prepare(source(max_tokens=3, priority=priority)))
        order.append(priority)

    first = asyncio.create_task(ask(0))
    await until(lambda: local.pods["d0"].engine.stats.num_running == 1)
    rest = []
    for count, priority in enumerate((5, 3, 1), 1):
        rest.append(asyncio.create_task(ask(priority)))
        await until(partial(waits, router, count - 1))
    await local.pods["d0"].engine.set_hold("")
    await asyncio.gather(first, *rest)
    assert order[0] == 0
    # 5 asks while all is full, and is not in the queue meanwhile: it may come in before or after those that are.
    assert order.index(1) < order.index(3)


async def test_more_than_fits_waits_its_turn(local: Local) -> None:
    await local.add("p0", "prefill")
    await local.add("d0", "decode", fake_num_blocks=24)
    router = await local.start()
    jobs = [await router.prepare(source(tuple(range(i + 3, i + 90)), max_tokens=40)) for i in range(12)]
    answers = await asyncio.gather(*(collect(router, job) for job in jobs))
    assert [answer.tokens[0] for answer in answers] == [local.expected(job) for job in jobs]
    await local.whole()


async def test_no_pods_is_said_soon(local: Local) -> None:
    router = await local.start(unavailable_after_ms=200)
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        await collect(router, await router.prepare(source()))
    assert time.monotonic() - begin < 3.0


async def test_pods_that_cannot_talk_are_not_paired(local: Local) -> None:
    await local.add("p0", "prefill", model=None)  # another model
    await local.add("d0", "decode")
    router = await local.start()
    prepared = await router.prepare(source(max_tokens=3))
    answer = await collect(router, prepared)
    assert answer.tokens == [local.expected(prepared)]
    assert local.pods["p0"].engine.stats.prompt_tokens == 0


async def test_pods_of_another_tokenizer_are_not_used(local: Local, caplog: pytest.LogCaptureFixture) -> None:
    """Their answers would be other text than was meant, without an error. Said once, however often the directory changes."""
    router = await started(local, "both")
    [own] = local.pods.values()
    stranger = await local.add("stranger", "both", tokenizer="0" * 64)
    await until(lambda: any("stranger" in record.getMessage() for record in caplog.records))
    nameless = await local.add("nameless", "both", tokenizer="")
    await until(lambda: local.num_usable == 2)
    for _ in range(4):
        await collect(router, await router.prepare(source(max_tokens=2)))
    assert own.engine.stats.prompt_tokens > 0
    assert nameless.engine.stats.prompt_tokens > 0, "a checkpoint that holds its own is trusted"
    assert stranger.engine.stats.prompt_tokens == 0
    [told] = [record.getMessage() for record in caplog.records if "stranger" in record.getMessage()]
    assert "tokenizer" in told


async def test_same_id_twice_at_once(local: Local) -> None:
    router = await started(local)
    task, request_id = await held(local, router, "decode", request_id="mine")
    with pytest.raises(InvalidRequest):
        await collect(router, await router.prepare(source(request_id="mine")))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert request_id == "mine"


async def test_drain_lets_running_requests_end(local: Local) -> None:
    router = await started(local)
    prepared = await router.prepare(source(max_tokens=30))
    running = asyncio.create_task(collect(router, prepared))
    await until(lambda: bool(router._runs))
    await router.drain(5.0)
    assert (await running).tokens == [local.expected(prepared)]
    with pytest.raises(KvrelayError, match="no more"):
        await router.prepare(source())
