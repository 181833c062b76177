"""The connector to the kvstore of the pod's own node: a stream to it, held as long as both live, and its memory, mapped."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio

from kvrelay.common.access import PodAccess
from kvrelay.common.discovery import RetryPolicy
from kvrelay.common.errors import KvrelayError, TransferFailed, Unavailable
from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.common.rpc import CHANNEL_OPTIONS, from_rpc_error
from kvrelay.common.tasks import end_task, outlast
from kvrelay.engine.connector.base import Load, Memory, NoLoad, NoWriting, Pin, Room, Run, Stored, Writing, no_pin
from kvrelay.engine.connector.session import MAX_OUTGOING, Session, attached, map_arena
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc

log = logging.getLogger(__name__)

FIND_SECONDS = 0.25
"""Within which the store says what it has, or a request goes on without it."""
ANSWER_SECONDS = 2.0
"""Of anything else: between two pieces of a load, for instance."""
ATTACH_SECONDS = 5.0
RETRY = RetryPolicy()
MAX_IDS = 65_536
"""Of a chain: more than these the store does not take in one message."""
Outgoing = asyncio.Queue[pb.AttachRequest]
Stream = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]
COOL_SECONDS = 5.0
"""For which a store that did not answer in time is not asked."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreAccess:
    """Where the store is, and what it is told of the pod."""

    address: str
    rpc: PodAccess = dataclasses.field(default_factory=PodAccess)
    """The token and TLS with which it is called."""
    pod_id: PodId
    fingerprint: Fingerprint
    shape: str
    dtype: KvDtype
    readable: tuple[KvDtype, ...]


class KvStoreConnector:
    """See `base.Connector`. A store that goes is attached to again when it is back."""

    def __init__(self, access: KvStoreAccess, retry: RetryPolicy = RETRY, pin: Pin = no_pin) -> None:
        self._access = access
        self._pin = pin
        self._retry = retry
        self._session: Session | None = None
        self._cool_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self.num_timeouts = 0

    @property
    def ready(self) -> bool:
        return self._session is not None and not self._session.lost and time.monotonic() >= self._cool_until

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="kvstore")

    async def close(self) -> None:
        if self._task is not None:
            await end_task(self._task)

    # Use.

    async def find(self, ids: Sequence[BlockId], first: int) -> Sequence[Run]:
        session = self._usable()
        if session is None or first >= min(len(ids), MAX_IDS):
            return ()
        try:
            async with asyncio.timeout(FIND_SECONDS):
                return await session.find(ids[:MAX_IDS], first)
        except TimeoutError:
            self.slow("find")
            return ()

    def load(self, ids: Sequence[BlockId], first: int, found: Sequence[Run]) -> Load:
        session = self._usable()
        return NoLoad() if session is None else _Load(self, session, ids[:MAX_IDS], first)

    async def begin(self, ids: Sequence[BlockId], heads: Sequence[BlockId], size: int) -> Writing:
        session = self._usable()
        if session is None or size > session.arena_bytes:
            return NoWriting()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                rooms, is_refused = await session.begin(ids, heads, size)
            return _Writing(session, rooms, is_refused)
        except TimeoutError:
            self.slow("make room")
        except TransferFailed as error:
            self.broken(session, error)
        return NoWriting()

    def _usable(self) -> Session | None:
        return self._session if self.ready else None

    def slow(self, what: str) -> None:
        """The store did not do something in time: it is not asked for a while."""
        self.num_timeouts += 1
        if self.ready:
            log.warning("the kvstore did not %s in time, it is left alone for %g s", what, COOL_SECONDS)
        self._cool_until = time.monotonic() + COOL_SECONDS

    def broken(self, session: Session, error: TransferFailed) -> None:
        """The store said what cannot be true."""
        log.error("the kvstore is not to be trusted: %s", error.message)
        self._cool_until = time.monotonic() + COOL_SECONDS
        session.lose()

    # The stream.

    async def _keep(self) -> None:
        failures = 0
        while True:
            attached_at = time.monotonic()
            try:
                await self._attach()
                error: Exception = Unavailable("the store has ended the stream")
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            except (OSError, ValueError, KvrelayError) as failure:
                error = failure
            failures = 1 if time.monotonic() - attached_at > ATTACH_SECONDS else failures + 1
            if failures == 1:
                log.warning("no kvstore at %s, trying on: %s", self._access.address, error)
            await asyncio.sleep(self._retry.delay(failures))

    async def _attach(self) -> None:
        """Until the stream ends. Raises AioRpcError, OSError, ValueError, KvrelayError."""
        rpc = self._access.rpc
        async with rpc.channel(self._access.address, CHANNEL_OPTIONS) as channel:
            access = self._access
            hello = pb.AttachHello(
                pod_id=access.pod_id,
                fingerprint=access.fingerprint,
                shape=access.shape,
                dtype=access.dtype,
                readable=list(access.readable),
            )
            outgoing = Outgoing(MAX_OUTGOING)
            outgoing.put_nowait(pb.AttachRequest(hello=hello))
            # Its type knows only of calls that are given an iterator.
            call: Stream = kvstore_pb2_grpc.KvStoreStub(channel).Attach(metadata=rpc.metadata)  # type: ignore[call-arg]
            writer = asyncio.create_task(_write(call, outgoing), name="kvstore-write")
            try:
                await self._converse(aiter(call), outgoing)
            finally:
                await end_task(writer)
                call.cancel()

    async def _converse(self, answers: AsyncIterator[pb.AttachResponse], outgoing: Outgoing) -> None:
        """Raises as `_attach` does."""
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                told = attached(await anext(answers))
        except (TimeoutError, StopAsyncIteration) as error:
            raise Unavailable("the store does not answer") from error
        access, arena = self._access, await asyncio.to_thread(map_arena, told.arena_path, told.arena_bytes)
        async with self._pinned(arena):
            session = self._session = Session(outgoing, arena, access.fingerprint, access.shape, access.readable)
            log.info("attached to the kvstore at %s, %d MiB", access.address, told.arena_bytes >> 20)
            try:
                await _listen(session, answers)
            finally:
                self._session = None
                session.lose()
                # Copies end by themselves. Until then the store must not take its memory back.
                await session.idle()

    @contextlib.asynccontextmanager
    async def _pinned(self, arena: Memory) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        pinning = loop.run_in_executor(None, self._pin, arena)
        try:
            await outlast(pinning)
            yield
        finally:
            await outlast(loop.run_in_executor(None, pinning.result()))


