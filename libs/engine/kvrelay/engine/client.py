"""AsyncEngine: an engine process with a model, as its pod's front process sees it. No torch here."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable

import msgspec

from kvrelay.common.errors import Internal, KvrelayError, Unavailable, error_from
from kvrelay.common.ids import PodId, RequestId, RouterId
from kvrelay.common.logs import logging_variables
from kvrelay.common.request import EngineRequest, Ticket
from kvrelay.engine import messages as m
from kvrelay.engine.channel import Channel, ChannelClosed
from kvrelay.engine.config import EngineConfig, KvStoreOptions

log = logging.getLogger(__name__)

CALL_SECONDS = 30.0
"""Within which an engine answers a call: many times the longest step. A stopped engine is noticed by it."""
CLOSE_SECONDS = 10.0

Answer = m.Reserved | m.Done | m.Inspected


def _ignore_progress(progress: m.Progress) -> None:
    log.debug("%s: %d of %d", progress.what, progress.done, progress.total)


class AsyncEngine:
    """Starts the engine process, numbers calls, and hands its step outputs on. See `kvrelay.engine.api.EngineClient`.

    The process ends with this one: its end of the socket closes. If it dies, `dead` is set and `outputs` ends.
    """

    def __init__(self, config: EngineConfig, pod_id: PodId, kvstore: KvStoreOptions | None = None) -> None:
        self._config = config
        self._kvstore = kvstore
        self._pod_id = pod_id
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        self._outputs: asyncio.Queue[m.StepOutput | None] = asyncio.Queue()
        self._dead = asyncio.Event()
        self._stats = m.EngineStats(transfer=m.TransferCounters())
        self._info: m.EngineInfo | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel[m.FromEngine] | None = None
        self._reader: asyncio.Task[None] | None = None

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
        if self._process is None:
            raise Unavailable("the engine has not started")
        return self._process.pid

    async def start(self, on_progress: Callable[[m.Progress], None] = _ignore_progress) -> m.EngineInfo:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "kvrelay.engine.process",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **logging_variables(), "OMP_NUM_THREADS": str(self._threads())},
            )
        self._channel = await Channel.open(ours, msgspec.msgpack.Decoder(m.FromEngine))
        self._channel.send(m.Start(config=self._config.to_wire(), pod_id=self._pod_id, kvstore=self._kvstore))
        self._info = await self._await_ready(self._channel, on_progress)
        self._stats = m.EngineStats(
            num_blocks=self._info.num_blocks, free_blocks=self._info.num_blocks, transfer=m.TransferCounters()
        )
        self._reader = asyncio.create_task(self._read(self._channel), name="engine-reader")
        return self._info

    def _threads(self) -> int:
        return self._config.threads or len(os.sched_getaffinity(0))

    async def _await_ready(
        self, channel: Channel[m.FromEngine], on_progress: Callable[[m.Progress], None]
    ) -> m.EngineInfo:
        while True:
            try:
                message = await channel.receive()
            except ChannelClosed as error:
                self._dead.set()
                raise Internal("the engine process ended while it started; its log says why") from error
            match message:
                case m.Progress():
                    on_progress(message)
                case m.Ready(info=info):
                    return info
                case m.Failed(code=code, message=text):
                    self._dead.set()
                    raise error_from(code, text)
                case _:
                    raise Internal(f"a {type(message).__name__} from an engine that has not started")

    async def _read(self, channel: Channel[m.FromEngine]) -> None:
        try:
            while True:
                self._take(await channel.receive())
        except ChannelClosed as error:
            log.warning("engine process: %s", error)
        finally:
            self._dead.set()
            self._outputs.put_nowait(None)
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(Unavailable("the engine process is gone"))
            self._calls.clear()

    def _take(self, message: m.FromEngine) -> None:
        match message:
            case m.StepOutput():
                self._stats = message.stats
                self._outputs.put_nowait(message)
            case m.Failed(call=call, code=code, message=text):
                self._resolve(call, error_from(code, text))
            case m.Reserved() | m.Done() | m.Inspected():
                self._resolve(message.call, message)
            case _:
                log.error("unexpected message from the engine: %s", type(message).__name__)

    def _resolve(self, call: int, answer: Answer | KvrelayError) -> None:
        future = self._calls.pop(call, None)
        if future is None or future.done():  # its caller gave up
            return
        if isinstance(answer, KvrelayError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _send(self, message: m.ToEngine) -> None:
        if self._dead.is_set() or self._channel is None:
            raise Unavailable("the engine process is gone")
        self._channel.send(message)

    async def _call(self, make: Callable[[int], m.ToEngine]) -> Answer:
        number = next(self._numbers)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(make(number))
            async with asyncio.timeout(CALL_SECONDS):  # wait_for may lose a cancellation in Python 3.11
                return await future
        except TimeoutError as error:
            raise Unavailable(f"the engine has not answered for {CALL_SECONDS:.0f} s") from error
        finally:
            self._calls.pop(number, None)

    async def reserve(
        self, request: EngineRequest, attempt: int, router_id: RouterId, *, local_prefill: bool = False
    ) -> tuple[Ticket | None, int]:
        answer = await self._call(
            lambda call: m.Reserve(
                call=call, request=request, attempt=attempt, router_id=router_id, local_prefill=local_prefill
            )
        )
        if not isinstance(answer, m.Reserved):
            raise Internal(f"a {type(answer).__name__} answers Reserve")
        return answer.ticket, answer.num_cached_tokens

    async def prefill(self, request: EngineRequest, ticket: Ticket) -> None:
        self._send(m.Prefill(request=request, ticket=ticket))

    async def submit(self, request: EngineRequest) -> None:
        self._send(m.Submit(request=request))

    async def abort(self, request_ids: tuple[RequestId, ...]) -> None:
        self._send(m.Abort(request_ids=request_ids))

    async def abort_choice(self, request_id: RequestId, choice: int) -> None:
        self._send(m.AbortChoice(request_id=request_id, choice=choice))

    async def abort_router(self, router_id: RouterId) -> None:
        self._send(m.AbortRouter(router_id=router_id))

    async def outputs(self) -> AsyncIterator[m.StepOutput]:
        while (output := await self._outputs.get()) is not None:
            yield output

    async def inspect(self) -> m.Inspection:
        answer = await self._call(lambda call: m.Inspect(call=call))
        if not isinstance(answer, m.Inspected):
            raise Internal(f"a {type(answer).__name__} answers Inspect")
        return answer.inspection

    async def set_hold(self, point: str, after_frames: int = 0) -> None:
        await self._call(lambda call: m.SetHold(call=call, point=point, after_frames=after_frames))

    async def close(self) -> None:
        """Asks the process to end, and ends it if it does not within CLOSE_SECONDS."""
        if self._process is None:
            return
        with contextlib.suppress(Unavailable):
            self._send(m.Shutdown())
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._channel is not None:
            self._channel.close()
        if self._reader is not None:
            await self._reader
