"""Spans of requests in a pod: of the calls, and of what the engine says when a request is over."""

from typing import TypeVar

import grpc.aio
import msgspec

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest
from kvrelay.common.tracing import NO_SPAN, TRACEPARENT, Event, Span, Tracer
from kvrelay.engine import messages as m

A = TypeVar("A")
B = TypeVar("B")


class Traces:
    """From a traced call until the engine's Timeline of its request comes."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._above: dict[tuple[RequestId, int], Span] = {}

    def caller(self, context: "grpc.aio.ServicerContext[A, B]") -> Span:
        """The span that a call is made for. A pod begins no traces: the router decides what is traced."""
        if not self._tracer.enabled:
            return NO_SPAN
        given = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
        span = self._tracer.parent(given if isinstance(given, str) else given.decode("latin-1"))
        return span if span.recorded else NO_SPAN

    def follow(self, request: EngineRequest, attempt: int, above: Span) -> EngineRequest:
        """What to hand to the engine, whose Timeline of it becomes children of `above`."""
        if not above.recorded:
            return request
        self._above[request.request_id, attempt] = above
        return msgspec.structs.replace(request, traced=True)

    def take(self, request_id: RequestId, attempt: int, line: m.Timeline) -> None:
        above = self._above.pop((request_id, attempt), NO_SPAN)
        for phase in line.phases:
            events: list[Event] = [("chunk", chunk.at, {"num_tokens": chunk.num_tokens}) for chunk in phase.chunks]
            above.child(phase.name, start=phase.start, end=phase.end, events=events, attempt=attempt)
