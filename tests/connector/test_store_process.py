"""Pods and a real store: what one has computed the other does not, and a store that is stopped, killed or started again costs a request
nothing but the computing."""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.discovery import RetryPolicy
from kvrelay.common.request import EngineRequest
from kvrelay.engine.connector.kvstore import KvStoreConnector
from tests.connector.hostile import QUICK, access, until
from tests.connector.pods import Pod, identity, turns
from tests.connector.stores import StoreProcess, running

pytestmark = pytest.mark.integration

SECONDS = 30.0
SPANS = 12
PROMPT = [*range(1, SPANS * 16 + 6)]


@contextlib.asynccontextmanager
async def pod_of(store: StoreProcess, token: str = "", is_ready: bool = True, **options: Any) -> AsyncIterator[Pod]:
    """What it was asked for is right, and in the end nothing is held."""
    pod = Pod(KvStoreConnector(access(store.address, identity(), token), QUICK), **options)
    try:
        if is_ready:
            await until(lambda: pod.connector.ready)
        yield pod
        if is_ready:
            await pod.stored()
        pod.h.check_empty()
    finally:
        for thread in pod.threads:
            thread.shutdown()
        await pod.close()


def check(pod: Pod, request: EngineRequest, num_computed: int) -> None:
    pod.h.check_output(request)
    assert pod.num_computed(request) == num_computed
    (said,) = [kind for key, kind in pod.h.notices if key == request.request_id and hasattr(kind, "num_cached_tokens")]
    assert said.num_cached_tokens == len(request.prompt_token_ids) - num_computed


