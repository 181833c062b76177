"""One connection to one pod: its calls, its health stream and, of a decode pod, its token stream.

    connect ──▶ Watch and Stream are open ──▶ usable ──▶ one of them breaks, or Watch is silent ──▶ lost, for good

A pod that is lost and answers again gets a new `Pod`, with a new `Load`: no news of the old one is taken for the new one's.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import grpc
import grpc.aio

from kvrelay.common.access import Metadata, PodAccess
from kvrelay.common.discovery import PodRecord
from kvrelay.common.errors import Cancelled, DeadlineExceeded, Internal, KvrelayError, StaleEpoch, Unavailable
from kvrelay.common.ids import RequestId, RouterId
from kvrelay.common.request import EngineRequest
from kvrelay.common.rpc import CHANNEL_OPTIONS, called, from_rpc_error
from kvrelay.common.tracing import NO_SPAN, TRACEPARENT, Span
from kvrelay.common.wire import delta_from_proto, request_to_proto
from kvrelay.router.inbox import Inbox
from kvrelay.router.load import Load, Report
from kvrelay.router.news import PodLost, PrefillFailed, from_notice, from_prefill
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, pod_pb2, pod_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

SILENCE_SECONDS = 3.0
"""Three times the health stream's interval: a process that was stopped breaks no connection."""
CONNECT_SECONDS = 5.0
RESERVE_SECONDS = 5.0
ABORT_SECONDS = 5.0

_OPTIONS = (
    *CHANNEL_OPTIONS,
    # No connection is shared with a former `Pod` of the same address: a broken one is not inherited.
    ("grpc.use_local_subchannel_pool", 1),
    # A few steps' tokens: what this router has not read yet waits in the pod, which then puts it into one message.
    ("grpc.http2.lookahead_bytes", 16 << 10),
    ("grpc.http2.bdp_probe", 0),
)

T = TypeVar("T")

PodState = Literal["ready", "draining", "starting", "unreachable"]


async def uncancelled(call: Awaitable[T]) -> T:
    """Raises KvrelayError. gRPC ends calls on a closed channel by CancelledError: that is no cancellation of the caller."""
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unavailable("the connection to the pod was closed") from error
    except grpc.aio.AioRpcError as error:
        raise of_pod(from_rpc_error(error)) from error
    except Cancelled as error:
        raise of_pod(error) from error


def of_pod(error: KvrelayError) -> KvrelayError:
    """No one here cancelled: to a request, a call that the pod or the connection ended is a pod that cannot be had."""
    return Unavailable(error.message) if isinstance(error, Cancelled) else error


@dataclass(frozen=True, slots=True)
class Grant:
    """A request, and the decode pod's ticket for it as that pod wrote it: only a prefill pod has to understand it."""

    request: types_pb2.EngineRequest
    ticket: types_pb2.Ticket


