"""An engine and a store, one situation after another."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvrelay.transfer.block import checksum
from tests.connector.hostile import until
from tests.connector.memory import MemoryConnector, Shelf
from tests.connector.pods import Pod, SlowThread, identity, stock, turns

pytestmark = pytest.mark.unit

PROMPT = list(range(1, 101))  # six spans, and four tokens
Make = Callable[..., Pod]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def make(shelf: Shelf) -> AsyncIterator[Make]:
    """Pods at the shelf, whose copies wait for the test. In the end nothing is held, here or there."""
    pods: list[Pod] = []

    def made(**options: Any) -> Pod:
        pods.append(Pod(MemoryConnector(shelf, identity()), slow_copies=True, **options))
        return pods[-1]

    yield made
    for pod in pods:
        for thread in pod.threads:
            freely(thread)
        await pod.stored()
        pod.h.check_empty()
        store = pod.connector
        assert isinstance(store, MemoryConnector)
        assert (store.num_given, store.num_open) == (0, 0)
        await pod.close()


def freely(thread: SlowThread) -> None:
    """From now on it does what it is given, at once."""
    thread.on_submit = lambda: asyncio.get_running_loop().call_soon(thread.go_on)
    while thread.work:
        thread.go_on()


def store_of(pod: Pod) -> MemoryConnector:
    assert isinstance(pod.connector, MemoryConnector)
    return pod.connector


def begin(pod: Pod, *requests: Any) -> None:
    """They come, and a first look at them; none of them runs yet."""
    for request in requests:
        pod.h.engine.add(request)
    assert pod.h.engine.schedule() is None


async def test_blocks_that_are_lent_are_waited_for(make: Make) -> None:
    """A request that needs all blocks starts when the last one comes back: who holds it says so."""
    pod = make(num_blocks=8, max_num_seqs=1, watermark=0.0)
    await pod.run(pod.h.request("a", 40, max_tokens=1))
    await until(lambda: bool(pod.threads[1].work))
    assert len(pod.h.engine.manager.lent) == 1, "a small part of so few"
    large = pod.h.request("b", range(200, 325), max_tokens=3)
    running = asyncio.create_task(pod.run(large))
    await turns(20)
    assert not pod.h.engine.scheduler.running
    freely(pod.threads[1])
    await running
    pod.h.check_output(large)


async def test_two_that_begin_alike_are_loaded_once(shelf: Shelf, make: Make) -> None:
    pod = make()
    first, second = pod.h.request("a", PROMPT), pod.h.request("b", [*PROMPT[:64], *range(300, 350)])
    stock(shelf, first.prompt_token_ids)
    stock(shelf, second.prompt_token_ids)
    begin(pod, first, second)
    await turns()
    assert store_of(pod).finds == [0], "the second waits for the first"
    freely(pod.threads[0])
    await pod.run()
    assert store_of(pod).finds == [0, 4], "and asks for the rest of it"
    for request, computed in ((first, 4), (second, 2)):
        pod.h.check_output(request)
        assert pod.num_computed(request) == computed
    assert pod.store.counters().loaded_tokens == 96 + 48


async def test_the_first_of_two_that_begin_alike_leaves(shelf: Shelf, make: Make) -> None:
    pod = make()
    first, second = pod.h.request("a", PROMPT), pod.h.request("b", PROMPT)
    stock(shelf, PROMPT)
    begin(pod, first, second)
    await until(lambda: bool(pod.threads[0].work))
    pod.h.engine.abort(["a"])
    await turns()
    assert pod.h.engine.inspect().num_requests == 2, "its blocks are being written yet"
    pod.threads[0].go_on()
    await turns()
    assert pod.h.engine.inspect().num_requests == 1
    assert store_of(pod).finds == [0, 0]
    freely(pod.threads[0])
    await pod.run()
    pod.h.check_output(second)
    assert pod.num_computed(second) == 4


async def test_an_abort_while_the_store_is_silent_frees_at_once(shelf: Shelf, make: Make) -> None:
    pod = make()
    freely(pod.threads[1])
    await pod.run(pod.h.request("a", PROMPT[:40]))
    store_of(pod)._rng = random.Random(1)  # from here on answers wait
    begin(pod, pod.h.request("b", PROMPT), pod.h.request("c", PROMPT[:70]))
    await turns()
    assert pod.h.engine.inspect().num_requests == 2
    assert pod.h.engine.inspect().free_blocks < pod.h.engine.inspect().num_blocks
    pod.h.engine.abort(["b", "c"])
    await turns()
    pod.h.check_empty()
    store_of(pod).at_once()


async def test_an_abort_before_the_load_has_begun(make: Make) -> None:
    pod = make()
    begin(pod, pod.h.request("a", PROMPT))
    pod.h.engine.abort(["a"])
    await turns()
    pod.h.check_empty()
    assert store_of(pod).finds == []


async def test_a_deadline_passes_while_it_loads(shelf: Shelf, make: Make) -> None:
    pod = make()
    stock(shelf, PROMPT)
    begin(pod, pod.h.request("a", PROMPT, timeout_ms=50_000))
    await until(lambda: bool(pod.threads[0].work))
    deadline = pod.h.engine.next_deadline()
    assert deadline is not None
    stats = pod.h.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.waiting_tokens) == (0, 1, len(PROMPT))
    assert stats.credits <= pod.h.config.max_num_seqs - 1
    assert pod.h.engine.expire(max(deadline, time.monotonic()) + 1)
    pod.h.take(pod.h.engine.drain())
    assert pod.h.kinds("a") == ["RequestFailed"]
    pod.h.check()
    freely(pod.threads[0])
    await turns()
    pod.h.check_empty()


@pytest.mark.parametrize("spoilt", [(3,), (1, 3)])
async def test_corrupt_bytes_end_a_load_where_they_are(shelf: Shelf, make: Make, spoilt: tuple[int, ...]) -> None:
    """And the store is told of all that came with them, or it would keep those as whole."""
    pod = make()
    ids = stock(shelf, PROMPT)
    for span in spoilt:
        info, payload = shelf.blocks[ids[span]]
        shelf.blocks[ids[span]] = info, payload[:-1] + bytes([payload[-1] ^ 1])
        store_of(pod).corrupt_ids.add(ids[span])
    for thread in pod.threads:
        freely(thread)
    request = pod.h.request("a", PROMPT)
    await pod.run(request)
    pod.h.check_output(request)
    assert pod.num_computed(request) == len(PROMPT) - 16 * spoilt[0]
    assert pod.store.counters().corrupt == len(spoilt)
    assert store_of(pod).num_reported == len(spoilt)


@pytest.mark.parametrize("size", [16, 1024 - 16, 1024 + 16])
async def test_bytes_of_another_size_are_not_taken(shelf: Shelf, make: Make, size: int) -> None:
    """Whatever their checksum."""
    pod = make()
    for thread in pod.threads:
        freely(thread)
    ids = stock(shelf, PROMPT)
    info = msgspec.structs.replace(shelf.blocks[ids[2]][0], size=size)
    shelf.blocks[ids[2]] = msgspec.structs.replace(info, checksum=checksum(info, memoryview(bytes(size)))), bytes(size)
    store_of(pod).corrupt_ids.add(ids[2])
    request = pod.h.request("a", PROMPT)
    await pod.run(request)
    pod.h.check_output(request)
    assert pod.num_computed(request) == len(PROMPT) - 32


async def test_a_load_that_ends_inside_a_block(shelf: Shelf, make: Make) -> None:
    pod = make(block_size=32, num_blocks=16)
    for thread in pod.threads:
        freely(thread)
    ids = stock(shelf, PROMPT)
    store_of(pod).piece = 3
    find = store_of(pod).find

    async def find_and_forget(*args: Any) -> Any:
        found = await find(*args)
        for block_id in ids[5:]:
            shelf.blocks.pop(block_id, None)
        return found

    store_of(pod).find = find_and_forget  # type: ignore[method-assign]
    request = pod.h.request("a", PROMPT)
    await pod.run(request)
    pod.h.check_output(request)
    assert pod.num_computed(request) == len(PROMPT) - 64, "two blocks of the two and a half that came"


async def test_who_loads_keeps_its_turn(shelf: Shelf, make: Make) -> None:
    """Others run meanwhile, and it is before those that came after it."""
    pod = make(max_num_seqs=1)
    freely(pod.threads[1])
    stock(shelf, PROMPT)
    requests = [pod.h.request("a", PROMPT), *(pod.h.request(name, 12, max_tokens=3) for name in "bc")]
    for request in requests:
        pod.h.engine.add(request)
    pod.h.step()
    assert pod.h.output("b"), "it runs in the place of who loads"
    while pod.threads[0].work or pod.h.engine.scheduler.loading:
        await turns()
        if pod.threads[0].work:
            pod.threads[0].go_on()
    await pod.run()
    order = [key for key, kind in pod.h.notices if type(kind).__name__ == "PromptComputed"]
    assert order == ["b", "a", "c"]
    for request in requests:
        pod.h.check_output(request)


async def test_a_large_one_is_not_kept_out_by_those_that_load(shelf: Shelf, make: Make) -> None:
    """Nothing runs, a later one holds blocks that it loads into: the first in the queue gets them in the end."""
    pod = make(num_blocks=10, watermark=0.0)
    freely(pod.threads[1])
    stock(shelf, PROMPT)
    small = pod.h.request("small", PROMPT, priority=1)
    begin(pod, small)
    await until(lambda: bool(pod.threads[0].work))
    large = pod.h.request("large", range(200, 355), max_tokens=4)
    running = asyncio.create_task(pod.run(large))
    await turns()
    assert not pod.h.tokens
    freely(pod.threads[0])
    await running
    for request in (small, large):
        pod.h.check_output(request)
    assert [key for key, kind in pod.h.notices if type(kind).__name__ == "PromptComputed"] == ["large", "small"]


async def test_a_prompt_to_push_loads_as_well(shelf: Shelf, make: Make) -> None:
    pod = make()
    for thread in pod.threads:
        freely(thread)
    stock(shelf, PROMPT)
    request = pod.h.request("a", PROMPT, n=2)
    seq = pod.h.engine.prefill(request)
    await pod.run()
    assert (seq.num_cached, pod.num_computed(request)) == (96, 4)
    pod.h.runner.verify(seq.blocks, PROMPT)
    pod.h.engine.push_done(request.request_id)


async def test_a_push_ends_while_its_prompt_loads(shelf: Shelf, make: Make) -> None:
    pod = make()
    stock(shelf, PROMPT)
    pod.h.engine.prefill(pod.h.request("a", PROMPT))
    assert pod.h.engine.schedule() is None
    await until(lambda: bool(pod.threads[0].work))
    pod.h.engine.abort(["a"])
    assert pod.h.port.aborted == ["a"]
    pod.h.check()
    pod.h.engine.push_done("a")  # type: ignore[arg-type]
    pod.h.check()
    assert pod.h.engine.inspect().free_blocks < pod.h.engine.inspect().num_blocks, "the copy writes yet"
    freely(pod.threads[0])
    await turns()


async def test_a_fault_of_ours_costs_one_batch(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pod = make()
    for thread in pod.threads:
        freely(thread)
    with monkeypatch.context() as patch:
        patch.setattr(pod.h.runner.cache, "read_span", lambda slot, out, dtype: 1 / 0)
        await pod.run(pod.h.request("a", PROMPT))
        await pod.stored()
    assert store_of(pod).num_given == 0, "the rooms were given up"
    assert "blocks were not stored" in caplog.text
    await pod.run(pod.h.request("b", range(300, 400)))
    await pod.stored()
    assert len(store_of(pod).shelf.blocks) >= 6


async def test_closing_waits_for_the_copies(shelf: Shelf) -> None:
    """And nothing is left, whatever had begun."""
    pod = Pod(MemoryConnector(shelf, identity()), slow_copies=True)
    stock(shelf, PROMPT)
    try:
        await pod.run(pod.h.request("a", range(200, 230)))
        begin(pod, pod.h.request("b", PROMPT))
        await until(lambda: all(thread.work for thread in pod.threads))
        begin(pod, pod.h.request("c", range(500, 560)))  # whose load has not begun
        closing = asyncio.create_task(pod.close())
        await turns(50)
        assert not closing.done()
        assert pod.h.engine.manager.lent, "a copy reads it yet"
    finally:
        for thread in pod.threads:
            freely(thread)
    await closing
    assert pod.h.engine.manager.lent == []
    assert store_of(pod).closed
    assert pod.h.engine.scheduler.loading == []
    pod.h.engine.abort(["b", "c"])
    pod.h.check_empty()
