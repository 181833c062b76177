"""The dashboards, rules and scrape configuration under deploy/, and a stack that has metrics to show."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # JSON and YAML

import grpc
import httpx
import yaml

from kvrelay.cli.stack import Stack
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "kvrelay.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yaml"
BODY = {"model": "smollm2", "prompt": "one two three " * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def panel_queries() -> dict[str, str]:
    """By the panel's title and the query's letter."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {f"{panel['title']} {each['refId']}": each["expr"] for panel in panels for each in panel.get("targets", ())}


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def alert_queries() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in rules()}


def config_for(targets: dict[str, list[str]]) -> str:
    """The committed configuration, with these targets in place of its services' names, and quick."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    assert {job["job_name"] for job in config["scrape_configs"]} == targets.keys()
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": targets[job["job_name"]]}]
    return yaml.safe_dump(config)


def serve_a_little(stack: Stack) -> None:
    """Two answers by HTTP, one refusal, one answer by gRPC."""
    with httpx.Client(base_url=stack.url, timeout=20, trust_env=False) as client:
        for _ in range(2):
            assert client.post("/v1/completions", json=BODY).status_code == 200
        assert client.post("/v1/completions", json={**BODY, "model": "other"}).status_code == 404
    with grpc.insecure_channel(stack.router.grpc_address) as channel:
        asked = inference_pb2.GenerateRequest(model="smollm2", prompt=str(BODY["prompt"]))
        assert list(inference_pb2_grpc.InferenceStub(channel).Generate(asked, timeout=20))
