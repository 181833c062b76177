"""Traces: what a request's time went into, over all processes. Without --otlp-endpoint all of this does nothing.

A router decides whether a request is traced, and says so to pods by W3C's `traceparent`. A span that is not recorded is NO_SPAN.
Times are those of `time.monotonic`, in seconds; None is now.
"""

import dataclasses
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Literal, Protocol, Self

TRACEPARENT: Final = "traceparent"
"""The header, and the key in gRPC's metadata."""

Kind = Literal["internal", "server", "client"]
Attribute = str | int | float | bool
Event = tuple[str, float, dict[str, Attribute]]
"""Name, time, attributes."""


class Span(Protocol):
    """Work that has a beginning and an end. As a context manager it ends there, with the error if there was one."""

    @property
    def recorded(self) -> bool: ...

    @property
    def traceparent(self) -> str:
        """For those who work on behalf of this; empty where they need not know."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, or empty."""
        ...

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        start: float | None = None,
        end: float | None = None,
        events: Iterable[Event] = (),
        **attributes: Attribute,
    ) -> "Span":
        """Runs until `end`, or until it is ended."""
        ...

    def note(self, **attributes: Attribute) -> None: ...

    def event(self, name: str, **attributes: Attribute) -> None: ...

    def end(self, error: BaseException | None = None) -> None:
        """Again is harmless."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class NoSpan:
    """Of a request that is not traced."""

    recorded = False
    traceparent = ""
    trace_id = ""

    def child(
        self,
        name: str,
        kind: Kind = "internal",
        start: float | None = None,
        end: float | None = None,
        events: Iterable[Event] = (),
        **attributes: Attribute,
    ) -> Span:
        return self

    def note(self, **attributes: Attribute) -> None:
        pass

    def event(self, name: str, **attributes: Attribute) -> None:
        pass

    def end(self, error: BaseException | None = None) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


NO_SPAN: Final = NoSpan()


@dataclasses.dataclass(slots=True)
class SpanCounters:
    exported: int = 0
    failed: int = 0
    """The collector did not take them."""
    dropped: int = 0
    """There were too many."""


class Tracer(Protocol):
    counters: SpanCounters

    @property
    def enabled(self) -> bool: ...

    def parent(self, traceparent: str) -> Span:
        """The span of another process, to begin children of. Of none, the first child begins a trace, if it is sampled."""
        ...

    async def close(self) -> None:
        """Exports what is left, within a bound."""
        ...


class NoTracer:
    enabled = False

    def __init__(self) -> None:
        self.counters = SpanCounters()

    def parent(self, traceparent: str) -> Span:
        return NO_SPAN

    async def close(self) -> None:
        pass


def make_tracer(endpoint: str | None, service: str, instance: str, sample_ratio: float = 0.0) -> Tracer:
    """`sample_ratio`: of traces that begin here. Raises Internal where OpenTelemetry is wanted and not installed."""
    if endpoint is None:
        return NoTracer()
    from kvrelay.common.otel import OtelTracer

    return OtelTracer(endpoint, service, instance, sample_ratio)
