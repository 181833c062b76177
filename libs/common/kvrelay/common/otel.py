"""Spans by OpenTelemetry's SDK, exported by OTLP over HTTP on a thread of its own.

Nothing here blocks or fails a request: what the collector does not take, or not fast enough, is counted and lost.
OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, …) count as well.
"""

import asyncio
import importlib.metadata
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from kvrelay.common.errors import Internal, KvrelayError
from kvrelay.common.tracing import NO_SPAN, TRACEPARENT, Attribute, Event, Kind, Span, SpanCounters

try:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise Internal(f"option --otlp-endpoint needs the extra otel of this package: {error}") from error

log = logging.getLogger(__name__)

QUEUE: Final = 8192
"""Spans that may wait for the exporter."""
BATCH: Final = 512
EXPORT_SECONDS: Final = 5.0
"""Of one batch, all attempts together."""
DELAY_MS: Final = 1000.0
CLOSE_SECONDS: Final = 2.0
PATH: Final = "/v1/traces"

_KINDS: Final = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
}
_PROPAGATOR: Final = TraceContextTextMapPropagator()


def _nanoseconds(at: float | None) -> int | None:
    """Of the wall clock, by what it is now: None where that is meant."""
    return None if at is None else time.time_ns() - int((time.monotonic() - at) * 1e9)


class OtelSpan:
    """See `kvrelay.common.tracing.Span`."""

    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def recorded(self) -> bool:
        return self._span.get_span_context().trace_flags.sampled

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        start: float | None = None,
        end: float | None = None,
        events: Iterable[Event] = (),
        **attributes: Attribute,
    ) -> Span:
        above = trace.set_span_in_context(self._span, Context())
        span = self._tracer.start_span(
            name, above, _KINDS[kind], _dotted(attributes), start_time=_nanoseconds(start), record_exception=False
        )
        if not span.is_recording():
            return NO_SPAN
        for what, at, about in events:
            span.add_event(what, _dotted(about), _nanoseconds(at))
        if end is not None:
            span.end(_nanoseconds(end))
        return OtelSpan(self._tracer, span)

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_dotted(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _dotted(attributes))

    def end(self, error: BaseException | None = None) -> None:
        if not self._span.is_recording():
            return
        if isinstance(error, KvrelayError):
            self._span.set_attribute("error.type", error.code)
            self._span.set_status(trace.StatusCode.ERROR, error.message)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute("kvrelay.cancelled", True)
        elif error is not None:
            self._span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        self._span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(error)


def _dotted(attributes: dict[str, Attribute]) -> dict[str, Attribute]:
    """`gen_ai__usage__input_tokens` is OpenTelemetry's gen_ai.usage.input_tokens; a bare name is of our own."""
    return {name.replace("__", ".") if "__" in name else f"kvrelay.{name}": value for name, value in attributes.items()}


class _Counting(SpanExporter):
    """Says once that the collector is away, and once that it is back."""

    def __init__(self, exporter: SpanExporter, counters: SpanCounters) -> None:
        self._exporter = exporter
        self._counters = counters
        self._away = False
        self.taken = 0
        """From the queue."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away:
            self._counters.failed += len(spans)
        else:
            self._counters.exported += len(spans)
        if away != self._away:
            self._away = away
            log.warning("the collector takes no spans, they are lost" if away else "the collector takes spans again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Bounded(BatchSpanProcessor):
    """Counts what finds no room, in place of logging it."""

    def __init__(self, exporter: _Counting, counters: SpanCounters) -> None:
        super().__init__(exporter, QUEUE, DELAY_MS, BATCH)
        self._exporter = exporter
        self._counters = counters
        self._accepted = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._accepted - self._exporter.taken >= QUEUE:
            self._counters.dropped += 1
            return
        self._accepted += 1
        super().on_end(span)


class OtelTracer:
    """See `kvrelay.common.tracing.Tracer`. What is sampled elsewhere is sampled here; of the rest, `sample_ratio`."""

    enabled = True

    def __init__(self, endpoint: str, service: str, instance: str, sample_ratio: float) -> None:
        # The exporter logs each of its failures: `_Counting` says what there is to say of them.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        logging.getLogger("urllib3").setLevel(logging.WARNING)
        self.counters = SpanCounters()
        address = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        exporter = _Counting(OTLPSpanExporter(address, timeout=EXPORT_SECONDS), self.counters)
        about = {
            "service.name": service,
            "service.instance.id": instance,
            "service.version": importlib.metadata.version("kvrelay"),
        }
        self._provider = TracerProvider(
            ParentBasedTraceIdRatio(sample_ratio), Resource.create(about), shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Bounded(exporter, self.counters))
        self._tracer = self._provider.get_tracer("kvrelay")

    def parent(self, traceparent: str) -> Span:
        found = _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context()) if traceparent else Context()
        return OtelSpan(self._tracer, trace.get_current_span(found))

    async def close(self) -> None:
        # A thread that the process need not wait for: the last export may take longer than is left.
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, CLOSE_SECONDS)
