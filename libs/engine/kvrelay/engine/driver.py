"""Drives one engine: takes the front's messages, runs steps, and lets KV in and out beside them."""

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

import msgspec

from kvrelay.common.errors import Internal, InvalidRequest, KvrelayError
from kvrelay.common.ids import PodId, RequestId, RouterId, new_epoch
from kvrelay.common.logs import about
from kvrelay.common.request import EngineRequest, Ticket
from kvrelay.engine import messages as m
from kvrelay.engine.batch import Batch, Running
from kvrelay.engine.build import Built, build
from kvrelay.engine.changes import CacheChanges
from kvrelay.engine.channel import Channel
from kvrelay.engine.config import EngineConfig, KvStoreOptions
from kvrelay.engine.connector.base import Connector
from kvrelay.engine.connector.port import KvStorePort, identity_of, make_connector
from kvrelay.engine.core import StepUpdate
from kvrelay.engine.push import Pushes
from kvrelay.engine.receive import Tickets
from kvrelay.engine.timeline import Timelines
from kvrelay.engine.transfer import open_port
from kvrelay.transfer.port import TransferPort

log = logging.getLogger(__name__)

HOLDS = ("prefill", "push", "decode")


class Driver:
    """Owns the engine, on the event loop. It is the engine's `TransferPort`: who is told when a transfer loses its blocks."""

    def __init__(
        self,
        config: EngineConfig,
        built: Built,
        info: m.EngineInfo,
        port: TransferPort,
        channel: Channel[m.ToEngine],
        compute: ThreadPoolExecutor,
        changes: CacheChanges,
        connector: Connector | None = None,
        kvstore: KvStoreOptions | None = None,
    ) -> None:
        self._config = config
        self._engine = built.engine
        self._port = port
        self._channel = channel
        self._compute = compute
        self._changes = changes
        self._pushes = Pushes(port.sender, built.cache, self._push_ended)
        self._timelines = Timelines()
        self._tickets = Tickets(
            built.engine, port, built.cache, info, self._changed, self._timelines.received, self._transfer_failed
        )
        self._held = False
        """By a test: no step begins."""
        self._work = asyncio.Event()
        self._notices: list[m.Notice] = []
        self._routers: dict[RequestId, RouterId] = {}
        self._store: KvStorePort | None = None
        if connector is not None:
            identity, always = identity_of(built, kvstore), kvstore is not None and kvstore.load == "always"
            self._store = KvStorePort(
                built.engine,
                built.cache,
                identity,
                connector,
                self._changed,
                load_always=always,
                on_loaded=self._timelines.loaded,
            )
            self._store.start()
        built.engine.connect(self)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        pod_id: PodId,
        channel: Channel[m.ToEngine],
        compute: ThreadPoolExecutor,
        kvstore: KvStoreOptions | None = None,
    ) -> "Driver":
        """Loads the model and opens the transport, and says Ready. Raises KvrelayError where it cannot."""
        loop = asyncio.get_running_loop()

        def progress(what: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(channel.send, m.Progress(what=what, done=done, total=total))

        changes = CacheChanges(config.block_size)
        listener = changes if config.kv_events else None
        built = await loop.run_in_executor(compute, build, config, progress, listener)
        # What is there now lives as long as the process: no collection need look at it again.
        gc.collect()
        gc.freeze()
        epoch = new_epoch()
        port = open_port(config, pod_id, epoch, built.layout, built.cache)
        info = m.EngineInfo(
            pod_id=pod_id,
            epoch=epoch,
            model=str(config.model),
            fingerprint=built.loaded.fingerprint,
            layout=built.layout,
            max_model_len=built.engine.limits.max_model_len,
            num_blocks=built.cache.num_blocks,
            vocab_size=built.loaded.vocab_size,
            eos_token_ids=built.loaded.eos_token_ids,
            transport=port.transport.name,
            attention=built.attention,
        )
        connector = make_connector(kvstore, pod_id, built)
        driver = cls(config, built, info, port, channel, compute, changes, connector, kvstore)
        channel.send(m.Ready(info=info))
        driver._changed()  # the state of an idle engine, above all its credits, is news too
        return driver

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
        await self._port.close()

    # Steps.

    async def run(self) -> None:
        """One step after another, for as long as there is work: as many in flight as the runner takes."""
        loop = asyncio.get_running_loop()
        flights: deque[tuple[Batch, Running]] = deque()
        while True:
            await self._work.wait()
            self._work.clear()
            batch = None if self._held else self._engine.schedule()
            self._publish(self._engine.drain(), state=batch is None)
            if batch is not None:
                self._work.set()
                self._timelines.scheduled(batch)
                hook = self._pushes.hook(batch)
                flights.append((batch, await loop.run_in_executor(self._compute, self._engine.launch, batch, hook)))
            if not flights or (batch is not None and len(flights) < self._engine.runner.depth):
                continue
            first, running = flights.popleft()
            result = running.result() if running.done else await loop.run_in_executor(self._compute, running.result)
            update = self._engine.update(first, result)
            self._timelines.updated(first)
            self._pushes.first_tokens(update.deltas)
            self._publish(update, state=True)
            await self._channel.drain()
            self._work.set()

    async def watch(self) -> None:
        """Fails what is overdue, whether steps run or not."""
        while True:
            if self._engine.expire(time.monotonic()):
                self._changed()
            deadline = self._engine.next_deadline()
            await asyncio.sleep(0.25 if deadline is None else min(0.25, max(0.0, deadline - time.monotonic())))

    def _changed(self) -> None:
        """Something may be said, or be possible, that was not before."""
        self._work.set()

    def _publish(self, update: StepUpdate, *, state: bool) -> None:
        """Tokens and news, if there are any, and the state with them; with `state` also the bare state."""
        notices = [*self._notices, *update.notices, *self._timelines.over(self._engine.request_ids)]
        self._notices = []
        cache = self._changes.take()
        if not (update.deltas or notices or cache or state):
            return
        stats = self._engine.stats(self._counters(), self._store.counters() if self._store else None)
        if links := self._links():
            stats = msgspec.structs.replace(stats, links=links)
        deltas = tuple(update.deltas)
        self._channel.send(m.StepOutput(deltas=deltas, notices=tuple(notices), cache=cache, stats=stats))
        while cache := self._changes.take():
            self._channel.send(m.StepOutput(cache=cache, stats=stats))
        ended = {delta.request_id for delta in update.deltas if delta.finish_reason is not None}
        for request_id in ended.union(notice.request_id for notice in notices):
            self._forget_router(request_id)

    def _forget_router(self, request_id: RequestId) -> None:
        """Whose request it is need not be known, once it is over."""
        if request_id not in self._engine.request_ids:
            self._routers.pop(request_id, None)

    def _counters(self) -> m.TransferCounters:
        counted, transport = self._port.counters, self._port.transport
        return m.TransferCounters(
            payload_bytes_sent=counted.payload_bytes_sent,
            payload_bytes_received=counted.payload_bytes_received,
            bytes_sent=transport.bytes_sent,
            bytes_received=transport.bytes_received,
            transfers_completed=counted.transfers_completed,
            transfers_failed=counted.transfers_failed,
            seconds=counted.seconds,
            payload_bytes_overlapped=counted.payload_bytes_overlapped,
            checksum_errors=counted.checksum_errors,
            transfers_cancelled=counted.transfers_cancelled,
            links_lost=counted.links_lost,
        )

    def _links(self) -> tuple[m.LinkStats, ...]:
        return tuple(
            m.LinkStats(
                pod_id=link.remote.pod_id,
                transport=",".join(link.speed.carriers),
                bytes_per_second=link.speed.bytes_per_second,
            )
            for link in self._port.links
        )

    # Messages.

    def handle(self, message: m.ToEngine) -> None:
        """What the message asks for is done when this returns, or begins. Errors are the asker's, and end nothing else."""
        match message:
            case m.Reserve(call=call):
                self._answer(call, lambda: self._reserve(message))
            case m.Prefill(request=request, ticket=ticket):
                self._or_fail(request, lambda: self._prefill(request, ticket), ticket.attempt)
            case m.Submit(request=request, router_id=router_id):
                self._routers[request.request_id] = router_id
                self._timelines.begin(request, 0)
                self._or_fail(request, lambda: self._engine.add(request))
            case m.Abort(request_ids=request_ids):
                self._abort(request_ids)
            case m.AbortChoice(request_id=request_id, choice=choice):
                self._engine.abort_choice(request_id, choice)
                self._forget_router(request_id)
            case m.AbortRouter(router_id=router_id):
                self._abort(tuple(key for key, value in self._routers.items() if value == router_id))
            case m.Inspect(call=call):
                self._answer(call, lambda: self._inspect(call))
            case m.SetHold(call=call, point=point, after_frames=after_frames):
                self._answer(call, lambda: self._set_hold(call, point, after_frames))
            case m.Start() | m.Shutdown():
                raise Internal(f"a {type(message).__name__} at the wrong time")
            case _:
                assert_never(message)
        self._changed()

    def _answer(self, call: int, act: Callable[[], m.FromEngine]) -> None:
        try:
            self._channel.send(act())
        except KvrelayError as error:
            self._channel.send(m.Failed(call=call, code=error.code, message=error.message))

    def _or_fail(self, request: EngineRequest, act: Callable[[], None], attempt: int = 0) -> None:
        try:
            act()
        except KvrelayError as error:
            kind = m.RequestFailed(code=error.code, message=error.message)
            self._notices.append(m.Notice(request_id=request.request_id, attempt=attempt, kind=kind))

    def _reserve(self, message: m.Reserve) -> m.Reserved:
        request_id = message.request.request_id
        log.debug("attempt %d: a reservation is asked for", message.attempt, extra=about(request_id))
        try:
            reserved = self._admit(message)
        except KvrelayError:
            self._forget_router(request_id)  # a former attempt may have made way
            raise
        self._routers[request_id] = message.router_id
        return reserved

    def _admit(self, message: m.Reserve) -> m.Reserved:
        request = message.request
        self._timelines.begin(request, message.attempt, receives=not message.local_prefill)
        if message.local_prefill:
            found = self._engine.reserve_local(request, message.attempt)
            return m.Reserved(call=message.call, ticket=None, num_cached_tokens=found)
        reservation = self._engine.reserve(request, message.attempt)
        timeout_ms = min(request.timeout_ms, self._config.ticket_timeout_ms)
        ticket = self._tickets.grant(reservation, timeout_ms)
        return m.Reserved(call=message.call, ticket=ticket, num_cached_tokens=reservation.num_cached)

    def _prefill(self, request: EngineRequest, ticket: Ticket) -> None:
        log.debug(
            "attempt %d: %d tokens to prefill",
            ticket.attempt,
            len(request.prompt_token_ids),
            extra=about(request.request_id),
        )
        self._timelines.begin(request, ticket.attempt, pushes=True)
        seq = self._engine.prefill(request, ticket.attempt)
        try:
            self._pushes.start(request, ticket, seq)
        except KvrelayError:
            self._engine.abort((request.request_id,))
            self._engine.push_done(request.request_id)
            raise

    def _abort(self, request_ids: tuple[RequestId, ...]) -> None:
        self._engine.abort(request_ids)
        for request_id in request_ids:
            self._routers.pop(request_id, None)

    def _inspect(self, call: int) -> m.Inspected:
        inspection = self._engine.inspect(self._counters(), self._port.staging_bytes)
        return m.Inspected(call=call, inspection=inspection)

    def _set_hold(self, call: int, point: str, after_frames: int) -> m.Done:
        if not self._config.test_hooks:
            raise InvalidRequest("the engine was started without test hooks", "point")
        match point:
            case "":
                self._held = False
                self._port.sender.release()
            case "push":
                self._port.sender.hold(after_frames)
            case "prefill" | "decode":
                self._held = True
            case _:
                raise InvalidRequest(f"no hold point {point!r}; there are {', '.join(HOLDS)}", "point")
        return m.Done(call=call)

    # What the transfer says, and what it is told.

    def _push_ended(self, request_id: RequestId, attempt: int, end: m.PushCompleted | m.PushFailed) -> None:
        self._engine.push_done(request_id)
        if isinstance(end, m.PushCompleted):
            self._timelines.pushed(request_id, end.seconds)
        self._notices.append(m.Notice(request_id=request_id, attempt=attempt, kind=end))
        self._changed()

    def _transfer_failed(self, request_id: RequestId, attempt: int, error: KvrelayError) -> None:
        kind = m.PushFailed(code=error.code, message=error.message)
        self._notices.append(m.Notice(request_id=request_id, attempt=attempt, kind=kind))
        self._changed()

    def push_aborted(self, request_id: RequestId) -> None:
        self._pushes.abort(request_id)

    def reservation_over(self, request_id: RequestId) -> None:
        self._tickets.close(request_id)
