"""What a stack's pods and KV stores say of what they hold, load and store."""

import re

import grpc
import httpx

from kvrelay.cli.node import Node
from kvrelay.cli.stack import Stack
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc
from tests.waiting import eventually


def stat(store: Node) -> pb.StatResponse:
    with grpc.insecure_channel(store.grpc_address) as channel:
        return kvstore_pb2_grpc.KvStoreStub(channel).Stat(pb.StatRequest(), timeout=10)


def blocks_of(store: Node) -> list[pb.BlockRecord]:
    with grpc.insecure_channel(store.grpc_address) as channel:
        parts = kvstore_pb2_grpc.KvStoreStub(channel).List(pb.ListRequest(), timeout=10)
        return [block for part in parts for block in part.blocks]


def metric(node: Node, name: str) -> float:
    text = httpx.get(f"{node.http_address}/metrics", verify=False).text
    found = re.search(rf"^{name}(?:_total)? (\S+)$", text, re.MULTILINE)
    assert found, f"{node.name} has no metric {name}"
    return float(found[1])


def loaded_tokens(stack: Stack) -> float:
    return sum(metric(pod, "kvrelay_pod_kvstore_loaded_tokens") for pod in stack.pods)


def all_attached(stack: Stack) -> bool:
    return all(metric(pod, "kvrelay_pod_kvstore_attached") for pod in stack.pods)


def all_stored(stack: Stack) -> bool:
    return not any(metric(pod, "kvrelay_pod_kvstore_waiting_blocks") for pod in stack.pods)


def assert_store_whole(store: Node) -> None:
    """Nothing is held for anyone any more, and the store's accounts are right."""

    def whole() -> bool:
        seen = stat(store)
        return not (seen.violations or seen.num_pins or seen.num_writing)

    eventually(whole, lambda: f"the store is whole, and not {stat(store)}")
