"""The driver with a store beside its engine: what it says of it, and how it ends."""

import asyncio
import types
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvrelay.common.ids import Epoch, PodId, RouterId
from kvrelay.common.tasks import end_task
from kvrelay.engine import messages as m
from kvrelay.engine.changes import CacheChanges
from kvrelay.engine.driver import Driver
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.port import TransferPort
from tests.connector.hostile import until
from tests.connector.memory import MemoryConnector, Shelf
from tests.connector.pods import FINGERPRINT, CacheHarness, identity, stock

pytestmark = pytest.mark.unit

PROMPT = list(range(1, 101))


class Sent(list[m.FromEngine]):
    send = list.append

    async def drain(self) -> None:
        pass


class Driven:
    def __init__(self, store: MemoryConnector) -> None:
        self.h = CacheHarness()
        self.sent = Sent()
        cache = self.h.runner.cache
        layout = cache.layout(FINGERPRINT)
        port = TransferPort(LoopbackNetwork().transport(), PodId("d"), Epoch("e"), layout)
        port.start()
        loaded = types.SimpleNamespace(fingerprint=FINGERPRINT, dtype="float32")
        built: Any = types.SimpleNamespace(engine=self.h.engine, cache=cache, loaded=loaded, layout=layout)
        info: Any = types.SimpleNamespace(pod_id=PodId("d"), epoch=Epoch("e"), layout=layout, vocab_size=97)
        channel: Any = self.sent
        self.compute = ThreadPoolExecutor(1)
        self.driver = Driver(self.h.config, built, info, port, channel, self.compute, CacheChanges(16), store)
        self.running = asyncio.create_task(self.driver.run())

    def ask(self, name: str, prompt: list[int]) -> None:
        request = self.h.request(name, prompt, max_tokens=1)
        self.driver.handle(m.Submit(request=request, router_id=RouterId("r")))

    @property
    def outputs(self) -> list[m.StepOutput]:
        return [said for said in self.sent if isinstance(said, m.StepOutput)]

    @property
    def cached(self) -> dict[str, int]:
        """As the front was told."""
        notices = [notice for said in self.outputs for notice in said.notices]
        return {n.request_id: n.kind.num_cached_tokens for n in notices if isinstance(n.kind, m.PromptComputed)}

    async def close(self) -> None:
        await end_task(self.running)
        await self.driver.close()
        self.compute.shutdown()


@pytest.fixture
async def driven() -> AsyncIterator[tuple[Driven, MemoryConnector]]:
    store = MemoryConnector(Shelf(), identity())
    driven = Driven(store)
    try:
        yield driven, store
    finally:
        if not driven.running.done():
            await driven.close()
        assert store.closed


async def test_what_was_loaded_is_said_to_be_cached(driven: tuple[Driven, MemoryConnector]) -> None:
    pod, store = driven
    stock(store.shelf, PROMPT)
    pod.ask("a", PROMPT)
    pod.ask("b", list(range(200, 240)))
    await until(lambda: pod.cached == {"a": 96, "b": 0})
    await until(lambda: len(store.shelf.blocks) == 8)
    pod.ask("c", [7])
    await until(lambda: "c" in pod.cached)
    said = pod.outputs[-1].stats.store
    assert (said.attached, said.lookups, said.hits, said.loaded_tokens, said.stored_tokens) == (True, 2, 1, 96, 32)
    assert (said.bytes_loaded, said.bytes_stored) == (6 * identity().size, 2 * identity().size)
    await pod.close()
    pod.h.check_empty()


async def test_it_ends_in_the_middle_of_a_load(driven: tuple[Driven, MemoryConnector]) -> None:
    pod, store = driven
    gate = asyncio.Event()
    store.gate = gate.wait  # type: ignore[method-assign, assignment]
    stock(store.shelf, PROMPT)
    pod.ask("a", PROMPT)
    await until(lambda: store.finds == [0])
    async with asyncio.timeout(5):
        await pod.close()
    assert (store.num_given, store.num_open) == (0, 0)
    pod.h.engine.abort(["a"])  # type: ignore[list-item]
    pod.h.check_empty()
