"""Metrics, the same in every process."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kvrelay.common.tracing import Tracer

METRICS_TYPE: Final = CONTENT_TYPE_LATEST


def new_registry() -> CollectorRegistry:
    """A registry of this process's own, with CPU, memory and garbage collection in it."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class SpanCollector(Collector):
    def __init__(self, tracer: Tracer) -> None:
        self._counters = tracer.counters

    def collect(self) -> Iterator[Metric]:
        text = "Spans of traces, by what became of them: dropped ones were too many, failed ones the collector did not take"
        spans = CounterMetricFamily("kvrelay_trace_spans", text, labels=["outcome"])
        for outcome in ("exported", "failed", "dropped"):
            spans.add_metric([outcome], getattr(self._counters, outcome))
        yield spans


def exposition(registry: CollectorRegistry) -> bytes:
    """What /metrics answers, as METRICS_TYPE."""
    return generate_latest(registry)
