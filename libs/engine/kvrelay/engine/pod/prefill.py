"""The Prefill service: one call a request, open until its push has ended."""

import contextlib
import logging

import grpc.aio

from kvrelay.common.errors import Unavailable
from kvrelay.common.logs import about
from kvrelay.common.pod.state import PodState
from kvrelay.common.rpc import answering
from kvrelay.common.tracing import Span
from kvrelay.common.wire import request_from_proto, ticket_from_proto
from kvrelay.engine.api import EngineClient
from kvrelay.engine.pod.routes import PrefillRoute, Routes
from kvrelay.engine.pod.tracing import Traces
from kvrelay.engine.pod.validate import check_request, check_ticket
from kvrelay.v1 import prefill_pb2, prefill_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, engine: EngineClient, state: PodState, routes: Routes, traces: Traces) -> None:
        self._engine = engine
        self._state = state
        self._routes = routes
        self._traces = traces

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        async with answering(context):
            with self._traces.caller(context).child("prefill", "server") as span:
                await self._prefill(request, context, span)

    async def _prefill(self, request: prefill_pb2.PrefillRequest, context: Context, span: Span) -> None:
        with self._routes.counters.refusing():
            self._state.check_accepting()
            wanted = request_from_proto(request.request)
            check_request(wanted, self._engine.info)
            ticket = ticket_from_proto(request.ticket)
            check_ticket(ticket, wanted)
        span.note(request_id=wanted.request_id, attempt=ticket.attempt)
        whose = about(wanted.request_id, span.trace_id)
        log.debug("attempt %d: a prefill for %s", ticket.attempt, ticket.pod_id, extra=whose)
        wanted = self._traces.follow(wanted, ticket.attempt, span)
        route = self._routes.open_prefill(wanted.request_id, ticket.attempt)
        try:
            await self._engine.prefill(wanted, ticket)
            await _write_all(route, context)
        finally:
            if self._routes.close_prefill(route):
                log.debug("its caller is gone", extra=whose)
                with contextlib.suppress(Unavailable):
                    await self._engine.abort((route.request_id,))


async def _write_all(route: PrefillRoute, context: Context) -> None:
    while (event := await route.events.get()) is not None:
        await context.write(event)
