"""Requests through real processes with a model: a trace over all of them, in a collector, and lines in their logs."""

import json
import random
import re
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any  # JSON

import grpc
import httpx
import psutil
import pytest

from kvrelay.cli.stack import Stack
from kvrelay.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.exactness.fixtures import running
from tests.exactness.small import VOCAB, make
from tests.exactness.storing import all_attached, all_stored
from tests.observe.collector import Collector, Span
from tests.observe.relay import relaying
from tests.waiting import eventually

pytestmark = pytest.mark.e2e

REQUESTS = 5
PROMPT_TOKENS, OUTPUT_TOKENS = 1500, 60
EVERYWHERE = (
    ("kvrelay-router", "request"),
    ("kvrelay-router", "decode"),
    ("kvrelay-prefill", "prefill"),
    ("kvrelay-prefill", "push"),
    ("kvrelay-decode", "reserve"),
    ("kvrelay-decode", "decode"),
)
NATIVE = re.compile(r"[IWE]\d{4} [\d:.]+ +\d+ \S+\.cc:\d+\] ")
SLACK = 0.02
"""Seconds: of clocks that are read one after the other."""


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with relaying(tmp_path_factory.mktemp("collector")) as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Stack]:
    """Two prefill pods in turn: what one has stored the other loads."""
    model = make(tmp_path_factory.mktemp("small") / "model", model_dir)
    watched = {"otlp-endpoint": collector.url, "log-format": "json", "log-level": "debug"}
    with running(
        model,
        tmp_path_factory.mktemp("run"),
        prefill=2,
        kvstore=1,
        engine_options={"kvstore-load": "always", "max-num-batched-tokens": "128", **watched},
        router_options={"local-prefill-tokens": "0", "policy": "round_robin", **watched},
    ) as stack:
        eventually(lambda: all_attached(stack), "all pods are attached")
        yield stack


def prompt(seed: int, length: int = 300) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def ask(stack: Stack, tokens: Sequence[int], trace_id: str) -> float:
    """The seconds that it took its client."""
    body = {"model": "smollm2", "prompt": tokens, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    headers = {"traceparent": f"00-{trace_id}-00000000000000ab-01"}
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        client.get("/health")  # the connection is there
        begin = time.monotonic()
        answer = client.post("/v1/completions", json={**body, "stream": True}, headers=headers)
        seconds = time.monotonic() - begin
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:]
    return seconds


class Trace:
    """Of one request: all services' spans."""

    def __init__(self, spans: Sequence[Span]) -> None:
        assert len({span.span_id for span in spans}) == len(spans)
        self._spans = spans

    def only(self, service: str, name: str) -> Span:
        [span] = [span for span in self._spans if (span.service, span.name) == (f"kvrelay-{service}", name)]
        return span

    def children(self, parent: Span, service: str) -> dict[str, Span]:
        mine = [s for s in self._spans if s.parent_id == parent.span_id and s.service == f"kvrelay-{service}"]
        assert len({span.name for span in mine}) == len(mine)
        for span in mine:
            assert parent.start - SLACK <= span.start <= span.end <= parent.end + SLACK, span
        return {span.name: span for span in mine}


def test_one_trace_shows_all_parts_of_a_request(stack: Stack, collector: Collector) -> None:
    """Router, prefill pod, push, decode pod: whose is whose child, and do their times add up to what the client measured?"""
    at_router, over_pods = [], []
    for seed in range(100, 100 + REQUESTS):
        trace_id = secrets.token_hex(16)
        seconds = ask(stack, prompt(seed, PROMPT_TOKENS), trace_id)
        told, path = check(Trace(collector.trace(trace_id, *EVERYWHERE)))
        at_router.append(told / seconds)
        over_pods.append(path / seconds)
    # One request may be held up between two spans by whatever else the machine does.
    assert statistics.median(at_router) == pytest.approx(1, abs=0.05), at_router
    assert statistics.median(over_pods) == pytest.approx(1, abs=0.05), over_pods


