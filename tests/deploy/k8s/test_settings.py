"""Each container starts with what it is given: commands, flags, variables and files, read by the service's own parser."""

import tomllib
from pathlib import Path

import pytest

from kvrelay.common.pod.settings import ListenerSettings
from kvrelay.common.settings import BadOption
from kvrelay.engine.pod.server import STOP_SECONDS
from kvrelay.engine.pod.settings import PodSettings
from kvrelay.kvstore.settings import CpuTier, FileTier, KvStoreSettings, S3Tier
from kvrelay.router.main import CLOSE_SECONDS
from kvrelay.router.settings import RouterSettings
from tests.deploy.k8s.container import KINDS, LIBRARIES, SECRETS, environment, settings_of
from tests.deploy.k8s.manifests import ROOT, VARIANTS, Workload, build, of_kind, ours

pytestmark = pytest.mark.integration

CLOSING_SECONDS = STOP_SECONDS + CLOSE_SECONDS + 2
"""Of what comes after a drain: streams, engine, store and HTTP side."""
UNITS = {"Mi": 1 << 20, "Gi": 1 << 30}


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def find(variant: str, component: str) -> Workload:
    [found] = [each for each in ours(build(variant)) if each.component == component]
    return found


def settings(variant: str, component: str, root: Path) -> RouterSettings | ListenerSettings:
    found = settings_of(find(variant, component), build(variant), root)
    assert isinstance(found, RouterSettings | ListenerSettings)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_four_services_are_there_by_their_commands(variant: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    commands = {each.component: each.container["command"] for each in ours(build(variant))}
    assert commands == {name: [f"kvrelay-{name}"] for name in ("router", "prefill", "decode", "kvstore")}
    assert {command for [command] in commands.values()} == set(KINDS) <= set(scripts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("component", ["router", "prefill", "decode", "kvstore"])
def test_a_container_starts_with_what_it_is_given(variant: str, component: str, tmp_path: Path) -> None:
    workload = find(variant, component)
    found = settings(variant, component, tmp_path)
    assert type(found) is KINDS[workload.container["command"][0]]
    assert found.host == "0.0.0.0"
    given = environment(workload, build(variant))
    assert {name for name in given if not name.startswith("KVRELAY_")} <= set(LIBRARIES)
    if "HOME" in given:
        assert given["HOME"] in [mount["mountPath"] for mount in workload.container["volumeMounts"]]
    ports = {port["name"]: port["containerPort"] for port in workload.container["ports"]}
    if isinstance(found, RouterSettings):
        assert ports == {"http": found.http_port, "grpc": found.grpc_port}
        assert found.api_keys == ("a-key",)
        assert found.pod_access().metadata == (("authorization", "Bearer a-token"),)
    else:
        assert ports == {"http": found.listen_http, "grpc": found.listen_grpc}
        assert found.token == "a-token"
        assert found.advertise_host == "10.1.2.3"
    external = any(volume["name"] == "redis" for volume in workload.spec["volumes"])
    assert found.redis_url == (
        "rediss://:a-password@redis.example:6379/0" if external else "redis://kvrelay-redis:6379/0"
    )


def test_a_setting_that_no_service_has_is_found(tmp_path: Path) -> None:
    docs = build("cpu-dev")
    workload = find("cpu-dev", "kvstore")
    workload.container["env"].append({"name": "KVRELAY_MODEL", "value": "/models/model"})
    try:
        with pytest.raises(BadOption, match="KVRELAY_MODEL"):
            settings_of(workload, docs, tmp_path)
    finally:
        workload.container["env"].pop()


@pytest.mark.parametrize("variant", VARIANTS)
def test_secrets_are_files_and_all_of_them_documented(variant: str) -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    named = set()
    for workload in ours(build(variant)):
        for volume in workload.spec["volumes"]:
            if "secret" in volume:
                named.add(volume["secret"]["secretName"])
                assert volume["secret"]["defaultMode"] == 0o440
        for entry in workload.container["env"]:
            assert "secretKeyRef" not in entry.get("valueFrom", {}), entry["name"]
    assert {"kvrelay-api-keys", "kvrelay-pod-token"} <= named <= set(SECRETS)
    for name in named:
        assert f"secret generic {name} " in text
        for key in SECRETS[name]:
            assert f"--from-file={key}" in text or f"--from-literal={key}" in text


def test_certificates_are_for_the_one_name_that_all_callers_want(tmp_path: Path) -> None:
    [router, prefill, decode, kvstore] = (
        settings("gpu+pod-tls", name, tmp_path / name) for name in ("router", "prefill", "decode", "kvstore")
    )
    assert isinstance(router, RouterSettings)
    assert isinstance(prefill, PodSettings)
    assert isinstance(decode, PodSettings)
    assert isinstance(kvstore, KvStoreSettings)
    assert router.pod_tls_ca is not None
    assert router.pod_tls_cert is not None
    assert kvstore.peer_tls_ca is not None
    for pod in (prefill, decode):
        assert pod.kvstore_tls_ca is not None
    for listener in (prefill, decode, kvstore):
        assert listener.tls_cert is not None
        assert listener.tls_ca is not None, "who has no certificate may call"
    names = {router.pod_tls_name, prefill.kvstore_tls_name, decode.kvstore_tls_name, kvstore.peer_tls_name}
    [name] = names
    assert f"DNS:{name}" in (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("component", ["router", "prefill", "decode", "kvstore"])
def test_a_drain_ends_before_the_pod_is_killed(variant: str, component: str, tmp_path: Path) -> None:
    workload = find(variant, component)
    found = settings(variant, component, tmp_path)
    before = workload.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert (before > 0) is isinstance(found, RouterSettings)
    if isinstance(found, RouterSettings):
        drain = found.drain_ms / 1000
    else:
        assert isinstance(found, PodSettings | KvStoreSettings)
        drain = found.grace_seconds
    assert workload.spec["terminationGracePeriodSeconds"] >= before + drain + CLOSING_SECONDS


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_share_the_memory_of_their_nodes_store(variant: str, tmp_path: Path) -> None:
    docs = build(variant)
    store = settings(variant, "kvstore", tmp_path / "kvstore")
    assert isinstance(store, KvStoreSettings)
    arena = str(store.arena_directory).removeprefix(str(tmp_path / "kvstore"))
    host_paths, users = set(), set()
    for component in ("kvstore", "prefill", "decode"):
        workload = find(variant, component)
        [mount] = [each for each in workload.container["volumeMounts"] if each["mountPath"] == arena]
        assert not mount.get("readOnly", False)
        [volume] = [each for each in workload.spec["volumes"] if each["name"] == mount["name"]]
        host_paths.add(volume["hostPath"]["path"])
        users.add(workload.spec["securityContext"]["runAsUser"])
    assert len(host_paths) == len(users) == 1
    assert host_paths.pop().startswith(("/dev/shm/", "/run/")), "not a memory file system"

    for component in ("prefill", "decode"):
        pod = settings(variant, component, tmp_path / component)
        assert isinstance(pod, PodSettings)
        host, _, port = pod.kvstore.partition(":")
        [service] = [each for each in of_kind(docs, "Service") if each["metadata"]["name"] == host]
        assert service["spec"]["internalTrafficPolicy"] == "Local", "it would be another node's"
        assert service["spec"]["selector"].items() <= find(variant, "kvstore").labels.items()
        assert int(port) == store.listen_grpc


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_store_has_the_memory_and_the_folders_of_its_tiers(variant: str, tmp_path: Path) -> None:
    workload = find(variant, "kvstore")
    store = settings(variant, "kvstore", tmp_path)
    assert isinstance(store, KvStoreSettings)
    assert store.node_id == "node-7.example"
    mounts = {each["mountPath"]: each for each in workload.container["volumeMounts"]}
    volumes = {each["name"]: each for each in workload.spec["volumes"]}
    for tier in store.tiers:
        match tier:
            case CpuTier():
                for kind in ("requests", "limits"):
                    room = bytes_of(workload.container["resources"][kind]["memory"]) - tier.bytes
                    assert room >= 256 << 20, f"{kind} do not hold the memory tier"
            case FileTier():
                [path] = [path for path in mounts if tier.directory.is_relative_to(tmp_path / path.lstrip("/"))]
                assert not mounts[path].get("readOnly", False)
                assert "hostPath" in volumes[mounts[path]["name"]]
            case S3Tier():
                assert tier.credential("access_key_id") == "an-id"
                assert tier.credential("secret_access_key") == "a-secret"
    assert ("s3" in volumes) is any(isinstance(tier, S3Tier) for tier in store.tiers)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("component", ["prefill", "decode"])
def test_an_engine_runs_on_what_the_pod_asks_for(variant: str, component: str, tmp_path: Path) -> None:
    limits = find(variant, component).container["resources"]["limits"]
    found = settings(variant, component, tmp_path)
    assert isinstance(found, PodSettings)
    assert found.device == ("cuda" if "nvidia.com/gpu" in limits else "cpu")
    if found.device == "cpu":
        assert found.threads == int(limits["cpu"]), "the engine would take all of the machine's cores"
