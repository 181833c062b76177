"""Asks a stack, and looks at what its pods hold."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import grpc
import httpx

from kvrelay.cli.node import Node
from kvrelay.cli.stack import Stack
from kvrelay.v1 import pod_pb2, pod_pb2_grpc

SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    text: str
    finish_reason: str


async def complete(client: httpx.AsyncClient, prompt: Sequence[int], **options: Any) -> list[Answer]:
    """One answer a choice. Fails with the body where the status is not 200."""
    body = {"model": "smollm2", "prompt": list(prompt), "temperature": 0, "logprobs": 0, "return_token_ids": True}
    response = await client.post("/v1/completions", json={**body, **options})
    assert response.status_code == 200, response.text
    content = response.json()
    cached = content["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [
        Answer(
            tokens=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]) if choice["logprobs"] else (),
            cached_tokens=cached,
            text=choice["text"],
            finish_reason=choice["finish_reason"],
        )
        for choice in sorted(content["choices"], key=lambda choice: choice["index"])
    ]


async def ask_all(url: str, prompts: Sequence[Sequence[int]], at_once: int, **options: Any) -> list[list[Answer]]:
    """The answers in the prompts' order, `at_once` requests at a time."""
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:

        async def one(prompt: Sequence[int]) -> list[Answer]:
            async with places:
                return await complete(client, prompt, **options)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def inspect(node: Node) -> pod_pb2.InspectResponse:
    with grpc.insecure_channel(node.grpc_address) as channel:
        return pod_pb2_grpc.PodStub(channel).Inspect(pod_pb2.InspectRequest(), timeout=10)


def held(pod: pod_pb2.InspectResponse) -> list[str]:
    """What a pod still holds of requests, and what is wrong with it; empty where it is whole and idle."""
    names = ("num_requests", "num_reservations", "num_pushes", "staging_bytes")
    counts = {name: getattr(pod, name) for name in names} | {"blocks": pod.num_blocks - pod.free_blocks}
    return [*pod.violations, *(f"{name} {count}" for name, count in counts.items() if count)]


def assert_whole(nodes: Sequence[Node], seconds: float = 2.0) -> None:
    """Within `seconds` every pod holds nothing any more, and its invariants hold."""
    end = time.monotonic() + seconds
    while True:
        rest = {node.name: found for node in nodes if (found := held(inspect(node)))}
        if not rest:
            return
        assert time.monotonic() < end, f"still held: {rest}"


def payload_bytes(stack: Stack) -> int:
    """Sent so far by all pods."""
    return sum(inspect(node).transfer.payload_bytes_sent for node in stack.pods)
