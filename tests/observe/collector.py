"""An OpenTelemetry collector's side of OTLP over HTTP, as its own package of messages reads it."""

import dataclasses
import gzip
import http.server
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from tests.waiting import eventually

Attributes = dict[str, str | int | float | bool]


@dataclasses.dataclass(frozen=True)
class Span:
    """Times in seconds of the wall clock."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: Attributes
    events: tuple[tuple[str, float, Attributes], ...]
    failed: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


def _attributes(given: Sequence[KeyValue]) -> Attributes:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in given}


def _spans(message: ExportTraceServiceRequest) -> Iterator[Span]:
    for part in message.resource_spans:
        service = str(_attributes(part.resource.attributes)["service.name"])
        for scope in part.scope_spans:
            for span in scope.spans:
                yield Span(
                    service=service,
                    name=span.name,
                    kind=SpanMessage.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes=_attributes(span.attributes),
                    events=tuple(
                        (event.name, event.time_unix_nano / 1e9, _attributes(event.attributes)) for event in span.events
                    ),
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                )


class Collector:
    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []

    def trace(self, trace_id: str, *wanted: tuple[str, str]) -> list[Span]:
        """Of one trace, once there are spans of these services and names."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace_id == trace_id]

        def seen() -> set[tuple[str, str]]:
            return {(span.service, span.name) for span in found()}

        eventually(lambda: seen() >= set(wanted), lambda: f"there are {set(wanted) - seen()} beside {seen()}")
        return found()


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