async def _listen(session: Session, answers: AsyncIterator[pb.AttachResponse]) -> None:
    """Until the stream ends, or the session is lost. Raises AioRpcError, TransferFailed."""
    reader = asyncio.create_task(_read(session, answers), name="kvstore-read")
    gone = asyncio.create_task(session.gone.wait(), name="kvstore-gone")
    try:
        await asyncio.wait((reader, gone), return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            reader.result()
    finally:
        for task in (reader, gone):
            if not task.done():
                await end_task(task)


async def _read(session: Session, answers: AsyncIterator[pb.AttachResponse]) -> None:
    async for message in answers:
        session.receive(message)


async def _write(call: Stream, outgoing: Outgoing) -> None:
    """Until the stream has ended; how it did, its reader is told. (An iterator that gRPC drops while it waits makes a noise.)"""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            await call.write(await outgoing.get())


class _Load:
    """See `base.Load`."""

    def __init__(self, connector: KvStoreConnector, session: Session, ids: Sequence[BlockId], first: int) -> None:
        self._connector = connector
        self._session = session
        self._ids = ids
        self._next = first
        self._call, self._answers = session.load(ids, first)
        self._over = False

    async def next(self) -> Sequence[Stored]:
        while not self._over:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await self._answers.get()
            except TimeoutError:
                self._connector.slow("load a block")
                return ()
            self._over = answer.end
            try:
                if len(answer.blocks) > len(self._ids) - self._next:
                    raise TransferFailed("more blocks than were asked for")
                spans = self._session.stored(self._ids, self._next, answer.blocks)
            except (TransferFailed, ValueError) as error:
                self._connector.broken(self._session, TransferFailed(str(error)))
                return ()
            self._next += len(spans)
            if spans:
                return spans
        return ()

    def release(self, spans: Sequence[Stored]) -> None:
        self._session.release([span.offset for span in spans])

    def corrupt(self, spans: Sequence[Stored]) -> None:
        self._session.corrupt([span.offset for span in spans])

    def close(self) -> None:
        self._session.end_load(self._call, self._answers)


class _Writing:
    """See `base.Writing`."""

    def __init__(self, session: Session, rooms: Sequence[Room], is_refused: bool) -> None:
        self.rooms = rooms
        self.is_refused = is_refused
        self._session = session

    def commit(self, rooms: Sequence[Room], checksums: Sequence[int]) -> None:
        self._session.commit([room.offset for room in rooms], checksums)

    def give_up(self, rooms: Sequence[Room]) -> None:
        self._session.commit((), (), [room.offset for room in rooms])
