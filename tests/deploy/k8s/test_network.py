"""What must talk may, and nothing else may. UCX keeps to the ports that are open."""

import os
import subprocess
import sys

import pytest

from tests.deploy.k8s.container import environment
from tests.deploy.k8s.manifests import VARIANTS, Workload, build, of_kind, ours, workloads
from tests.deploy.k8s.policies import allowed

pytestmark = pytest.mark.integration

RPC = {
    ("router", "prefill"): 9100,
    ("router", "decode"): 9200,
    ("prefill", "kvstore"): 9300,
    ("decode", "kvstore"): 9300,
    ("kvstore", "kvstore"): 9300,
}
UCX = {("prefill", "decode"), ("decode", "prefill"), ("kvstore", "kvstore")}
"""KV goes one way; its connections go both."""


def by_component(variant: str) -> dict[str, Workload]:
    found = {each.component: each for each in workloads(build(variant))}
    stranger = Workload("Pod", "stranger", "stranger", {"app": "stranger"}, {"containers": [{"ports": []}]})
    return {**found, "stranger": stranger}


def ucx_ports(variant: str, component: str) -> tuple[int, int]:
    [workload] = [each for each in ours(build(variant)) if each.component == component]
    first, _, last = environment(workload, build(variant))["UCX_TCP_PORT_RANGE"].partition("-")
    return int(first), int(last)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_must_talk_may_and_nothing_else(variant: str) -> None:
    docs, pods = build(variant), by_component(variant)
    ports = sorted({*RPC.values(), *ucx_ports(variant, "decode"), 6379, 9101, 9201, 9301, 22, 20500, 21000})
    for (source, target), port in ((pair, port) for pair in _pairs(pods) for port in ports):
        wanted = RPC.get((source, target)) == port
        wanted |= (source, target) in UCX and _within(port, ucx_ports(variant, target))
        wanted |= target == "redis" and port == 6379 and source in ("router", "prefill", "decode", "kvstore")
        assert allowed(docs, pods[source], pods[target], port) is wanted, f"{source} to {target}, port {port}"


def _pairs(pods: dict[str, Workload]) -> list[tuple[str, str]]:
    """A stranger of the same namespace tries as well."""
    return [(source, target) for source in pods for target in pods if target != "stranger"]


def _within(port: int, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= port <= bounds[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_clients_reach_the_router_and_prometheus_the_metrics(variant: str) -> None:
    docs, pods = build(variant), by_component(variant)
    specs = [policy["spec"] for policy in of_kind(docs, "NetworkPolicy")]
    [router] = [
        spec for spec in specs if spec["podSelector"].get("matchLabels") == _label("router") and "ingress" in spec
    ]
    open_ports = {port["port"] for rule in router["ingress"] if "from" not in rule for port in rule["ports"]}
    assert open_ports == {port["containerPort"] for port in pods["router"].container["ports"]}
    [metrics] = [policy for policy in of_kind(docs, "NetworkPolicy") if policy["metadata"]["name"] == "kvrelay-metrics"]
    [rule] = metrics["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == ["http"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    [monitored] = metrics["spec"]["podSelector"]["matchExpressions"]
    assert set(monitored["values"]) == {"prefill", "decode", "kvstore"}


def _label(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/component": component}


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_can_be_looked_up(variant: str) -> None:
    [dns] = [doc for doc in of_kind(build(variant), "NetworkPolicy") if doc["metadata"]["name"] == "kvrelay-dns"]
    assert dns["spec"]["podSelector"] == {}
    assert {(port["protocol"], port["port"]) for port in dns["spec"]["egress"][0]["ports"]} == {
        ("UDP", 53),
        ("TCP", 53),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_redis_and_s3_of_elsewhere_can_be_reached_from_who_needs_them(variant: str) -> None:
    docs = build(variant)
    outward = {
        (policy["metadata"]["name"], port["port"])
        for policy in of_kind(docs, "NetworkPolicy")
        for rule in policy["spec"].get("egress", ())
        if any("ipBlock" in peer for peer in rule.get("to", ()))
        for port in rule["ports"]
    }
    volumes = {volume["name"] for workload in ours(docs) for volume in workload.spec["volumes"]}
    expected = {"redis": ("kvrelay-to-redis", 6379), "s3": ("kvrelay-to-s3", 443)}
    assert outward == {place for name, place in expected.items() if name in volumes}


LISTEN = """
import os, sys
from kvrelay.transfer.ucx import UcxTransport
import asyncio

async def main():
    transport = UcxTransport()
    transport.start(None)
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    mine = {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    print(*[int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in mine])
    await transport.close()

asyncio.run(main())
"""


def test_ucx_listens_within_the_range_that_it_is_given() -> None:
    low, high = ucx_ports("cpu-dev", "decode")
    env = {**os.environ, "UCX_TCP_PORT_RANGE": f"{low}-{high}"}
    done = subprocess.run([sys.executable, "-c", LISTEN], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    ports = [int(port) for port in done.stdout.split()]
    assert ports
    assert all(low <= port <= high for port in ports)