class Pod:
    """`usable`: it said that it is ready, and what it streams arrives here."""

    def __init__(self, record: PodRecord, group: int, router_id: RouterId, access: PodAccess) -> None:
        self.record = record
        self.streams = record.role != "prefill"
        self.load = Load(
            record.pod_id,
            record.epoch,
            block_size=max((part.block_size for part in record.layout.groups), default=1),
            group=group,
            self_sufficient=record.role == "both",
            fingerprint=record.fingerprint,
        )
        self.num_kv_tokens = record.num_blocks * self.load.block_size
        self.usable = False
        # A connection of its own to the pod as well: what it left behind there is not taken over by the next.
        self._router_id = RouterId(f"{router_id}.{secrets.token_hex(4)}")
        self._metadata = access.metadata
        self._channel = access.channel(record.grpc_address, _OPTIONS)
        self._watch = pod_pb2_grpc.PodStub(self._channel).Watch
        self._decode = decode_pb2_grpc.DecodeStub(self._channel)
        self._prefill = prefill_pb2_grpc.PrefillStub(self._channel)
        self._stream_open = not self.streams
        self._accepts = False
        self._status: pod_pb2.PodStatus | None = None
        """The last one."""
        self._inboxes: dict[RequestId, Inbox] = {}
        self._lost: KvrelayError | None = None

    def __str__(self) -> str:
        return f"{self.record.pod_id} at {self.record.grpc_address}"

    @property
    def state(self) -> PodState:
        if self._lost is not None or self._status is None:
            return "unreachable"
        if self._status.draining:
            return "draining"
        return "ready" if self.usable else "starting"

    async def serve(self, on_status: Callable[[], None], on_usable: Callable[[], None]) -> KvrelayError:
        """Until the pod is lost: keeps `load` and `usable` current, and hands on tokens and notices. Answers why it was lost."""
        tasks = [asyncio.create_task(self._watch_health(on_status, on_usable), name=f"watch {self}")]
        if self.streams:
            tasks.append(asyncio.create_task(self._read_stream(on_usable), name=f"stream {self}"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._lost = _reason(done.pop())
        finally:
            self._lose(self._lost or Unavailable("the router is closing"), on_usable)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close(None)
        return self._lost

    def _lose(self, reason: KvrelayError, on_usable: Callable[[], None]) -> None:
        self._lost = reason
        self._set_usable(False, on_usable)
        for inbox in self._inboxes.values():
            inbox.put(PodLost(self.load, reason))
        self._inboxes.clear()

    async def _watch_health(self, on_status: Callable[[], None], on_usable: Callable[[], None]) -> None:
        call = self._watch(pod_pb2.WatchRequest(router_id=self._router_id), metadata=self._metadata)
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    status = await call.read()
            except TimeoutError as error:
                raise Unavailable(f"no sign of life for {SILENCE_SECONDS:.0f} s") from error
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            if not isinstance(status, pod_pb2.PodStatus):
                raise Unavailable("it ended its health stream")
            if (status.pod_id, status.epoch) != (self.record.pod_id, self.record.epoch):
                raise StaleEpoch(f"{status.pod_id} with epoch {status.epoch} answers instead")
            self._take_status(status, on_usable)
            on_status()

    def _take_status(self, status: pod_pb2.PodStatus, on_usable: Callable[[], None]) -> None:
        self.load.report(
            Report(
                credits=status.credits,
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                waiting_tokens=status.waiting_tokens,
                free_blocks=status.free_blocks,
                num_blocks=status.num_blocks,
            )
        )
        self._status = status
        self._accepts = status.ready and not status.draining
        self._set_usable(self._accepts and self._stream_open, on_usable)

    def _set_usable(self, usable: bool, on_usable: Callable[[], None]) -> None:
        if usable != self.usable:
            self.usable = usable
            on_usable()

    async def _read_stream(self, on_usable: Callable[[], None]) -> None:
        call = self._decode.Stream(decode_pb2.StreamRequest(router_id=self._router_id), metadata=self._metadata)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await call.initial_metadata()
            self._stream_open = True
            self._set_usable(self._accepts, on_usable)
            async for step in call:
                self._take_step(step)
        except TimeoutError as error:
            raise Unavailable("its token stream does not open") from error
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise Unavailable("it ended its token stream")

    def _take_step(self, step: decode_pb2.StepTokens) -> None:
        """Notices first: a prompt is computed before its first token. What no one listens to any more is dropped."""
        for notice in step.notices:
            if (inbox := self._inboxes.get(RequestId(notice.request_id))) is not None:
                inbox.put(from_notice(notice))
        for delta in step.deltas:
            if (inbox := self._inboxes.get(RequestId(delta.request_id))) is not None:
                inbox.put(delta_from_proto(delta))

    def listen(self, request_id: RequestId, inbox: Inbox) -> None:
        """From now on the request's news, PodLost included, comes to the inbox; at once where the pod is lost already."""
        if self._lost is not None:
            inbox.put(PodLost(self.load, self._lost))
        else:
            self._inboxes[request_id] = inbox

    def ignore(self, request_id: RequestId) -> None:
        self._inboxes.pop(request_id, None)

    def _check_connected(self) -> None:
        if self._lost is not None:
            raise Unavailable(f"{self} was lost: {self._lost.message}")

    async def reserve(
        self,
        request: EngineRequest,
        attempt: int,
        *,
        local_prefill: bool,
        timeout_seconds: float,
        traceparent: str = "",
    ) -> Grant | None:
        """None: the pod computes the prompt itself. Raises what the pod says, and Unavailable where it does not answer in time."""
        self._check_connected()
        message = decode_pb2.ReserveRequest(
            request=request_to_proto(request), attempt=attempt, router_id=self._router_id, local_prefill=local_prefill
        )
        timeout = min(timeout_seconds, RESERVE_SECONDS)
        try:
            metadata = self._about(traceparent)
            answer = await uncancelled(called(self._decode.Reserve(message, timeout=timeout, metadata=metadata)))
        except DeadlineExceeded as error:
            raise Unavailable(f"{self} does not answer") from error
        if local_prefill:
            return None
        if not answer.HasField("ticket"):
            raise Internal(f"{self} granted no ticket")
        return Grant(message.request, answer.ticket)

    def _about(self, traceparent: str) -> Metadata:
        return (*self._metadata, (TRACEPARENT, traceparent)) if traceparent else self._metadata

    async def prefill(self, grant: Grant, inbox: Inbox, *, timeout_seconds: float, span: Span = NO_SPAN) -> None:
        """Until the push has ended; what happens, failure included, comes to the inbox. Cancelling it aborts the request there.

        `span` is this call's, and ends with it.
        """
        message = prefill_pb2.PrefillRequest(request=grant.request, ticket=grant.ticket)
        attempt = grant.ticket.attempt
        try:
            with span:
                self._check_connected()
                metadata = self._about(span.traceparent)
                call = self._prefill.Prefill(message, timeout=timeout_seconds, metadata=metadata)
                try:
                    await uncancelled(self._read_prefill(call, attempt, inbox))
                finally:
                    call.cancel()
        except KvrelayError as error:
            inbox.put(PrefillFailed(attempt, error))

    @staticmethod
    async def _read_prefill(
        call: "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]",
        attempt: int,
        inbox: Inbox,
    ) -> None:
        pushed = False
        async for event in call:
            inbox.put(from_prefill(event, attempt))
            pushed = event.HasField("push_completed")
        if not pushed:
            raise Unavailable("the prefill pod ended the call before its push")

    async def abort(self, request_id: RequestId) -> None:
        """Best effort: a decode pod that cannot be reached frees the request when its stream breaks."""
        await self._abort(decode_pb2.AbortRequest(request_ids=[request_id]))

    async def abort_choice(self, request_id: RequestId, choice: int) -> None:
        """Best effort, as `abort`: the request's other choices go on."""
        aborted = decode_pb2.AbortedChoice(request_id=request_id, choice=choice)
        await self._abort(decode_pb2.AbortRequest(choices=[aborted]))

    async def _abort(self, message: decode_pb2.AbortRequest) -> None:
        with contextlib.suppress(KvrelayError):
            self._check_connected()
            await uncancelled(called(self._decode.Abort(message, timeout=ABORT_SECONDS, metadata=self._metadata)))


def _reason(task: asyncio.Task[None]) -> KvrelayError:
    if task.cancelled():
        return Unavailable("the connection was closed")
    error = task.exception()
    if isinstance(error, KvrelayError):
        return error
    log.error("a pod's stream failed", exc_info=error)
    return Internal(f"its stream could not be read: {error}")
