"""The driver and the tickets around an engine without a model: whom news is for, what is remembered of whom, and bad pushes."""

import asyncio
import types
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import Epoch, PodId, RequestId, RouterId
from kvrelay.common.kvevents import BlockRemoved, BlockStored
from kvrelay.common.request import ChoiceDelta, EngineRequest
from kvrelay.common.tasks import end_task
from kvrelay.engine import messages as m
from kvrelay.engine.changes import CacheChanges
from kvrelay.engine.client import AsyncEngine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.driver import Driver
from kvrelay.engine.receive import ReservationSink
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.port import TransferPort
from tests.transfer.kv import make_layout, make_ticket

pytestmark = pytest.mark.unit

ROUTER = RouterId("router")
VOCAB = 97
"""Of the harness."""


class Sent(list[m.FromEngine]):
    """A channel's near end."""

    send = list.append

    async def drain(self) -> None:
        pass


class Driven:
    def __init__(self, harness: Any, **options: Any) -> None:
        self.changes = CacheChanges(16)
        self.h = harness(listener=self.changes, **options)
        self.sent = Sent()
        layout = make_layout(2)
        self.port = TransferPort(LoopbackNetwork().transport(), PodId("d"), Epoch("e"), layout)
        self.port.start()
        cache = types.SimpleNamespace(data=np.zeros((2,)))
        built: Any = types.SimpleNamespace(engine=self.h.engine, cache=cache)
        info: Any = types.SimpleNamespace(pod_id=PodId("d"), epoch=Epoch("e"), layout=layout, vocab_size=VOCAB)
        channel: Any = self.sent
        self.compute = ThreadPoolExecutor(1)
        self.driver = Driver(self.h.config, built, info, self.port, channel, self.compute, self.changes)

    def reserve(self, request: EngineRequest, attempt: int = 1) -> m.FromEngine:
        self.driver.handle(m.Reserve(call=1, request=request, attempt=attempt, router_id=ROUTER))
        return self.sent[-1]

    def said(self) -> list[m.Notice]:
        self.driver._publish(self.h.engine.drain(), state=True)
        output = self.sent[-1]
        assert isinstance(output, m.StepOutput)
        return list(output.notices)


@pytest.fixture
async def driven(harness: Any) -> AsyncGenerator[Driven, None]:
    made = Driven(harness, num_blocks=8)
    yield made
    await made.port.close()
    made.compute.shutdown()


async def test_nothing_is_remembered_of_a_refused_reservation(driven: Driven) -> None:
    assert isinstance(driven.reserve(driven.h.request("a", 60)), m.Reserved)
    assert isinstance(driven.reserve(driven.h.request("b", 100)), m.Failed)
    assert driven.driver._routers == {"a": ROUTER}
    driven.driver.handle(m.AbortRouter(router_id=ROUTER))
    driven.h.check_empty()


async def test_a_push_ends_for_its_own_attempt(driven: Driven) -> None:
    request = driven.h.request("r", 40)
    ticket = make_ticket(b"nowhere", "e1", make_layout(2), 0, 40)
    driven.driver.handle(m.Prefill(request=request, ticket=ticket))
    async with asyncio.timeout(5):
        while driven.port.sender.num_pushes:
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [(notice.attempt, type(notice.kind)) for notice in driven.said()] == [(1, m.PushFailed)]
    driven.h.check_empty()


def delta(name: str, token: int) -> ChoiceDelta:
    return ChoiceDelta(request_id=RequestId(name), choice=0, index=0, token_ids=(token,))


@pytest.mark.parametrize("deltas", [(), (delta("a", VOCAB),), (delta("a", -1),), (delta("other", 5),)])
async def test_wrong_first_tokens_leave_the_deadline_to_decide(driven: Driven, deltas: tuple[ChoiceDelta, ...]) -> None:
    tickets = driven.driver._tickets
    changed = asyncio.Event()
    tickets.on_change = changed.set
    request = driven.h.request("a", 60)
    reservation = driven.h.engine.reserve(request, 1)
    tickets.grant(reservation, 20)
    with pytest.raises(TransferFailed):
        ReservationSink(tickets, reservation).complete(FinalFrame(deltas=deltas, num_prompt_tokens=60))
    async with asyncio.timeout(5):
        await changed.wait()
    driven.h.run()
    driven.h.check_output(request)
    assert "RecomputeStarted" in driven.h.kinds("a")
    driven.h.check_empty()


async def test_each_chunk_of_a_prompt_changes_the_state_that_is_told(driven: Driven) -> None:
    chunks = driven.h.config.max_num_batched_tokens
    driven.driver.handle(m.Submit(request=driven.h.request("long", chunks + 30, max_tokens=1)))
    running = asyncio.create_task(driven.driver.run())
    async with asyncio.timeout(5):
        while not any(isinstance(said, m.StepOutput) and said.deltas for said in driven.sent):
            await asyncio.sleep(0)
    await end_task(running)
    states = [said.stats for said in driven.sent if isinstance(said, m.StepOutput)]
    assert [(state.num_steps, state.waiting_tokens) for state in states][:2] == [(1, 30), (2, 0)]


async def test_what_the_cache_gains_and_loses_comes_with_the_steps(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driven.changes, "_max_blocks", 2)
    running = asyncio.create_task(driven.driver.run())
    for number in range(3):
        prompt = range(30 * number, 30 * number + 60)
        driven.driver.handle(m.Submit(request=driven.h.request(f"r{number}", [token % 90 for token in prompt])))
        async with asyncio.timeout(5):
            while driven.h.engine.has_work:
                await asyncio.sleep(0)
    await end_task(running)
    outputs = [said for said in driven.sent if isinstance(said, m.StepOutput)]
    keys: set[bytes] = set()
    for event in (event for output in outputs for event in output.cache):
        if isinstance(event, BlockStored):
            keys |= set(event.keys)
        else:
            assert isinstance(event, BlockRemoved)
            keys -= set(event.keys)
    assert keys == driven.h.engine.manager.pool.cached.keys() != set()
    assert any(isinstance(event, BlockRemoved) for output in outputs for event in output.cache)
    assert all(sum(len(event.keys) for event in output.cache) <= 2 for output in outputs)  # type: ignore[union-attr]
    told = len(driven.sent)
    driven.driver._publish(driven.h.engine.drain(), state=False)
    assert len(driven.sent) == told, "nothing has changed"


async def test_a_cancellation_is_not_lost_when_the_answer_comes_with_it() -> None:
    engine = AsyncEngine(EngineConfig(model="none"), PodId("p"))  # type: ignore[arg-type]
    engine._channel = Sent()  # type: ignore[assignment]
    call = asyncio.create_task(engine.set_hold(""))
    await asyncio.sleep(0)
    engine._take(m.Done(call=1))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
