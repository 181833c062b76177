"""The thresholds that `kvrelay plan` writes are those of the triggers that the manifests have, and nothing else of them changes."""

import copy
import json
import os
from pathlib import Path

import pytest
import yaml

from kvrelay.cli.main import main
from kvrelay.cli.plan.autoscale import Targets, write_component
from tests.deploy.k8s.manifests import K8S, Doc, build, kustomize, of_kind
from tests.deploy.k8s.test_manifests import VERSIONS, check

pytestmark = pytest.mark.integration

LOAD = ["--rate", "10", "--prompt-tokens", "4000", "--output-tokens", "300"]


def overlay(folder: Path) -> list[Doc]:
    """`gpu`, with the component in `folder`."""
    own = folder / "overlay"
    own.mkdir()
    above = os.path.relpath(K8S, os.path.realpath(own))
    content = {"namespace": "kvrelay", "resources": [f"{above}/overlays/gpu"], "components": ["../targets"]}
    (own / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return kustomize(own)


def thresholds(docs: list[Doc]) -> dict[str, float]:
    triggers = [trigger for doc in of_kind(docs, "ScaledObject") for trigger in doc["spec"]["triggers"]]
    return {trigger["name"]: float(trigger["metadata"]["threshold"]) for trigger in triggers}


def test_an_overlay_takes_a_plans_thresholds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LOAD, "--json", "--kustomize", str(tmp_path / "targets")]) == 0
    planned = json.loads(capsys.readouterr().out)["autoscaling"]
    docs = overlay(tmp_path)
    found = thresholds(docs)
    assert found == {
        "waiting-tokens": pytest.approx(planned["prefill_tokens"], abs=1),
        "router-queue": pytest.approx(max(1, planned["prefill_queued"]), abs=1),
        "kv-use": pytest.approx(planned["decode_kv_use"], abs=0.01),
        "streams": pytest.approx(planned["decode_sequences"], abs=1),
    }
    before = copy.deepcopy(build("gpu"))
    assert found.keys() == thresholds(list(before)).keys()
    assert found != thresholds(list(before))
    for scaler in of_kind([*docs, *before], "ScaledObject"):
        check(scaler, VERSIONS[-1])
        for trigger in scaler["spec"]["triggers"]:
            del trigger["metadata"]["threshold"]
    assert docs == list(before)


def test_a_trigger_that_the_manifests_do_not_have_is_found(tmp_path: Path) -> None:
    write_component(tmp_path / "targets", Targets(0.5, 1000, 2, 50, 0.5))
    file = tmp_path / "targets" / "kustomization.yaml"
    file.write_text(file.read_text().replace("waiting-tokens", "waiting-words"))
    with pytest.raises(AssertionError, match="triggers/0/name"):
        overlay(tmp_path)