async def fill(store: StoreProcess, prompt: list[int] = PROMPT) -> None:
    """A pod computes the prompt, stores it and leaves."""
    async with pod_of(store) as pod:
        request = pod.h.request("fill", prompt)
        await pod.run(request)
        check(pod, request, len(prompt))
        await pod.stored()
        await store.holds(len(prompt) // 16)
    await store.is_let_go(num_pods=0)


@pytest.mark.parametrize(("writes", "reads"), [(16, 16), (16, 32), (32, 16), (32, 48)])
async def test_pods_of_any_block_size_share(tmp_path: Path, writes: int, reads: int) -> None:
    async with running(tmp_path) as store:
        async with pod_of(store, block_size=writes) as pod:
            request = pod.h.request("a", PROMPT, max_tokens=30)
            await pod.run(request)
            check(pod, request, len(PROMPT))
            turn = [*PROMPT, *pod.h.output("a"), 5, 6, 7]
            await pod.stored()
            full = (len(PROMPT) + 29) // writes * writes
            await store.holds(full // 16)
        async with pod_of(store, block_size=reads) as pod:
            second = pod.h.request("b", turn)
            await pod.run(second)
            check(pod, second, len(turn) - min(full, len(turn) - 1) // reads * reads)
        await store.is_let_go(num_pods=0)


async def test_what_the_model_does_not_share_is_not_found(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        await fill(store)
        async with pod_of(store) as pod:
            salted = pod.h.request("salted", PROMPT, cache_salt="s")
            logprobs = pod.h.request("logprobs", PROMPT, prompt_logprobs=0)
            await pod.run(salted)
            await pod.run(logprobs)
            check(pod, salted, len(PROMPT))
            check(pod, logprobs, len(PROMPT))


async def test_bytes_that_changed_are_computed_and_complained_of(tmp_path: Path) -> None:
    """The session goes on, and the block is stored anew."""
    async with running(tmp_path) as store:
        await fill(store)
        store.spoil(5 * 4096 + 100)  # the sixth block
        async with pod_of(store) as pod:
            request = pod.h.request("a", PROMPT)
            await pod.run(request)
            check(pod, request, len(PROMPT) - 5 * 16)
            assert pod.store.counters().corrupt == 1
            await pod.stored()
            assert pod.connector.ready
            await store.holds(SPANS)
            seen = await store.stat()
            assert (seen.num_pods, seen.tiers[0].counters.corrupt) == (1, 1)
        await store.is_let_go(num_pods=0)
        async with pod_of(store) as pod:
            request = pod.h.request("a", PROMPT)
            await pod.run(request)
            check(pod, request, 5)


async def test_an_abort_while_it_loads_lets_go(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        await fill(store)
        async with pod_of(store, slow_copies=True) as pod:
            load = pod.threads[0]
            pod.h.engine.add(pod.h.request("a", PROMPT))
            assert pod.h.engine.schedule() is None
            await until(lambda: len(load.work) == 1)
            pod.h.engine.abort(["a"])
            await turns()
            assert pod.h.engine.inspect().free_blocks < pod.h.engine.inspect().num_blocks, "the copy writes yet"
            load.go_on()
            await turns()
            pod.h.check_empty()
            await store.is_let_go(num_pods=1)


async def test_a_stopped_store_is_gone_on_without(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        await fill(store)
        async with pod_of(store) as pod:
            store.send_signal(signal.SIGSTOP)
            try:
                started = time.monotonic()
                requests = [pod.h.request(f"r{number}", [number, *PROMPT]) for number in range(4)]
                await pod.run(*requests)
                assert time.monotonic() - started < 5
            finally:
                store.send_signal(signal.SIGCONT)
            for request in requests:
                check(pod, request, len(PROMPT) + 1)
            assert pod.connector.num_timeouts > 0
            await until(lambda: pod.connector.ready)
            again = pod.h.request("again", PROMPT)
            await pod.run(again)
            check(pod, again, 5)
        await store.is_let_go(num_pods=0)


@pytest.mark.parametrize("side", ["load", "store"])
async def test_killed_while_a_pod_copies(tmp_path: Path, side: str) -> None:
    """The new store has a new arena, and what the file tier kept."""
    async with running(tmp_path) as store:
        await fill(store)
        async with pod_of(store, slow_copies=True) as pod:
            load, keep = pod.threads
            prompt = PROMPT if side == "load" else [99, *PROMPT]
            request = pod.h.request("a", prompt)
            running_on = asyncio.create_task(pod.run(request))
            copying = load if side == "load" else keep
            await until(lambda: bool(copying.work))
            store.kill()
            await until(lambda: not pod.connector.ready)
            await store.start()
            seen = await store.stat()
            assert seen.num_pods == 0, "the pod still uses the old arena"
            for thread in pod.threads:
                thread.on_submit = at_once(thread)
                while thread.work:
                    thread.go_on()
            await running_on
            pod.h.check_output(request)
            await until(lambda: pod.connector.ready)
            await store.is_let_go(num_pods=1)
            again = pod.h.request("b", [98, *PROMPT])
            await pod.run(again)
            check(pod, again, len(PROMPT) + 1)
            await pod.stored()
            await store.holds(1)
        await store.is_let_go(num_pods=0)


def at_once(thread: Any) -> Any:
    """From now on it does what it is given, at once."""
    return lambda: asyncio.get_running_loop().call_soon(thread.go_on)


async def test_killed_again_and_again(tmp_path: Path) -> None:
    """Whatever the pods are at: all that is asked is answered, and right."""
    async with running(tmp_path, memory_bytes=24 * 4096) as store:
        async with pod_of(store, num_blocks=40) as first, pod_of(store, num_blocks=40, block_size=32) as second:
            asked: list[tuple[Pod, EngineRequest]] = []

            async def ask(pod: Pod, name: str) -> None:
                for number in range(40):
                    request = pod.h.request(
                        f"{name}{number}", [number % 3, *PROMPT[: 60 + 40 * (number % 4)]], max_tokens=4
                    )
                    asked.append((pod, request))
                    await pod.run(request)

            asking = [asyncio.create_task(ask(first, "a")), asyncio.create_task(ask(second, "b"))]
            for _ in range(3):
                await until(lambda: first.connector.ready and second.connector.ready, SECONDS)
                await asyncio.sleep(0.05)  # somewhere in the middle of it
                store.kill()
                await store.start()
            await asyncio.gather(*asking)
            for pod, request in asked:
                pod.h.check_output(request)
        await store.is_let_go(num_pods=0)


async def test_a_restart_keeps_what_went_down(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        await fill(store)
        async with pod_of(store) as pod:
            store.send_signal(signal.SIGTERM)
            assert store._process is not None
            async with asyncio.timeout(SECONDS):
                while store._process.poll() is None:
                    await asyncio.sleep(0.02)
            await store.start()
            await until(lambda: pod.connector.ready)
            request = pod.h.request("a", PROMPT)
            await pod.run(request)
            check(pod, request, 5)
        await store.is_let_go(num_pods=0)


class CountingRetry(RetryPolicy):
    num_failures = 0

    def delay(self, failures: int) -> float:
        type(self).num_failures = failures
        return 0.01


async def test_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who has another is refused again and again, without a noise."""
    async with running(tmp_path, token="secret") as store:
        async with pod_of(store, "wrong", is_ready=False) as pod:
            request = pod.h.request("a", PROMPT)
            await pod.run(request)
            check(pod, request, len(PROMPT))
            assert not pod.connector.ready
        patient = CountingRetry()
        connector = KvStoreConnector(access(store.address, identity(), "wrong"), patient)
        connector.start()
        await until(lambda: patient.num_failures >= 5)
        await connector.close()
        gc.collect()
        await turns()
        said = [(record.name, record.levelname) for record in caplog.records if record.name != "grpc._cython.cygrpc"]
        assert set(said) == {("kvrelay.engine.connector.kvstore", "WARNING")}
        async with pod_of(store, "secret") as pod:
            assert pod.connector.ready


async def test_what_finds_no_room_is_refused(tmp_path: Path) -> None:
    """And counted as that; what is there already is not."""
    async with running(tmp_path, memory_bytes=8 * 4096) as store, pod_of(store, num_blocks=512) as pod:
        for name in "ab":
            await pod.run(pod.h.request(name, PROMPT))
            await pod.stored()
        counters = pod.store.counters()
        assert counters.refused > 0
        assert 0 < counters.stored_tokens < len(PROMPT)
        await store.is_let_go(num_pods=1)
