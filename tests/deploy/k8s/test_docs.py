"""docs/kubernetes.md speaks of what there is."""

import re

import pytest
import yaml

from tests.deploy.k8s.container import KINDS
from tests.deploy.k8s.manifests import K8S, OVERLAYS, ROOT, build, ours, workloads
from tests.deploy.k8s.test_manifests import VERSIONS, check

pytestmark = pytest.mark.integration

TEXT = (ROOT / "docs" / "kubernetes.md").read_text()


def test_paths_are_there() -> None:
    paths = set(re.findall(r"deploy/k8s/[a-z0-9/.-]*[a-z0-9]", TEXT))
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_overlay_and_component_is_described() -> None:
    rows = set(re.findall(r"^\| `([^`]+)`", TEXT, re.MULTILINE))
    assert {f"deploy/k8s/overlays/{name}" for name in OVERLAYS} <= rows
    assert {folder.name for folder in (K8S / "components").iterdir()} <= rows


def test_variables_are_settings() -> None:
    known = {f"KVRELAY_{name.upper()}" for kind in KINDS.values() for name in kind.model_fields}
    named = set(re.findall(r"KVRELAY_[A-Z_]+", TEXT))
    assert len(named) >= 8
    assert named <= known


def test_grace_periods_are_those_of_the_manifests() -> None:
    for workload in ours(build("cpu-dev")):
        seconds = workload.spec["terminationGracePeriodSeconds"]
        assert re.search(rf"^\| {workload.component} \|.*\| {seconds} s( \(\d+ s\))? \|$", TEXT, re.MULTILINE)


def test_the_versions_are_those_that_are_tried() -> None:
    assert f"valid for Kubernetes {' and '.join(VERSIONS)}" in TEXT


def test_a_model_can_be_loaded_into_the_claim() -> None:
    loader = yaml.safe_load((K8S / "model-loader.yaml").read_text())
    for version in VERSIONS:
        check(loader, version)
    [router] = [each for each in workloads(build("cpu-dev")) if each.component == "router"]
    assert loader["spec"]["containers"][0]["image"] == router.container["image"]
    assert loader["spec"]["securityContext"] == router.spec["securityContext"]
    [volume] = loader["spec"]["volumes"]
    [claimed] = [each for each in router.spec["volumes"] if each["name"] == "model"]
    assert volume["persistentVolumeClaim"]["claimName"] == claimed["persistentVolumeClaim"]["claimName"]
    assert loader["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] == "/models"
    assert "kvrelay-model-loader:/models/smollm2" in TEXT
