"""The store's metrics, read from its parts when they are asked for."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.common.pod.state import PodState
from kvrelay.kvstore.node import Node

COUNTERS = {
    "hits": "Blocks read from the tier",
    "misses": "Blocks that were not there after all; of cpu, in no tier",
    "corrupt": "Blocks whose bytes were not what was stored",
    "failures": "Calls after which the tier was left alone for a while",
    "bytes_read": "Bytes of blocks read",
    "bytes_written": "Bytes of blocks written",
    "seconds_reading": "Seconds of calls that read",
    "seconds_writing": "Seconds of calls that wrote",
    "evictions": "Blocks that left for others",
    "dropped": "Blocks that left with nowhere to go",
    "refused": "Blocks not stored, for want of room",
}
GAUGES = {
    "num_blocks": "Blocks in the tier",
    "used_bytes": "Bytes in use, of what is being written and removed as well",
    "limit_bytes": "Bytes that it may use",
    "healthy": "0: the tier is left alone",
}


class KvStoreCollector(Collector):
    def __init__(self, node: Node, state: PodState) -> None:
        self._node = node
        self._state = state

    def collect(self) -> Iterator[Metric]:
        node = self._node
        reports = list(node.reports())
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"kvrelay_kvstore_{name}", text, labels=["tier"])
            for report in reports:
                counter.add_metric([report.tier], getattr(report.counters, name))
            yield counter
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvrelay_kvstore_{name.removeprefix('num_')}", text, labels=["tier"])
            for report in reports:
                gauge.add_metric([report.tier], float(getattr(report, name)))
            yield gauge
        yield GaugeMetricFamily("kvrelay_kvstore_pods", "Pods attached", value=len(node.sessions))
        yield GaugeMetricFamily("kvrelay_kvstore_pins", "Pins that pods hold", value=node.sessions.num_pins)
        yield GaugeMetricFamily("kvrelay_kvstore_writing", "Blocks being written", value=node.sessions.num_writing)
        backlog = node.announcer.backlog
        yield GaugeMetricFamily("kvrelay_kvstore_index_backlog", "Blocks the index is still to hear of", value=backlog)
        failures = node.announcer.failures
        yield CounterMetricFamily("kvrelay_kvstore_index_failures", "Times the index did not answer", value=failures)
        lookups = node.index.failures
        yield CounterMetricFamily(
            "kvrelay_kvstore_lookup_failures", "Look-ups that Redis did not answer", value=lookups
        )
        yield GaugeMetricFamily("kvrelay_kvstore_nodes", "Other nodes that are known", value=node.peers.num_nodes)
        yield GaugeMetricFamily("kvrelay_kvstore_ready", "1: the store takes pods", value=float(self._state.ready))
