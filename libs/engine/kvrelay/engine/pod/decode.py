"""The Decode service: reservations, and one stream of tokens a router."""

import asyncio
import logging

import grpc.aio

from kvrelay.common.errors import KvrelayError, NoCapacity, Unavailable
from kvrelay.common.ids import RequestId, RouterId
from kvrelay.common.logs import about
from kvrelay.common.pod.state import PodState
from kvrelay.common.rpc import answering
from kvrelay.common.tracing import Span
from kvrelay.common.wire import request_from_proto, ticket_to_proto
from kvrelay.engine.api import EngineClient
from kvrelay.engine.pod import steps
from kvrelay.engine.pod.routes import Routes
from kvrelay.engine.pod.tracing import Traces
from kvrelay.engine.pod.validate import check_id, check_request
from kvrelay.v1 import decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

MAX_STEPS_TOGETHER = 32
"""In one message, for a router that has not taken the former one yet: what it costs to read one is then shared."""

ReserveContext = grpc.aio.ServicerContext[decode_pb2.ReserveRequest, decode_pb2.ReserveResponse]
StreamContext = grpc.aio.ServicerContext[decode_pb2.StreamRequest, decode_pb2.StepTokens]
AbortContext = grpc.aio.ServicerContext[decode_pb2.AbortRequest, decode_pb2.AbortResponse]


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, engine: EngineClient, state: PodState, routes: Routes, traces: Traces) -> None:
        self._engine = engine
        self._state = state
        self._routes = routes
        self._traces = traces

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: ReserveContext) -> decode_pb2.ReserveResponse:
        answer = decode_pb2.ReserveResponse()
        async with answering(context):
            caller = self._traces.caller(context)
            with caller.child("reserve", "server") as span, self._routes.counters.refusing():
                span.note(request_id=request.request.request_id, attempt=request.attempt)
                await self._reserve(request, answer, caller)
        return answer

    async def _reserve(
        self, request: decode_pb2.ReserveRequest, answer: decode_pb2.ReserveResponse, caller: Span
    ) -> None:
        self._state.check_accepting()
        wanted = request_from_proto(request.request)
        check_request(wanted, self._engine.info)
        check_id("router_id", request.router_id)
        router_id = RouterId(request.router_id)
        wanted = self._traces.follow(wanted, request.attempt, caller)
        # Its tokens may come before this call's answer does.
        former = self._routes.own(wanted, request.attempt, router_id)
        try:
            ticket, answer.num_cached_tokens = await self._engine.reserve(
                wanted, request.attempt, router_id, local_prefill=request.local_prefill
            )
        except NoCapacity:  # a former attempt has made way all the same
            self._routes.disown(wanted.request_id)
            raise
        except (asyncio.CancelledError, Unavailable):  # no answer yet: the engine may grant it still, to no one
            self._routes.disown(wanted.request_id)
            await self._engine.abort((wanted.request_id,))
            raise
        except KvrelayError:
            self._routes.give_back(wanted.request_id, former)
            raise
        found = answer.num_cached_tokens
        whose = about(wanted.request_id, caller.trace_id)
        log.debug("attempt %d is admitted, %d tokens are cached", request.attempt, found, extra=whose)
        if ticket is not None:
            answer.ticket.CopyFrom(ticket_to_proto(ticket))

    async def Stream(self, request: decode_pb2.StreamRequest, context: StreamContext) -> None:  # type: ignore[override]
        async with answering(context):
            check_id("router_id", request.router_id)
            router_id = RouterId(request.router_id)
            stream = self._routes.open_stream(router_id)
            try:
                await context.send_initial_metadata(())  # the router may reserve from now on
                while waiting := await stream.get_all(MAX_STEPS_TOGETHER):
                    await context.write(steps.joined(waiting))
            finally:
                self._routes.close_stream(router_id, stream)

    async def Abort(self, request: decode_pb2.AbortRequest, context: AbortContext) -> decode_pb2.AbortResponse:
        async with answering(context):
            request_ids = tuple(RequestId(request_id) for request_id in request.request_ids)
            await self._engine.abort(request_ids)
            for request_id in request_ids:
                self._routes.disown(request_id)
            for aborted in request.choices:
                request_id = RequestId(aborted.request_id)
                await self._engine.abort_choice(request_id, aborted.choice)
                self._routes.disown_choice(request_id, aborted.choice)
        return decode_pb2.AbortResponse()
