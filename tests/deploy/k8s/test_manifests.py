"""Each overlay builds, and the API server would take each object of it: kinds and fields that do not exist fail."""

import copy
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.k8s.manifests import VARIANTS, WORKLOADS, Doc, build, of_kind, workloads
from tests.deploy.k8s.policies import selects

pytestmark = pytest.mark.integration

VERSIONS = ("1.32", "1.37")
"""The oldest and the newest that the manifests are for."""
SCHEMAS = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (yaml.safe_load(file.read_text()) for file in Path(__file__).with_name("schemas").glob("*.yaml"))
}
"""Of what extends Kubernetes."""


def check(doc: Doc, version: str) -> None:
    """Raises ValidationError of one of the two; SchemaNotFoundError for a kind that nobody knows."""
    schema = SCHEMAS.get((doc["apiVersion"], doc["kind"]))
    if schema is None:
        kubernetes_validate.validate(doc, version, strict=True)
        return
    jsonschema.validate(doc, schema)
    for template in doc["spec"].get("leaderWorkerTemplate", {}).values():
        if isinstance(template, dict):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "any"}, "template": template}
            kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(variant: str, version: str) -> None:
    docs = build(variant)
    assert len(docs) > 30
    for doc in docs:
        check(doc, version)


def test_what_is_misspelt_is_found() -> None:
    docs = build("gpu-lws")
    spoilt = 0
    for doc in docs:
        if "spec" in doc:
            wrong = copy.deepcopy(doc)
            wrong["spec"]["replcias"] = 3
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                check(wrong, VERSIONS[-1])
            spoilt += 1
    assert spoilt > 20


def test_a_kind_that_nobody_knows_is_found() -> None:
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "apps/v1", "kind": "Deploymint", "metadata": {"name": "a"}, "spec": {}}, VERSIONS[-1])


def test_a_pod_of_a_group_is_checked_as_any_pod() -> None:
    [group] = copy.deepcopy(of_kind(build("gpu-lws"), "LeaderWorkerSet"))
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["contianers"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        check(group, VERSIONS[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_object_is_there_twice_and_all_lie_in_one_namespace(variant: str) -> None:
    docs = build(variant)
    places = [(doc["kind"], doc["metadata"]["name"]) for doc in docs]
    assert len(places) == len(set(places))
    [namespace] = [doc["metadata"]["name"] for doc in of_kind(docs, "Namespace")]
    assert {doc["metadata"].get("namespace") for doc in docs if doc["kind"] != "Namespace"} == {namespace}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_an_object_names_is_there(variant: str) -> None:
    docs = build(variant)
    names = {kind: {doc["metadata"]["name"] for doc in of_kind(docs, kind)} for kind in {doc["kind"] for doc in docs}}
    used_maps = set()
    for workload in workloads(docs):
        spec = workload.spec
        assert spec["serviceAccountName"] in names["ServiceAccount"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounted = {mount["name"] for container in workload.containers for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in names["PersistentVolumeClaim"]
        used_maps |= {source["configMapRef"]["name"] for source in workload.container.get("envFrom", ())}
    assert used_maps == names["ConfigMap"]
    for scaler in of_kind(docs, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        [scaled] = [doc for doc in of_kind(docs, target["kind"]) if doc["metadata"]["name"] == target["name"]]
        assert "replicas" not in scaled["spec"], "two would say how many there are"
    for route in of_kind(docs, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                assert backend["name"] in names[backend.get("kind", "Service")]


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_find_pods(variant: str) -> None:
    docs = build(variant)
    pods = workloads(docs)
    for doc in of_kind(docs, *WORKLOADS):
        labels = doc["spec"]["template"]["metadata"]["labels"]
        assert selects(doc["spec"]["selector"], labels)
    for doc in of_kind(docs, "Service"):
        found = [pod for pod in pods if selects({"matchLabels": doc["spec"]["selector"]}, pod.labels)]
        assert found, doc["metadata"]["name"]
        for pod in found:
            numbers = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
            for port in doc["spec"]["ports"]:
                assert numbers[port["targetPort"]] == port["port"]
    for doc in of_kind(docs, "PodDisruptionBudget"):
        [pod] = [pod for pod in pods if selects(doc["spec"]["selector"], pod.labels)]
        assert pod.name in (doc["metadata"]["name"], "kvrelay")
    for monitor in of_kind(docs, "ServiceMonitor"):
        services = [
            each
            for each in of_kind(docs, "Service")
            if selects(monitor["spec"]["selector"], each["metadata"]["labels"])
        ]
        ports = [port["name"] for service in services for port in service["spec"]["ports"]]
        assert len(services) == ports.count("http") == 4
    for pool in of_kind(docs, "InferencePool"):
        [pod] = [pod for pod in pods if selects(pool["spec"]["selector"], pod.labels)]
        assert {each["number"] for each in pool["spec"]["targetPorts"]} == {
            port["containerPort"] for port in pod.container["ports"] if port["name"] == "http"
        }
