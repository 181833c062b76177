"""A pod's metrics, read from the engine's last stats when they are asked for."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.common.errors import BY_CODE, Unavailable
from kvrelay.common.pod.state import PodState
from kvrelay.common.telemetry import new_registry
from kvrelay.engine.api import EngineClient
from kvrelay.engine.messages import EngineStats, LinkStats
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.engine.pod.routes import Routes

GAUGES = {
    "num_running": "Requests in the engine's steps",
    "num_waiting": "Requests that wait for the engine",
    "num_reservations": "Reservations that no push has filled yet",
    "num_pushes": "Pushes under way",
    "waiting_tokens": "Prompt tokens still to be computed",
    "free_blocks": "KV blocks free or evictable",
    "num_blocks": "KV blocks",
    "credits": "Requests that could start soon",
    "step_ms": "Length of the last step in milliseconds",
}
COUNTERS = {
    "num_steps": "Engine steps",
    "host_seconds": "Seconds to schedule, launch and update steps; on a CPU with their computing",
    "prompt_tokens": "Prompt tokens of admitted requests",
    "computed_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens found in the cache",
    "generated_tokens": "Tokens sampled",
    "num_preemptions": "Preemptions",
}
TRANSFER = {
    "payload_bytes_sent": "KV bytes pushed",
    "payload_bytes_received": "KV bytes taken in",
    "bytes_sent": "Bytes sent, headers and control included",
    "bytes_received": "Bytes received, headers and control included",
    "transfers_completed": "Pushes that were acknowledged",
    "transfers_failed": "Pushes that failed",
    "seconds": "Seconds from a push's first frame to its acknowledgement",
    "payload_bytes_overlapped": "KV bytes sent before the last layer was computed",
    "checksum_errors": "Frames of KV that were not what was sent",
    "transfers_cancelled": "Pushes given up because their request was over",
    "links_lost": "Connections to other pods that broke",
}
STORE = {
    "lookups": "Look-ups in the KV store",
    "hits": "Look-ups of which something was loaded",
    "declined": "Look-ups that found what was not worth loading, or what there was no room for",
    "loaded_tokens": "Prompt tokens loaded from the KV store",
    "bytes_loaded": "KV bytes loaded from the KV store",
    "load_seconds": "Seconds from a look-up to the end of its load",
    "corrupt": "Loaded blocks whose checksums were wrong",
    "timeouts": "Answers of the KV store that did not come in time",
    "stored_tokens": "Tokens whose KV went into the KV store",
    "bytes_stored": "KV bytes written into the KV store",
    "dropped_blocks": "Blocks that were lost before they could be stored",
    "refused": "Batches for parts of which the KV store had no room",
}
VLLM_GAUGES = {"num_requests_running": "num_running", "num_requests_waiting": "num_waiting"}
VLLM_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generated_tokens",
    "num_preemptions": "num_preemptions",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
}


class PodCollector(Collector):
    """The same quantities under `kvrelay_pod_` and, where dashboards know them, under vLLM's names."""

    def __init__(
        self, engine: EngineClient, state: PodState, routes: Routes, events: EventLog, model: str, role: str
    ) -> None:
        self._engine = engine
        self._state = state
        self._routes = routes
        self._events = events
        self._model = model
        self._role = role

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield self._about()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"kvrelay_pod_{name}", text, value=getattr(stats, name))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvrelay_pod_{name.removeprefix('num_')}", text, value=getattr(stats, name))
        for name, text in TRANSFER.items():
            yield CounterMetricFamily(f"kvrelay_transfer_{name}", text, value=getattr(stats.transfer, name))
        yield link_rates(stats.links)
        for name, text in STORE.items():
            yield CounterMetricFamily(f"kvrelay_pod_kvstore_{name}", text, value=getattr(stats.store, name))
        yield GaugeMetricFamily(
            "kvrelay_pod_kvstore_attached", "1: the KV store can be used", value=float(stats.store.attached)
        )
        yield GaugeMetricFamily(
            "kvrelay_pod_kvstore_waiting_blocks", "Blocks that wait to be stored", value=stats.store.waiting_blocks
        )
        yield GaugeMetricFamily("kvrelay_pod_ready", "1: the pod takes requests", value=float(self._state.ready))
        yield from self._front()
        yield from self._vllm(stats)

    def _about(self) -> Metric:
        """To join with: which role the others are of. Without a sample until the engine has started."""
        labels = ("pod_id", "role", "model_name", "transport", "attention")
        about = GaugeMetricFamily("kvrelay_pod_info", "1: what this pod is", labels=labels)
        with contextlib.suppress(Unavailable):
            info = self._engine.info
            about.add_metric((info.pod_id, self._role, self._model, info.transport, info.attention), 1)
        return about

    def _front(self) -> Iterator[Metric]:
        counters = self._routes.counters
        yield _by_code("kvrelay_pod_failures", "Requests that this pod took and failed", counters.failures)
        yield _by_code("kvrelay_pod_refusals", "Requests that this pod did not take", counters.refusals)
        yield CounterMetricFamily(
            "kvrelay_pod_revoked_tickets",
            "Reservations taken back for running requests",
            value=counters.revoked_tickets,
        )
        yield CounterMetricFamily(
            "kvrelay_pod_recomputed",
            "Prompts computed here because no push came before the ticket's deadline",
            value=counters.recomputed,
        )
        yield GaugeMetricFamily("kvrelay_pod_routers", "Routers with a token stream", value=self._routes.num_routers)
        yield CounterMetricFamily(
            "kvrelay_pod_dropped_deltas", "Outputs that no one waits for", value=counters.dropped_deltas
        )
        yield CounterMetricFamily(
            "kvrelay_pod_slow_streams", "Streams ended because their reader was too slow", value=counters.slow_streams
        )
        yield CounterMetricFamily(
            "kvrelay_pod_lost_routers", "Routers that left requests behind", value=counters.lost_routers
        )
        yield CounterMetricFamily(
            "kvrelay_pod_kv_event_batches", "Steps that changed the prefix cache", value=self._events.num_batches
        )
        yield CounterMetricFamily(
            "kvrelay_pod_kv_event_batches_dropped",
            "Of these, given up while Redis was away or too slow",
            value=self._events.num_dropped,
        )

    def _vllm(self, stats: EngineStats) -> Iterator[Metric]:
        for name, source in VLLM_GAUGES.items():
            yield self._labelled(
                GaugeMetricFamily(f"vllm:{name}", source, labels=["model_name"]), getattr(stats, source)
            )
        used = 1 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used share of KV blocks, 0 to 1", labels=["model_name"])
        yield self._labelled(usage, used)
        for name, source in VLLM_COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", source, labels=["model_name"])
            yield self._labelled(counter, getattr(stats, source))

    def _labelled(self, family: GaugeMetricFamily | CounterMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family


def link_rates(links: Iterable[LinkStats]) -> Metric:
    text = "Bytes a second of a link to a pod that KV is pushed to, as measured when it was opened"
    rates = GaugeMetricFamily("kvrelay_transfer_link_bytes_per_second", text, labels=("peer", "transport"))
    for link in links:
        rates.add_metric((link.pod_id, link.transport), link.bytes_per_second)
    return rates


def _by_code(name: str, text: str, counts: Mapping[str, int]) -> Metric:
    """Of every code there is: an error's first occurrence is an increase as well."""
    family = CounterMetricFamily(name, f"{text}, by the error's code", labels=["code"])
    for code in BY_CODE:
        family.add_metric([code], counts.get(code, 0))
    return family


def pod_registry(
    engine: EngineClient, state: PodState, routes: Routes, events: EventLog, model: str, role: str
) -> CollectorRegistry:
    registry = new_registry()
    registry.register(PodCollector(engine, state, routes, events, model, role))
    ProcessCollector(namespace="kvrelay_engine", pid=lambda: _pid(engine), registry=registry)
    return registry


def _pid(engine: EngineClient) -> int:
    """0, which no process has and which gives no samples, until there is one."""
    try:
        return engine.pid
    except Unavailable:
        return 0
