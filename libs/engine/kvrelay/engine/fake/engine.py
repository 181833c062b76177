"""The fake engine: the stages of a request, on a clock instead of a model. See `kvrelay.engine.api.EngineClient`."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable

from kvrelay.common.errors import KvrelayError, Unavailable
from kvrelay.common.ids import PodId, RequestId, RouterId, new_epoch
from kvrelay.common.layout import check_compatible
from kvrelay.common.request import ChoiceDelta, EngineRequest, Ticket
from kvrelay.engine import messages as m
from kvrelay.engine.fake.config import FakeConfig
from kvrelay.engine.fake.core import FakeCore
from kvrelay.engine.fake.link import Arrival, Receiver, push
from kvrelay.engine.fake.work import Work


def _no_progress(progress: m.Progress) -> None:
    pass


class FakeEngine:
    """Deterministic tokens, bounded blocks, pushes to other fakes wherever they run."""

    def __init__(self, config: FakeConfig, pod_id: PodId) -> None:
        self._config = config
        self._pod_id = pod_id
        self._info: m.EngineInfo | None = None
        self._core = FakeCore(config)
        self._stats = m.EngineStats(transfer=m.TransferCounters())
        self._outputs: asyncio.Queue[m.StepOutput | None] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._pushing = asyncio.Event()
        self._pushing.set()
        self._dead = asyncio.Event()
        self._receiver = Receiver(config.host, self._arrive)
        self._stepper: asyncio.Task[None] | None = None

    @property
    def info(self) -> m.EngineInfo:
        if self._info is None:
            raise Unavailable("the engine has not started")
        return self._info

    @property
    def stats(self) -> m.EngineStats:
        return self._stats

    @property
    def dead(self) -> asyncio.Event:
        return self._dead

    @property
    def pid(self) -> int:
        """This one's own: a fake computes where its front is."""
        return os.getpid()

    async def start(self, on_progress: Callable[[m.Progress], None] = _no_progress) -> m.EngineInfo:
        config = self._config
        on_progress(m.Progress(what="pretending to load weights", done=1, total=1))
        await self._receiver.start()
        self._info = m.EngineInfo(
            pod_id=self._pod_id,
            epoch=new_epoch(),
            model=config.model,
            fingerprint=config.fingerprint,
            layout=config.layout,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            vocab_size=config.vocab_size,
            eos_token_ids=config.eos_token_ids,
            transport="fake",
            attention="fake",
        )
        self._core.open(self._info, self._receiver.address)
        self._stats = self._core.stats()
        self._stepper = asyncio.create_task(self._run(), name="fake-engine")
        return self._info

    async def close(self) -> None:
        self.crash()
        if self._stepper is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepper
        await self._receiver.close()

    def crash(self) -> None:
        """As if the engine process died."""
        if self._dead.is_set():
            return
        self._dead.set()
        if self._stepper is not None:
            self._stepper.cancel()
        for work in list(self._core.works.values()):
            self._core.drop(work)
        self._outputs.put_nowait(None)

    async def outputs(self) -> AsyncIterator[m.StepOutput]:
        while (output := await self._outputs.get()) is not None:
            yield output

    async def reserve(
        self, request: EngineRequest, attempt: int, router_id: RouterId, *, local_prefill: bool = False
    ) -> tuple[Ticket | None, int]:
        work = self._living().reserve(request, attempt, router_id, local_prefill)
        self._wake.set()
        return work.ticket, work.num_cached

    async def submit(self, request: EngineRequest) -> None:
        self._living().enqueue(request, None)
        self._wake.set()

    async def prefill(self, request: EngineRequest, ticket: Ticket) -> None:
        core = self._living()
        try:
            check_compatible(self._config.layout, ticket.layout)
            core.enqueue(request, ticket)
        except KvrelayError as error:
            failed = m.RequestFailed(code=error.code, message=error.message)
            core.notify(request.request_id, ticket.attempt, failed)
        self._wake.set()

    async def abort(self, request_ids: tuple[RequestId, ...]) -> None:
        core = self._living()
        for request_id in request_ids:
            if (work := core.works.get(request_id)) is not None:
                core.drop(work)
        self._wake.set()

    async def abort_choice(self, request_id: RequestId, choice: int) -> None:
        core = self._living()
        if (work := core.works.get(request_id)) is not None:
            core.abort_choice(work, choice)
        self._wake.set()

    async def abort_router(self, router_id: RouterId) -> None:
        works = self._living().works
        await self.abort(tuple(key for key, work in works.items() if work.router_id == router_id))

    async def inspect(self) -> m.Inspection:
        return self._living().inspect()

    async def set_hold(self, point: str, after_frames: int = 0) -> None:
        self._living().hold = point
        if point == "push":
            self._pushing.clear()
        else:
            self._pushing.set()
        self._wake.set()

    def _living(self) -> FakeCore:
        if self._dead.is_set() or self._info is None:
            raise Unavailable("the engine process is gone")
        return self._core

    def _arrive(self, arrival: Arrival) -> None:
        self._living().arrive(arrival)
        self._wake.set()

    async def _run(self) -> None:
        core = self._core
        while True:
            self._wake.clear()
            if not core.busy:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(core.seconds_to_expiry()):  # wait_for may lose a cancellation in 3.11
                        await self._wake.wait()
            await asyncio.sleep(self._config.step_ms / 1000)
            output = core.step()
            for work, first in core.started_pushes:
                work.push = asyncio.create_task(self._push(work, first), name=f"push-{work.request.request_id}")
            core.started_pushes.clear()
            self._stats = output.stats
            self._outputs.put_nowait(output)

    async def _push(self, work: Work, first: tuple[ChoiceDelta, ...]) -> None:
        ticket = work.ticket
        assert ticket is not None
        target = ticket.targets[0]
        started = time.monotonic()
        await self._pushing.wait()
        arrival = Arrival(
            request_id=ticket.request_id,
            epoch=ticket.epoch,
            attempt=ticket.attempt,
            generation=ticket.generation,
            ticket_bits=target.ticket_bits,
            payload_bytes=(target.end_token - target.first_token) * ticket.layout.token_bytes,
            deltas=first,
        )
        try:
            await push(target.address, arrival)
            seconds = time.monotonic() - started
            end: m.PushCompleted | m.PushFailed = m.PushCompleted(payload_bytes=arrival.payload_bytes, seconds=seconds)
        except KvrelayError as error:
            end = m.PushFailed(code=error.code, message=error.message)
        self._core.push_ended(work, end)
        self._wake.set()
