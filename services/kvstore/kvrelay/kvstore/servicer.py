"""The KvStore service: pods' streams, and what an operator asks."""

import asyncio
import contextlib

import grpc.aio

from kvrelay.common.errors import InvalidRequest, StaleEpoch, Unavailable
from kvrelay.common.pod.state import PodState
from kvrelay.common.rpc import answering
from kvrelay.common.tasks import end_task
from kvrelay.kvstore import audit, wire
from kvrelay.kvstore.node import Node
from kvrelay.kvstore.sessions import Session
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc

LIST_BLOCKS = 1024
"""In one message."""
MAX_SUSPECTS = 64
"""That are checked for one request."""

AttachContext = grpc.aio.ServicerContext[pb.AttachRequest, pb.AttachResponse]
StatContext = grpc.aio.ServicerContext[pb.StatRequest, pb.StatResponse]
ListContext = grpc.aio.ServicerContext[pb.ListRequest, pb.ListResponse]
RemoveContext = grpc.aio.ServicerContext[pb.RemoveRequest, pb.RemoveResponse]
FetchContext = grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse]
SuspectContext = grpc.aio.ServicerContext[pb.SuspectRequest, pb.SuspectResponse]
VerifyContext = grpc.aio.ServicerContext[pb.VerifyRequest, pb.VerifyResponse]


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    def __init__(self, node: Node, state: PodState, version: str) -> None:
        self._node = node
        self._chain = node.chain
        self._sessions = node.sessions
        self._state = state
        self._version = version

    async def Attach(self, requests: object, context: AttachContext) -> None:  # type: ignore[override]
        async with answering(context):
            self._state.check_accepting()
            first = await context.read()
            if not isinstance(first, pb.AttachRequest) or first.WhichOneof("kind") != "hello":
                raise InvalidRequest("the first message must be a hello", "hello")
            session = self._sessions.open(wire.hello_from_proto(first.hello))
            try:
                arena = self._chain.memory.arena
                attached = pb.Attached(epoch=self._node.epoch, arena_path=str(arena.path), arena_bytes=arena.size)
                await context.write(pb.AttachResponse(attached=attached))
                await self._serve(session, context)
            finally:
                self._sessions.close(session)

    async def _serve(self, session: Session, context: AttachContext) -> None:
        """Until the pod ends the stream, or is gone."""
        writer = asyncio.create_task(self._write(session, context), name="attach-write")
        try:
            while isinstance(message := await context.read(), pb.AttachRequest):
                wire.take(session, message)
                await session.room()
        finally:
            await end_task(writer)

    async def _write(self, session: Session, context: AttachContext) -> None:
        while True:
            await context.write(wire.reply_to_proto(await session.next_reply()))

    async def Stat(self, request: pb.StatRequest, context: StatContext) -> pb.StatResponse:
        answer = pb.StatResponse()
        async with answering(context):
            answer.CopyFrom(self._stat(checked=not request.unchecked))
        return answer

    def _stat(self, *, checked: bool) -> pb.StatResponse:
        return pb.StatResponse(
            node_id=self._node.id,
            epoch=self._node.epoch,
            version=self._version,
            tiers=map(wire.report_to_proto, self._node.reports()),
            num_pods=len(self._sessions),
            num_pins=self._sessions.num_pins,
            num_writing=self._sessions.num_writing,
            announcer_backlog=self._node.announcer.backlog,
            violations=audit.violations(self._chain, self._sessions) if checked else (),
        )

    async def List(self, request: pb.ListRequest, context: ListContext) -> None:  # type: ignore[override]
        async with answering(context):
            ids = self._chain.ids()
            for start in range(0, len(ids), LIST_BLOCKS):
                held = map(self._chain.find, ids[start : start + LIST_BLOCKS])
                blocks = [found for found in held if found is not None]
                if request.fingerprint:
                    blocks = [found for found in blocks if found[0].fingerprint == request.fingerprint]
                await context.write(wire.records_to_proto(blocks))

    async def Remove(self, request: pb.RemoveRequest, context: RemoveContext) -> pb.RemoveResponse:
        answer = pb.RemoveResponse()
        async with answering(context):
            ids = self._chain.ids() if request.all else wire.ids_from_proto(request.ids, "ids")
            answer.num_removed = await audit.remove(self._chain, ids)
        return answer

    async def Verify(self, request: pb.VerifyRequest, context: VerifyContext) -> None:  # type: ignore[override]
        async with answering(context):
            async for seen in audit.verify(self._chain):
                await context.write(wire.verified_to_proto(seen))

    async def Fetch(self, request: pb.FetchRequest, context: FetchContext) -> None:  # type: ignore[override]
        async with answering(context):
            self._state.check_accepting()
            if request.epoch != self._node.epoch:
                raise StaleEpoch(f"this is epoch {self._node.epoch} of {self._node.id}")
            if self._node.sender is None:
                raise Unavailable("no transport")
            wanted = wire.wanted_from_proto(request)
            seconds = request.timeout_ms / 1000
            sending = self._node.sender.send(request.transfer_address, request.link, wanted, seconds)
            async with contextlib.aclosing(sending):
                async for missing in sending:
                    await context.write(pb.FetchResponse(missing=missing))

    async def Suspect(self, request: pb.SuspectRequest, context: SuspectContext) -> pb.SuspectResponse:
        answer = pb.SuspectResponse()
        async with answering(context):
            ids = wire.ids_from_proto(request.ids, "ids")[:MAX_SUSPECTS]
            answer.num_removed = audit.suspect(self._chain, ids)
        return answer
