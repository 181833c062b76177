"""What keeps a pod from doing more than it must, and its end from costing requests."""

import re

import pytest
import yaml

from tests.deploy.k8s.manifests import K8S, VARIANTS, build, of_kind, workloads

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_can_do_no_more_than_they_must(variant: str) -> None:
    for workload in workloads(build(variant)):
        spec = workload.spec
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 10_000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostIPC"} & set(spec)
        assert spec.get("hostPID", False) is (variant == "gpu+cuda-ipc" and workload.component in ("prefill", "decode"))
        for container in workload.containers:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert {"requests", "limits"} <= set(container["resources"])
            assert "memory" in container["resources"]["limits"]
            # The one that gives the node's folders to the others' user.
            is_owner = container["name"] == "own"
            assert context["capabilities"].get("add", []) == (["CHOWN"] if is_owner else [])
            assert context.get("runAsUser") == (0 if is_owner else None)
            assert container["command"][0] == "chown" if is_owner else context.get("runAsNonRoot") is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_shared_folders_come_from_the_host(variant: str) -> None:
    for workload in workloads(build(variant)):
        for volume in workload.spec["volumes"]:
            if "hostPath" in volume:
                assert volume["name"] in ("arena", "blocks")
                assert workload.component in ("prefill", "decode", "kvstore")


@pytest.mark.parametrize("variant", VARIANTS)
def test_accounts_have_no_token_and_no_rights(variant: str) -> None:
    docs = build(variant)
    accounts = of_kind(docs, "ServiceAccount")
    assert accounts
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    assert not of_kind(docs, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


def test_there_is_no_secret_in_the_files() -> None:
    files = [file for file in K8S.rglob("*") if file.is_file()]
    assert len(files) > 30
    for file in files:
        text = file.read_text()
        assert "secretGenerator" not in text, file
        assert not re.search(r"^kind: Secret$", text, re.MULTILINE), file
        assert not re.search(r"rediss?://[^ \"]*:(?!PASSWORD)[^@ \"/]+@", text), file


@pytest.mark.parametrize("variant", VARIANTS)
def test_images_have_a_version(variant: str) -> None:
    for workload in workloads(build(variant)):
        for container in workload.containers:
            image, colon, tag = container["image"].rpartition(":")
            assert colon
            assert re.match(r"\d+\.\d+\.\d+", tag), container["image"]
            assert image in (f"kvrelay/{workload.component}", "docker.io/valkey/valkey")


@pytest.mark.parametrize("variant", VARIANTS)
def test_routers_are_more_than_one_and_none_leaves_before_its_successor_is_there(variant: str) -> None:
    docs = build(variant)
    [router] = [doc for doc in of_kind(docs, "Deployment") if doc["metadata"]["name"] == "kvrelay-router"]
    scalers = [doc["spec"]["minReplicas"] for doc in of_kind(docs, "HorizontalPodAutoscaler")]
    assert router["spec"].get("replicas", min(scalers, default=0)) >= 2
    assert router["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_is_spread_and_watched(variant: str) -> None:
    for workload in workloads(build(variant)):
        container = workload.container
        assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
        if workload.component in ("router", "prefill", "decode"):
            keys = [each["topologyKey"] for each in workload.spec["topologySpreadConstraints"]]
            assert "kubernetes.io/hostname" in keys
            for each in workload.spec["topologySpreadConstraints"]:
                assert each["labelSelector"]["matchLabels"].items() <= workload.labels.items()


def test_gpus_and_hcas_are_asked_for() -> None:
    for variant, wanted in (
        ("cpu-dev", set()),
        ("gpu", {"nvidia.com/gpu"}),
        ("gpu-rdma", {"nvidia.com/gpu", "rdma/hca"}),
        ("gpu-lws", {"nvidia.com/gpu", "rdma/hca"}),
    ):
        for workload in workloads(build(variant)):
            limits = workload.container["resources"]["limits"]
            devices = {name for name in limits if "/" in name}
            assert devices == (wanted if workload.component in ("prefill", "decode") else set()), workload.name


def test_every_component_is_used_or_tried() -> None:
    used = set()
    for file in (K8S / "overlays").glob("*/kustomization.yaml"):
        used |= {path.rpartition("/")[2] for path in yaml.safe_load(file.read_text()).get("components", ())}
    tried = {variant.partition("+")[2] for variant in VARIANTS} - {""}
    assert used | tried == {folder.name for folder in (K8S / "components").iterdir()}
