"""Spans of a router and pods in this process: what is sampled, what failures look like, and a collector that is not there."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvrelay.cli.ports import free_ports
from kvrelay.common import otel
from kvrelay.common.errors import DeadlineExceeded
from kvrelay.common.otel import OtelTracer
from tests.observe.collector import Collector, Span, collecting
from tests.router.cluster import Local, collect, source, until

pytestmark = pytest.mark.integration

TRACE = "0af7651916cd43dd8448eb211c80319c"
ABOVE = f"00-{TRACE}-b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@contextlib.asynccontextmanager
async def cluster(model: Path, endpoint: str, ratio: float = 1.0, **decode: object) -> AsyncIterator[Local]:
    local = Local(model)
    await local.add("p0", "prefill", otlp_endpoint=endpoint)
    await local.add("d0", "decode", otlp_endpoint=endpoint, **decode)
    await local.start(otlp_endpoint=endpoint, trace_sample_ratio=ratio)
    try:
        yield local
    finally:
        await local.close()


async def ask(local: Local, traceparent: str = "", **fields: object) -> None:
    prepared = await local.router.prepare(source(temperature=0.0, max_tokens=4, traceparent=traceparent, **fields))
    await collect(local.router, prepared)


async def spans_of(collector: Collector, name: str, count: int = 1) -> list[Span]:
    """Waits in this loop, where pods run."""

    def found() -> list[Span]:
        return [span for span in collector.spans if span.name == name]

    await until(lambda: len(found()) >= count)
    return found()


async def test_without_a_traceparent_the_ratio_decides(model_dir: Path, collector: Collector) -> None:
    async with cluster(model_dir, collector.url, ratio=0.5) as local:
        for _ in range(40):
            await ask(local)
    roots = [span for span in collector.spans if span.name == "request"]
    assert 5 < len(roots) < 35
    assert {span.parent_id for span in roots} == {""}
    assert len({span.trace_id for span in roots}) == len(roots)
    # Pods follow: all of a trace or nothing.
    for name in ("queue", "compute", "push", "receive"):
        found = {span.trace_id for span in collector.spans if span.name == name}
        assert found == {span.trace_id for span in roots}, name


@pytest.mark.parametrize(("flags", "ratio", "traced"), [("01", 0.0, True), ("00", 1.0, False)])
async def test_a_client_decides_by_its_traceparent(
    model_dir: Path, collector: Collector, flags: str, ratio: float, traced: bool
) -> None:
    async with cluster(model_dir, collector.url, ratio=ratio) as local:
        await ask(local, f"{ABOVE}-{flags}")
    assert bool(collector.spans) is traced
    assert {span.trace_id for span in collector.spans} <= {TRACE}


@pytest.mark.parametrize("given", ["nonsense", "00-0-0-01", f"ff-{TRACE}-b7ad6b7169203331-01", "é"])
async def test_a_traceparent_that_is_none_begins_a_trace(model_dir: Path, collector: Collector, given: str) -> None:
    async with cluster(model_dir, collector.url) as local:
        await ask(local, given)
    [root] = [span for span in collector.spans if span.name == "request"]
    assert (root.parent_id, root.trace_id == TRACE) == ("", False)


async def test_a_prompt_that_the_decode_pod_computes(model_dir: Path, collector: Collector) -> None:
    async with cluster(model_dir, collector.url) as local:
        await ask(local, prompt=(5, 6, 7))
    here = [span.name for span in collector.spans if span.service == "kvrelay-decode"]
    assert sorted(here) == ["compute", "decode", "queue", "reserve"]
    assert not [span for span in collector.spans if span.service == "kvrelay-prefill" or span.name == "prefill"]


async def test_a_request_whose_time_is_over(model_dir: Path, collector: Collector) -> None:
    async with cluster(model_dir, collector.url) as local:
        await local.pods["p0"].engine.set_hold("prefill")
        with pytest.raises(DeadlineExceeded):
            await ask(local, timeout_ms=300)
        [root] = await spans_of(collector, "request")
        assert root.failed
        assert root.attributes["error.type"] == root.attributes["kvrelay.status"] == "deadline_exceeded"
        [call, served] = sorted(await spans_of(collector, "prefill", 2), key=lambda span: span.kind)
        assert (call.kind, served.kind, served.parent_id) == ("client", "server", call.span_id)
        assert call.attributes["kvrelay.cancelled"] is True
        [waited] = [span for span in await spans_of(collector, "queue", 2) if span.service == "kvrelay-prefill"]
        assert (waited.parent_id, waited.seconds > 0.2) == (served.span_id, True)


async def test_each_attempt_has_spans_of_its_own(model_dir: Path, collector: Collector) -> None:
    """The first push does not come in time, and its reservation fails."""
    async with cluster(model_dir, collector.url, ticket_timeout_ms=100, on_ticket_expiry="fail") as local:
        await local.pods["p0"].engine.set_hold("push")
        asking = asyncio.create_task(ask(local))
        await until(lambda: local.pods["d0"].pod._routes.counters.failures["transfer_failed"] > 0)
        await local.pods["p0"].engine.set_hold("")
        await asking
    reserved = [span for span in collector.spans if (span.service, span.name) == ("kvrelay-decode", "reserve")]
    received = [span for span in collector.spans if span.name == "receive"]
    attempts = {span.attributes["kvrelay.attempt"] for span in reserved}
    assert len(attempts) > 1
    assert {span.attributes["kvrelay.attempt"] for span in received} == attempts
    [root] = [span for span in collector.spans if span.name == "request"]
    assert (root.failed, root.attributes["kvrelay.status"]) == (False, "ok")


async def test_a_dead_collector_costs_a_counter(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    [port] = free_ports(1)
    caplog.set_level(logging.INFO)
    async with cluster(model_dir, f"http://127.0.0.1:{port}") as local:
        for _ in range(3):
            await ask(local)
        closing = time.monotonic()
    assert time.monotonic() - closing < 3 * otel.CLOSE_SECONDS + 3
    counters = local.router._tracer.counters
    await until(lambda: counters.failed > 0)
    assert counters.exported == 0
    told = [record for record in caplog.records if record.name == otel.__name__]
    assert len(told) == 3, "each process says it once"
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_more_spans_than_wait_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "QUEUE", otel.BATCH)
    [port] = free_ports(1)
    tracer = OtelTracer(f"http://127.0.0.1:{port}", "test", "one", 1.0)
    for _ in range(5 * otel.BATCH):
        tracer.parent("").child("span").end()
    await tracer.close()
    counters = tracer.counters
    assert counters.dropped > 0
    assert counters.failed + counters.dropped <= 5 * otel.BATCH
