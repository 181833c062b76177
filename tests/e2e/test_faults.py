"""What goes wrong, on real pods: clients that leave, deadlines, kill -9. What the failed attempt held is free at once.

Steps are at most 300 ms by the token budget; within one step and 0.7 s the blocks and leases of a failed attempt on the living
pods are free.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from kvrelay.cli.node import Node
from kvrelay.cli.stack import Stack
from kvrelay.v1 import pod_pb2, pod_pb2_grpc
from tests.exactness.fixtures import running
from tests.exactness.reference import OUTPUT_TOKENS, Reference
from tests.exactness.served import ask_all, assert_whole, inspect

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300, func_only=True)]

FREE_SECONDS = 0.3 + 0.7
PROMPT = "257 tokens"


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    router = {"local-prefill-tokens": "0"}
    engine = {"no-prefix-caching": True}
    folder = tmp_path_factory.mktemp("faults")
    with running(model_dir, folder, prefill=2, decode=2, router_options=router, engine_options=engine) as stack:
        yield stack


def hold(nodes: list[Node], point: str, after_frames: int = 0) -> None:
    for node in nodes:
        with grpc.insecure_channel(node.grpc_address) as channel:
            request = pod_pb2.SetHoldRequest(point=point, after_frames=after_frames)
            pod_pb2_grpc.PodStub(channel).SetHold(request, timeout=10)


@pytest.fixture
def held(stack: Stack) -> Iterator[Callable[[str], list[Node]]]:
    """Holds all pods that have the point; gives the pods that it concerns."""

    def act(point: str) -> list[Node]:
        nodes = stack.decode if point == "decode" else stack.prefill
        hold(nodes, point, after_frames=5)
        return nodes

    yield act
    hold([node for node in stack.pods if node.alive], "")


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what


STATES: dict[str, Callable[[Stack], bool]] = {
    "prefill": lambda stack: any(inspect(node).num_requests for node in stack.prefill),
    "push": lambda stack: (
        any(inspect(node).transfer.payload_bytes_received for node in stack.decode)
        and any(inspect(node).num_pushes for node in stack.prefill)
    ),
    "decode": lambda stack: (
        any(inspect(node).num_requests for node in stack.decode)
        and not any(inspect(node).num_requests for node in stack.prefill)
    ),
}


def body(case: Reference, **options: object) -> dict[str, object]:
    return {
        "model": "smollm2",
        "prompt": list(case.prompt),
        "temperature": 0,
        "max_tokens": OUTPUT_TOKENS,
        "return_token_ids": True,
        **options,
    }


async def gone_in(stack: Stack, state: str, case: Reference) -> None:
    """A client that leaves when its request is in this state."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
        task = asyncio.create_task(client.post("/v1/completions", json=body(case)))
        await asyncio.to_thread(until, lambda: STATES[state](stack), f"the request never was in {state}")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def twenty_more(stack: Stack, cases: dict[str, Reference]) -> None:
    chosen = list(cases.values())[:20]
    answers = asyncio.run(ask_all(stack.url, [case.prompt for case in chosen], 8, max_tokens=8))
    for case, choices in zip(chosen, answers, strict=True):
        assert choices[0].tokens == case.tokens[:8] or min(case.gaps[:8]) < 1e-4


@pytest.mark.parametrize("state", ["prefill", "push", "decode"])
def test_a_client_leaves(
    stack: Stack, held: Callable[[str], list[Node]], cases: dict[str, Reference], state: str
) -> None:
    held(state)
    asyncio.run(gone_in(stack, state, cases[PROMPT]))
    assert_whole(stack.pods, FREE_SECONDS)
    hold(stack.pods, "")
    twenty_more(stack, cases)
    assert_whole(stack.pods)


def test_a_client_leaves_before_its_reservation(stack: Stack, cases: dict[str, Reference]) -> None:
    for node in stack.decode:
        node.pause()
    try:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=stack.url, timeout=60) as client:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=body(cases[PROMPT]), timeout=0.5)

        asyncio.run(leave())
    finally:
        for node in stack.decode:
            node.resume()
    assert_whole(stack.pods, FREE_SECONDS)
    stack.wait_ready()
    twenty_more(stack, cases)
    assert_whole(stack.pods)


@pytest.mark.parametrize("state", ["prefill", "push", "decode"])
def test_a_deadline_passes(
    stack: Stack, held: Callable[[str], list[Node]], cases: dict[str, Reference], state: str
) -> None:
    held(state)
    started = time.monotonic()
    answer = httpx.post(f"{stack.url}/v1/completions", json=body(cases[PROMPT], timeout_ms=2500), timeout=30)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert 2.4 < time.monotonic() - started < 3.5
    assert_whole(stack.pods, FREE_SECONDS)
    hold(stack.pods, "")
    twenty_more(stack, cases)
    assert_whole(stack.pods)


async def events(stack: Stack, case: Reference) -> AsyncIterator[list[int]]:
    """The token ids of each event of a stream."""
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body(case, stream=True)) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                content = httpx.Response(200, text=line[6:]).json()
                assert "error" not in content, content
                for choice in content["choices"]:
                    yield choice["token_ids"]


def owner(nodes: list[Node]) -> Node:
    """Of the one request that runs."""
    return next(node for node in nodes if inspect(node).num_requests)


def stream_through(stack: Stack, case: Reference, moment: Callable[[list[int]], bool], act: Callable[[], None]) -> None:
    """A stream during which, once its tokens (or the pods) are at the moment, something happens: its tokens are as ever."""

    async def ask() -> list[int]:
        tokens: list[int] = []
        acted = False
        async for ids in events(stack, case):
            tokens += ids
            if not acted and moment(tokens):
                await asyncio.to_thread(act)
                acted = True
        assert acted, "the moment never came"
        return tokens

    case.check("the stream", asyncio.run(ask()))


def again_whole(stack: Stack, cases: dict[str, Reference]) -> None:
    """What was left serves on; then with all pods."""
    assert_whole([node for node in stack.pods if node.alive], FREE_SECONDS)
    twenty_more(stack, cases)
    gone = [node for node in stack.pods if not node.alive]
    assert len(gone) == 1
    gone[0].restart()
    stack.wait_ready()
    assert_whole(stack.pods)


def test_a_prefill_pod_is_killed_during_its_push(
    stack: Stack, held: Callable[[str], list[Node]], cases: dict[str, Reference]
) -> None:
    held("push")

    def kill() -> None:
        victim = owner(stack.prefill)
        victim.kill()
        hold([node for node in stack.prefill if node is not victim], "")

    stream_through(stack, cases[PROMPT], lambda tokens: STATES["push"](stack), kill)
    again_whole(stack, cases)


def test_a_decode_pod_is_killed_during_a_stream(stack: Stack, cases: dict[str, Reference]) -> None:
    """The stream goes on, on the other one; what was delivered is neither repeated nor lost."""
    stream_through(stack, cases[PROMPT], lambda tokens: len(tokens) >= 5, lambda: owner(stack.decode).kill())
    again_whole(stack, cases)


def test_a_pod_is_asked_to_drain(stack: Stack, cases: dict[str, Reference]) -> None:
    """SIGTERM: what runs there ends well, what comes goes elsewhere, the process leaves."""
    stream_through(stack, cases[PROMPT], lambda tokens: len(tokens) >= 3, lambda: owner(stack.decode).terminate())
    again_whole(stack, cases)
