"""UCX under the event loop: no progress thread, no spinning, no CPU when idle.

`ucxx._lib` is semi-private; this module is the only one that touches it, and ucxx is pinned. What it relies on, all of it tested:

- Messages over RNDV_THRESH go by rendezvous, and smaller ones fit one TCP segment. So a message that was announced either lies
  here whole, or its receive ends, with an error, when the endpoint does. (A larger eager message whose sender dies half-way leaves
  a receive that never ends.) Rendezvous also keeps a fast sender from filling this process with messages not yet wanted.
- A receive into a buffer that is too small takes the message off the queue without keeping it.
- Closing an endpoint by force completes every send and receive on it. The other end is not told, unless this process ends.
- UCX ends the process on a malformed worker address, so addresses travel sealed with a checksum.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable

os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "512K")
os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "512K")
os.environ.setdefault("UCX_RNDV_THRESH", "8K")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

import numpy as np
import ucxx._lib.libucxx as ucx
import xxhash
from ucxx._lib.arr import Array
from ucxx.exceptions import UCXError
from ucxx.types import Tag, TagMask

from kvrelay.common.errors import Internal, TransferFailed
from kvrelay.transfer.lanes import lanes
from kvrelay.transfer.transport import CloseCallback, Inbox, Landing, Memory, Verdict

log = logging.getLogger(__name__)

TURN_SECONDS = 0.002
"""Of progress before the loop gets its turn, while a transfer runs."""
MESSAGES = 32
"""Taken in a round at most."""
CLOSE_SECONDS = 0.5
CLOSE_ROUNDS = 16
SEAL = b"KVU1"
MAX_ADDRESS_BYTES = 4096
ANY = TagMask(0)
Completion = Callable[[TransferFailed | None], None]


def _seal(address: bytes) -> bytes:
    return SEAL + xxhash.xxh3_64_digest(address) + address


def _unseal(address: bytes) -> bytes:
    body = address[12:]
    if len(address) > MAX_ADDRESS_BYTES or address[:4] != SEAL or xxhash.xxh3_64_digest(body) != address[4:12]:
        raise TransferFailed("not the address of a UCX worker")
    return body


class _Request:
    """A send or a receive in flight. Holds its buffer until UCX is done with it."""

    __slots__ = ("array", "done", "is_device", "request")

    def __init__(self, request: ucx.UCXRequest, array: "Array[Memory]", done: Completion) -> None:
        self.request = request
        self.array = array
        self.done = done
        self.is_device = array.cuda

    def finish(self) -> None:
        failure = None
        try:
            self.request.check_error()
        except UCXError as error:
            failure = TransferFailed(f"UCX: {error}")
        try:
            self.done(failure)
        except Exception:  # the other requests must be finished all the same
            log.exception("the handler of a UCX request failed")


class UcxTransport:
    """One UCX worker. `error_handling` off is faster within a host, but then a dead peer raises nothing: only deadlines do."""

    def __init__(self, *, error_handling: bool = True) -> None:
        """On a thread that has the device's context, where device memory shall be carried. Raises Internal."""
        self.error_handling = error_handling
        try:
            self._context = ucx.UCXContext({}, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        except UCXError as error:
            raise Internal(f"UCX does not start: {error}") from error
        self.bytes_sent = 0
        self.bytes_received = 0
        self.messages_drained = 0
        self._pending: list[_Request] = []
        self._spinning = 0
        """Requests of a device's memory: while there are any, the worker is polled and not waited for."""
        self._peers: set[UcxPeer] = set()
        self._held: ucx.TagProbeResult | None = None
        self._scheduled = False
        self._closed = False

    @property
    def name(self) -> str:
        return f"UCX ({os.environ.get('UCX_TLS', 'all')})"

    @property
    def carries_device_memory(self) -> bool:
        """Between processes of one host, without a copy through the host's memory."""
        return " -- cuda_ipc/" in self._context.info

    @property
    def address(self) -> bytes:
        return self._address

    def start(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        try:
            self._worker = ucx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
            self._worker.init_blocking_progress_mode()
        except UCXError as error:
            raise Internal(f"UCX does not start: {error}") from error
        self._address = _seal(self._worker.address.tobytes())
        self._descriptor: int = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._progress)
        self._progress()

    def connect(self, address: bytes, on_closed: CloseCallback) -> "UcxPeer":
        if self._closed:
            raise TransferFailed("the transport is closed")
        try:
            target = ucx.UCXAddress.create_from_buffer(_unseal(address))
            endpoint = self._worker.create_endpoint_from_worker_address(target, self.error_handling)
        except UCXError as error:
            raise TransferFailed(f"UCX cannot connect: {error}") from error
        peer = UcxPeer(self, endpoint, on_closed)
        self._peers.add(peer)
        self.soon()
        return peer

    def resume(self) -> None:
        if self._held is not None:
            self.soon()

    async def close(self) -> None:
        """Gives what is in flight a moment to leave, then ends it."""
        if self._closed:
            return
        with contextlib.suppress(TimeoutError):  # what has not left by then is ended below
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._pending:
                    self._progress()
                    await asyncio.sleep(0.001)
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        for peer in tuple(self._peers):
            peer.close()
        if self._held is not None:
            self._drain(self._held)
        for _ in range(CLOSE_ROUNDS):
            while (message := self._worker.tag_probe(Tag(0), ANY, True)).matched:
                self._drain(message)
            self._worker.progress()
            self._complete()
        if self._pending:
            log.error("%d UCX requests did not end", len(self._pending))

    # Progress.

    def soon(self) -> None:
        """Progress in the loop's next round: what was submitted meanwhile leaves together."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        self._progress()

    def _progress(self) -> None:
        """Progress until the worker can be armed: only then does its descriptor wake the loop again.

        Copies between devices are too short to be woken for: while they go on there is a round in each of the loop's turns.
        """
        end = self._loop.time() + TURN_SECONDS
        while not self._closed and self._loop.time() < end:
            self._worker.progress()
            self._complete()
            if self._take():
                continue
            if self._spinning:
                break
            if self._worker.arm():
                return
        self.soon()

    def _complete(self) -> None:
        done: list[_Request] = []
        left: list[_Request] = []
        for entry in self._pending:
            (done if entry.request.completed else left).append(entry)
        if done:
            self._pending = left
            for entry in done:
                self._spinning -= entry.is_device
                entry.finish()

    def _take(self) -> bool:
        """Takes in messages that have arrived. Whether there may be more, or work that they caused."""
        for count in range(MESSAGES):
            message = self._held or self._worker.tag_probe(Tag(0), ANY, True)
            if not message.matched:
                return count > 0
            self._held = None
            landing = self._inbox.accept(message.sender_tag.value, message.length)
            if landing is Verdict.WAIT:
                self._held = message
                return count > 0
            if isinstance(landing, Verdict):
                self._drain(message)
                continue
            self._receive(message, landing.buffer, functools.partial(self._landed, landing))
        return True

    def _landed(self, landing: Landing, error: TransferFailed | None) -> None:
        if error is not None:
            landing.lost(error)
        else:
            self.bytes_received += landing.buffer.nbytes
            landing.landed()

    def _drain(self, message: ucx.TagProbeResult) -> None:
        self.messages_drained += 1
        self._receive(message, np.empty(min(message.length, 16), np.uint8), lambda _: None)

    def _receive(self, message: ucx.TagProbeResult, buffer: Memory, done: Completion) -> None:
        array = Array(buffer)
        self.submit(self._worker.tag_recv_with_handle(array, message), array, done)

    def submit(self, request: ucx.UCXRequest, array: "Array[Memory]", done: Completion) -> None:
        entry = _Request(request, array, done)
        if request.completed:
            entry.finish()
        else:
            self._pending.append(entry)
            self._spinning += entry.is_device

    def forget(self, peer: "UcxPeer") -> None:
        self._peers.discard(peer)
        self.soon()


class UcxPeer:
    def __init__(self, transport: UcxTransport, endpoint: ucx.UCXEndpoint, on_closed: CloseCallback) -> None:
        self.closed = False
        self._transport = transport
        self._endpoint = endpoint
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        endpoint.set_close_callback(self._lost)

    @property
    def carriers(self) -> tuple[str, ...]:
        return () if self.closed else lanes(self._endpoint.handle)

    def send(self, tag: int, buffer: Memory) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        if self.closed:
            future.set_exception(TransferFailed("the connection is closed"))
            return future

        def done(error: TransferFailed | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        array = Array(buffer)
        self._transport.bytes_sent += buffer.nbytes
        self._transport.submit(self._endpoint.tag_send(array, Tag(tag)), array, done)
        self._transport.soon()
        return future

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._endpoint.remove_close_callback()
        self._endpoint.close_blocking(period=10**9, max_attempts=1)
        self._transport.forget(self)

    def _lost(self) -> None:
        """Called by UCX in the middle of its progress, where an endpoint must not be closed."""
        self._loop.call_soon(self._report)

    def _report(self) -> None:
        if self.closed:
            return
        try:
            self._endpoint.raise_on_error()
            reason = "closed by the other end"
        except UCXError as error:
            reason = str(error)
        self.close()
        self._on_closed(TransferFailed(f"the connection was lost: {reason}"))