def check(trace: Trace) -> tuple[float, float]:
    """Seconds that the router's parts take together, and that the pods' parts take which follow one another."""
    root = trace.only("router", "request")
    assert (root.parent_id, root.kind, root.failed) == ("00000000000000ab", "server", False)
    assert root.attributes["kvrelay.status"] == "ok"
    assert root.attributes["gen_ai.usage.input_tokens"] == PROMPT_TOKENS
    assert root.attributes["gen_ai.usage.output_tokens"] == OUTPUT_TOKENS
    router = trace.children(root, "router")
    assert set(router) == {"prepare", "queue", "reserve", "prefill", "decode"}

    called = trace.only("prefill", "prefill")
    assert (called.parent_id, called.kind) == (router["prefill"].span_id, "server")
    prefill = trace.children(called, "prefill")
    assert set(prefill) - {"load"} == {"queue", "compute", "push"}
    chunks = [about["kvrelay.num_tokens"] for _, _, about in prefill["compute"].events]
    assert len(chunks) > 1, "a prompt is computed in steps of 128 tokens at most"
    assert sum(map(int, chunks)) == PROMPT_TOKENS
    assert prefill["queue"].end <= prefill["compute"].start + SLACK
    assert prefill["push"].start < prefill["compute"].end, "what is computed is pushed meanwhile"

    decode = trace.children(root, "decode")
    assert set(decode) == {"reserve", "receive", "decode"}
    assert decode["reserve"].kind == "server"
    assert decode["receive"].start <= prefill["push"].start + SLACK
    assert abs(decode["receive"].end - prefill["push"].end) < 0.1
    assert decode["decode"].start >= prefill["compute"].end - SLACK
    [(name, first, _)] = root.events
    assert name == "first token"
    assert prefill["compute"].start <= first <= decode["decode"].end

    before = router["prepare"].seconds + router["queue"].seconds + decode["reserve"].seconds
    push_after_computing = max(0.0, prefill["push"].end - prefill["compute"].end)
    computed = prefill["queue"].seconds + prefill["compute"].seconds + push_after_computing
    return sum(span.seconds for span in router.values()), before + computed + decode["decode"].seconds


def test_a_load_out_of_the_kv_store_is_a_span(stack: Stack, collector: Collector) -> None:
    tokens, loads = prompt(2), []
    for _ in range(2):
        trace_id = secrets.token_hex(16)
        ask(stack, tokens, trace_id)
        loads = [span for span in collector.trace(trace_id, *EVERYWHERE) if span.name == "load"]
        eventually(lambda: all_stored(stack), "what was computed is stored")
    [load] = [span for span in loads if span.service == "kvrelay-prefill"]
    assert [int(about["kvrelay.num_tokens"]) for _, _, about in load.events] == [288]


def test_a_call_by_grpc_is_traced(stack: Stack, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    asked = inference_pb2.GenerateRequest(
        model="smollm2", prompt="one two three " * 10, sampling=types_pb2.SamplingParams(max_tokens=2, seed=1)
    )
    with grpc.insecure_channel(stack.router.grpc_address) as channel:
        generate = inference_pb2_grpc.InferenceStub(channel).Generate
        metadata = (("traceparent", f"00-{trace_id}-00000000000000ab-01"),)
        assert list(generate(asked, timeout=20, metadata=metadata))
    root = next(s for s in collector.trace(trace_id, *EVERYWHERE) if s.name == "request")
    assert root.parent_id == "00000000000000ab"


def test_a_requests_lines_are_found_by_its_id_in_every_log(stack: Stack, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    ask(stack, prompt(3), trace_id)
    root = next(s for s in collector.trace(trace_id, *EVERYWHERE) if s.name == "request")
    request_id = root.attributes["kvrelay.request_id"]
    services: set[str] = set()
    for node in (stack.router, *stack.pods):
        for line in lines(node.process.log):
            assert {"timestamp", "level", "service", "logger", "message"} <= line.keys()
            if line.get("request_id") == request_id:
                services.add(line["service"])
                assert line.get("trace_id", trace_id) == trace_id
    assert services == {"kvrelay-router", "kvrelay-prefill", "kvrelay-decode", "kvrelay-engine"}


def test_a_pods_metrics_have_its_engines_memory_and_time(stack: Stack) -> None:
    for pod in stack.pods:
        [engine] = set(pod.pids()) - {pod.pid}
        text = httpx.get(f"{pod.http_address}/metrics", verify=False).text
        told = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("kvrelay_engine_process_"))
        process = psutil.Process(engine)
        used = process.cpu_times()
        assert float(told["kvrelay_engine_process_cpu_seconds_total"]) == pytest.approx(used.user + used.system, abs=1)
        memory = float(told["kvrelay_engine_process_resident_memory_bytes"])
        assert memory == pytest.approx(process.memory_info().rss, rel=0.1)
        assert memory > 2 * psutil.Process(pod.pid).memory_info().rss, "torch is in the engine alone"


def lines(log: Path) -> list[dict[str, Any]]:
    """Each is an object, but for what gRPC's own library writes past Python."""
    written = [line for line in log.read_text().splitlines() if not NATIVE.match(line)]
    return [json.loads(line) for line in written]
