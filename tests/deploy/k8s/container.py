"""What a container starts with: its variables and files, laid out in a folder, read by the service's own parser."""

import re
from collections.abc import Mapping
from pathlib import Path

from kvrelay.common.settings import ServiceSettings, parse
from kvrelay.decode.main import DecodeSettings
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.prefill.main import PrefillSettings
from kvrelay.router.settings import RouterSettings
from tests.deploy.k8s.manifests import Doc, Workload, config_map

KINDS: dict[str, type[ServiceSettings]] = {
    "kvrelay-router": RouterSettings,
    "kvrelay-prefill": PrefillSettings,
    "kvrelay-decode": DecodeSettings,
    "kvrelay-kvstore": KvStoreSettings,
}
SECRETS: Mapping[str, Mapping[str, str]] = {
    "kvrelay-api-keys": {"keys": "a-key\n"},
    "kvrelay-pod-token": {"token": "a-token\n"},
    "kvrelay-pod-tls": {"tls.crt": "a chain", "tls.key": "a key", "ca.crt": "an authority"},
    "kvrelay-redis": {"redis.yaml": "redis_url: rediss://:a-password@redis.example:6379/0\n"},
    "kvrelay-s3": {"access-key-id": "an-id\n", "secret-access-key": "a-secret\n"},
}
"""As docs/kubernetes.md has operators make them."""
FIELDS = {"status.podIP": "10.1.2.3", "spec.nodeName": "node-7.example"}
LIBRARIES = {
    "UCX_TCP_PORT_RANGE": "UCX",
    "UCX_TLS": "UCX",
    "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "libucx",
    "GOMP_SPINCOUNT": "OpenMP",
    "HOME": "Triton and CUDA, for what they have compiled",
}
"""Variables that are not this project's, and who reads them."""


def environment(workload: Workload, docs: tuple[Doc, ...]) -> dict[str, str]:
    """As the kubelet makes it."""
    container = workload.container
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= config_map(docs, source["configMapRef"]["name"])
    for entry in container.get("env", ()):
        value = entry.get("value")
        found[entry["name"]] = FIELDS[entry["valueFrom"]["fieldRef"]["fieldPath"]] if value is None else value
    return found


def settings_of(workload: Workload, docs: tuple[Doc, ...], root: Path) -> ServiceSettings:
    """Of the service, with the container's paths under `root`. Raises BadOption where it would not start."""
    [program, *flags] = workload.container["command"]
    variables = environment(workload, docs)
    paths = [mount["mountPath"] for mount in workload.container["volumeMounts"]]
    _lay_out(workload, variables, root)
    pattern = re.compile("|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True)))
    moved = {name: pattern.sub(lambda match: f"{root}{match[0]}", value) for name, value in variables.items()}
    return parse(KINDS[program], [*flags, *workload.container.get("args", ())], moved, program)


def _lay_out(workload: Workload, variables: Mapping[str, str], root: Path) -> None:
    volumes = {volume["name"]: volume for volume in workload.spec["volumes"]}
    for mount in workload.container["volumeMounts"]:
        folder = root / mount["mountPath"].lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        volume = volumes[mount["name"]]
        if "secret" in volume:
            for name, text in SECRETS[volume["secret"]["secretName"]].items():
                (folder / name).write_text(text)
        if "persistentVolumeClaim" in volume:
            model = root / variables["KVRELAY_MODEL"].lstrip("/")
            assert model.is_relative_to(folder), f"KVRELAY_MODEL is not in {mount['mountPath']}"
            model.mkdir(parents=True, exist_ok=True)
            (model / "tokenizer.json").touch()
