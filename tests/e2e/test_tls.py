"""gRPC between pods over TLS as the Kubernetes component pod-tls has it: one certificate, for a name and no address, which both sides want."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc, pod_pb2, pod_pb2_grpc
from tests.exactness.small import make
from tests.exactness.storing import all_attached, all_stored, loaded_tokens
from tests.waiting import eventually

pytestmark = pytest.mark.e2e

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "kubernetes.md"
NAME = "kvrelay-pod"


def certificates(folder: Path) -> dict[str, str]:
    """Made as operators are told to; the options of a service that listens."""
    commands = re.findall(r"^ *(openssl req (?:.*\\\n)*.*)$", DOCUMENTED.read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        subprocess.run(["sh", "-c", command], cwd=folder, check=True, capture_output=True, timeout=30)
    return {"tls-cert": f"{folder}/tls.crt", "tls-key": f"{folder}/tls.key", "tls-ca": f"{folder}/ca.crt"}


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    own = certificates(tmp_path_factory.mktemp("certificates"))
    options = StackOptions(
        model=make(tmp_path_factory.mktemp("small") / "model", model_dir),
        free_ports=True,
        prefill=2,
        kvstore=2,
        engine_options={
            "dtype": "float32",
            "kv-cache-bytes": "64MiB",
            "kvstore-load": "always",
            "kvstore-tls-ca": own["tls-ca"],
            "kvstore-tls-name": NAME,
            **own,
        },
        kvstore_options={"peer-tls-ca": own["tls-ca"], "peer-tls-name": NAME, **own},
        router_options={
            "policy": "round_robin",
            "local-prefill-tokens": "0",
            "pod-tls-name": NAME,
            **{f"pod-{option}": file for option, file in own.items()},
        },
    )
    with Stack(options, tmp_path_factory.mktemp("run")) as stack:
        eventually(lambda: all_attached(stack), lambda: f"all pods are attached: {stack.logs()}")
        yield stack


def test_routers_reach_pods_pods_their_stores_and_stores_each_other(stack: Stack) -> None:
    answers = {}
    # In turn at both prefill pods: of one of the two prompts that come twice, the second time is at the pod whose store has nothing of it.
    for first in (100, 100, 1100, 2100, 2100):
        prompt = list(range(first, first + 300))
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert answers.setdefault(first, text) == text
        eventually(lambda: all_stored(stack), "what was computed is stored")
    assert loaded_tokens(stack) > 0
    texts = [httpx.get(f"{store.http_address}/metrics").text for store in stack.kvstores]
    hits = [
        float(re.findall(r'^kvrelay_kvstore_hits_total\{tier="peer"\} (\S+)$', text, re.MULTILINE)[0]) for text in texts
    ]
    assert sum(hits) >= 18, f"blocks came out of the other node's memory: {hits}"


def test_nobody_else_is_served(stack: Stack) -> None:
    with grpc.insecure_channel(stack.decode[0].grpc_address) as channel, pytest.raises(grpc.RpcError):
        pod_pb2_grpc.PodStub(channel).GetInfo(pod_pb2.GetInfoRequest(), timeout=5)
    authority = Path(str(stack.options.kvstore_options["tls-ca"])).read_bytes()
    named = (("grpc.ssl_target_name_override", NAME),)
    without_one = grpc.ssl_channel_credentials(authority)
    with (
        grpc.secure_channel(stack.kvstores[0].grpc_address, without_one, named) as channel,
        pytest.raises(grpc.RpcError),
    ):
        kvstore_pb2_grpc.KvStoreStub(channel).Stat(pb.StatRequest(), timeout=5)
