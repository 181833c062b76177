"""Every metric, label and label's value that the dashboard and the alerts name is exported by a running stack."""

import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.cli.stack import Stack
from tests.observe.deployed import ROOT, alert_queries, panel_queries, rules
from tests.observe.promql import read

pytestmark = pytest.mark.e2e

BY_PROMETHEUS = {"job", "instance"}
QUERIES = {**panel_queries(), **alert_queries()}

Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def exported(stack: Stack) -> dict[str, Labels]:
    """By sample name: the labels that it has, with their values."""
    found: dict[str, Labels] = {"up": {}}
    for node in (stack.router, *stack.pods, *stack.kvstores):
        text = httpx.get(f"{node.http_address}/metrics", verify=False).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = found.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    labels.setdefault(label, set()).add(value)
    return found


@pytest.mark.parametrize("name", QUERIES)
def test_what_is_asked_for_exists(exported: dict[str, Labels], name: str) -> None:
    query = read(QUERIES[name])
    assert query.metrics
    known = set(BY_PROMETHEUS)
    for metric, matchers in query.metrics.items():
        assert metric in exported, f"no {metric} is exported"
        known |= exported[metric].keys()
        for matcher in matchers:
            if matcher.label in BY_PROMETHEUS:
                continue
            values = exported[metric].get(matcher.label, set())
            assert values, f"{metric} has no label {matcher.label}"
            for wanted in matcher.wanted:
                assert any(re.fullmatch(wanted, value) for value in values), (
                    f"{metric}: {matcher.label} is never {wanted}"
                )
    assert query.labels <= known


def test_the_operators_page_has_every_panel_and_alert() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    panels = {name.rpartition(" ")[0] for name in panel_queries()}
    assert not {name for name in (*panels, *alert_queries()) if name not in page}


def test_each_alert_says_what_to_do() -> None:
    seen = set()
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "action"}
        # What counts over a window has waited already.
        assert "for" in rule or "increase(" in rule["expr"]
        seen.add(rule["alert"])
    assert len(seen) == len(list(rules()))
