"""Every path that the manifests name answers on running services, and every metric that they read is exported."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvrelay.cli.node import Node
from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from tests.deploy.k8s.manifests import ROOT, VARIANTS, Doc, build, of_kind, ours

pytestmark = pytest.mark.e2e

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


@pytest.fixture(scope="module")
def services(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    options = StackOptions(model=model_dir, engine="fake", kvstore=1, free_ports=True)
    with Stack(options, tmp_path_factory.mktemp("run")) as stack:
        yield {
            "router": stack.router,
            "prefill": stack.prefill[0],
            "decode": stack.decode[0],
            "kvstore": stack.kvstores[0],
        }


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_probed_is_served(variant: str, services: dict[str, Node]) -> None:
    for workload in ours(build(variant)):
        for name in PROBES:
            probe = workload.container[name]["httpGet"]
            assert probe["port"] == "http"
            assert httpx.get(f"{services[workload.component].http_address}{probe['path']}").status_code == 200
        assert workload.container["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert workload.container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_what_is_scraped_and_routed_is_served(services: dict[str, Node]) -> None:
    docs = build("gpu")
    [monitor] = of_kind(docs, "ServiceMonitor")
    for endpoint in monitor["spec"]["endpoints"]:
        for node in services.values():
            assert "kvrelay_" in httpx.get(f"{node.http_address}{endpoint['path']}").text
    [route] = of_kind(docs, "HTTPRoute")
    [prefix] = [match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]]
    assert httpx.get(f"{services['router'].http_address}{prefix}models").status_code == 200


def triggers(docs: tuple[Doc, ...]) -> list[Doc]:
    return [trigger["metadata"] for doc in of_kind(docs, "ScaledObject") for trigger in doc["spec"]["triggers"]]


def test_what_scales_is_measured_by_whom_it_is_asked_of(services: dict[str, Node]) -> None:
    docs = build("gpu")
    [namespace] = of_kind(docs, "Namespace")
    found = triggers(docs)
    assert len(found) == 4
    for trigger in found:
        parts = re.fullmatch(r'sum\(([a-z_:]+)\{namespace="([a-z]+)", job="kvrelay-([a-z]+)"\}\)', trigger["query"])
        assert parts is not None, trigger["query"]
        metric, asked, job = parts.groups()
        assert asked == namespace["metadata"]["name"]
        text = httpx.get(f"{services[job].http_address}/metrics").text
        assert re.search(rf"^{metric}(\{{| )", text, re.MULTILINE), f"{job} has no {metric}"


def test_what_operators_are_told_to_look_at_is_measured(services: dict[str, Node]) -> None:
    named = set(re.findall(r"`((?:kvrelay_|vllm:)[a-z_]+)`", (ROOT / "docs" / "kubernetes.md").read_text()))
    assert len(named) >= 6
    texts = [httpx.get(f"{node.http_address}/metrics").text for node in services.values()]
    missing = {name for name in named if not any(re.search(rf"^{name}(\{{| )", text, re.MULTILINE) for text in texts)}
    assert missing == {"vllm:lora_requests_info"}, "and that one is said to be missing"
