"""The way to one other store, in one of its lives: asked over gRPC, answered over UCX. Kept while it works, cut when it does not.

UCX does not tell the other store of a cut, and what that sends over the old connection never arrives: the link's random number says that
there is a new one.
"""

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from kvrelay.common.access import PodAccess
from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.common.ids import BlockId
from kvrelay.common.nodes import NodeRecord
from kvrelay.common.rpc import CHANNEL_OPTIONS, from_rpc_error
from kvrelay.common.tasks import end_task
from kvrelay.kvstore.memory import Slot
from kvrelay.kvstore.peers.arrivals import Arrival, Arrivals
from kvrelay.kvstore.tiers.base import Missing
from kvrelay.transfer.transport import Peer, Transport
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc

log = logging.getLogger(__name__)

BATCH_BLOCKS = 128
"""That are asked for at once, at most."""
SENDING_SECONDS = 10.0
"""For which the other store may try to send what it was asked for."""


class _Run:
    """Blocks that are waited for together. Times are the loop's."""

    def __init__(self, since: float, num_blocks: int) -> None:
        self.since = since
        self.moved = 0.0
        """When one of them came last."""
        self.arrivals: Sequence[Arrival] = ()
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        self._left = num_blocks
        self._loop = loop

    def ended(self, arrival: Arrival) -> None:
        if arrival.error is None:
            self.moved = self._loop.time()
        self._left -= 1
        if not self._left:
            self.over.set_result(None)

    def fail(self, error: KvrelayError) -> None:
        """What is landing goes on."""
        for arrival in self.arrivals:
            arrival.fail(error)


class Link:
    """While something is wanted, something must come within `seconds`."""

    def __init__(
        self, record: NodeRecord, transport: Transport, arrivals: Arrivals, access: PodAccess, seconds: float
    ) -> None:
        """Raises TransferFailed where the transport knows no way."""
        self.record = record
        self.closed = False
        self._number = secrets.randbits(64)
        self._transport = transport
        self._arrivals = arrivals
        self._metadata = access.metadata
        self._seconds = seconds
        # What is landing ends, by force if need be, with an endpoint of this side.
        self._peer: Peer = transport.connect(record.transfer_address, lambda error: self.cut())
        self._channel = access.channel(record.grpc_address, CHANNEL_OPTIONS)
        self._stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._waiting: list[Arrival] = []
        """To be asked for in the loop's next turn, together."""
        self._under_way: dict[_Run, None] = {}
        """The longest first."""
        self._moved = 0.0
        """When something came last."""
        self._watch: asyncio.TimerHandle | None = None
        """While something is under way, and a while after."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def get(self, slots: Sequence[Slot]) -> list[KvrelayError | None]:
        """What has become of each one's block: None where its bytes have come; Missing, TransferFailed. When it returns or raises,
        nothing writes there any more."""
        if self.closed:
            return [TransferFailed("the link is cut")] * len(slots)
        loop = asyncio.get_running_loop()
        run = _Run(loop.time(), len(slots))
        run.arrivals = self._arrivals.expect(slots, run.ended)
        self._under_way[run] = None
        if self._watch is None:
            self._watch = loop.call_later(self._seconds, self._look)
        if not self._waiting:
            loop.call_soon(self._ask)
        self._waiting += run.arrivals
        try:
            await asyncio.shield(run.over)
            self._moved = max(self._moved, run.moved)
        finally:
            for arrival in run.arrivals:
                self._arrivals.forget(arrival)
            del self._under_way[run]
            if not run.over.done():
                run.fail(TransferFailed("it is not wanted any more"))
                await self._end_landing(run)
        return [arrival.error for arrival in run.arrivals]

    def _look(self) -> None:
        """Cuts the link when nothing has come for too long; one timer for all that is wanted."""
        self._watch = None
        if not self._under_way:
            return
        loop = asyncio.get_running_loop()
        moved = max(self._moved, next(iter(self._under_way)).since, *(run.moved for run in self._under_way))
        seconds = moved + self._seconds - loop.time()
        if seconds > 0:
            self._watch = loop.call_later(seconds, self._look)
        else:
            self.cut(f"nothing has come for {self._seconds:g} s")

    async def _end_landing(self, run: "_Run") -> None:
        """If something is: its buffer is the transport's until then, whoever waits or cancels."""
        cancelled: asyncio.CancelledError | None = None
        while not run.over.done():
            self.cut()
            try:
                await asyncio.wait((run.over,))
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    def suspect(self, ids: Sequence[BlockId]) -> None:
        """Tells the store that blocks came damaged. It may not hear it."""
        self._begin(self._say_suspect(b"".join(ids)))

    def cut(self, reason: str = "the link is cut") -> None:
        """What is wanted fails at once, what is landing is lost within moments."""
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._peer.close()
        for run in self._under_way:
            run.fail(TransferFailed(reason))
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.cut()
        for task in tuple(self._tasks):
            await end_task(task)
        await self._channel.close(None)

    # Parts.

    def _ask(self) -> None:
        waiting = [arrival for arrival in self._waiting if not arrival.over]
        self._waiting = []
        if not self.closed:
            for start in range(0, len(waiting), BATCH_BLOCKS):
                self._begin(self._fetch(waiting[start : start + BATCH_BLOCKS]))

    async def _fetch(self, batch: Sequence[Arrival]) -> None:
        request = pb.FetchRequest(
            epoch=self.record.epoch,
            transfer_address=self._transport.address,
            link=self._number,
            timeout_ms=int(1000 * SENDING_SECONDS),
            blocks=map(_wanted, batch, [None, *batch]),
        )
        try:
            async for answer in self._stub.Fetch(request, timeout=SENDING_SECONDS, metadata=self._metadata):
                for place in answer.missing:
                    if place < len(batch):
                        batch[place].fail(Missing(f"{self.record.node_id} has it no more"))
        except grpc.aio.AioRpcError as error:
            failure = TransferFailed(from_rpc_error(error).message)
            for arrival in batch:
                arrival.fail(failure)

    async def _say_suspect(self, ids: bytes) -> None:
        try:
            await self._stub.Suspect(pb.SuspectRequest(ids=ids), timeout=self._seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            log.info("%s could not be told of damaged blocks: %s", self.record.node_id, error.details())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wanted(arrival: Arrival, before: Arrival | None) -> pb.FetchBlock:
    info = arrival.slot.info
    joined = before is not None and before.behind is arrival
    return pb.FetchBlock(id=info.id, tag=arrival.tag, size=info.size, checksum=info.checksum, joined=joined)
