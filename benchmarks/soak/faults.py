"""Pods that are killed and clients that leave, at random points, again and again on one stack.

Each time what the failed attempt held on the living pods is free within a step and 0.7 s, the client has its tokens or a typed
error, the next 20 requests succeed, and all pods are whole.
"""

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from benchmarks.soak.case import Case, Figures, Plan
from benchmarks.soak.material import references, short
from kvrelay.cli.node import Node
from kvrelay.cli.stack import Stack
from tests.e2e.test_faults import FREE_SECONDS, PROMPT, body, hold, twenty_more
from tests.exactness.fixtures import running
from tests.exactness.reference import OUTPUT_TOKENS, Reference
from tests.exactness.served import assert_whole, inspect

CLIENT_SECONDS = 60.0
POLL_SECONDS = 0.005
LEAK_SECONDS = 20.0
"""What is held for longer is lost, not late."""
FRAMES = 30
"""Of the prompt's push at least: one a layer, or more where it comes in chunks."""


@dataclass
class Answer:
    """What a client has got so far."""

    tokens: list[int] = field(default_factory=list)
    error: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Scene:
    stack: Stack
    case: Reference
    rng: random.Random

    def busy(self, nodes: list[Node]) -> list[Node]:
        return [node for node in nodes if node.alive and inspect(node).num_requests]

    def sent(self) -> int:
        return sum(inspect(node).transfer.payload_bytes_sent for node in self.stack.prefill)

    def soon(self, seconds: float) -> float:
        return self.rng.uniform(0.0, seconds)


Scenario = Callable[[Scene], str]
"""Makes one fault happen to one request, and returns how that ended for its client."""


async def _stream(scene: Scene, answer: Answer) -> None:
    """Reads the answer as it comes. Fails where it ends neither with `[DONE]` nor with a typed error."""
    async with (
        httpx.AsyncClient(base_url=scene.stack.url, timeout=CLIENT_SECONDS) as client,
        client.stream("POST", "/v1/completions", json=body(scene.case, stream=True)) as response,
    ):
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]["code"]
            return
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.ended = True
            elif line.startswith("data: "):
                content = json.loads(line[6:])
                if "error" in content:
                    answer.error = content["error"]["code"]
                else:
                    answer.tokens += [token for choice in content["choices"] for token in choice["token_ids"]]
    assert answer.ended or answer.error, f"the stream broke off after {len(answer.tokens)} tokens"


def _outcome(scene: Scene, answer: Answer) -> str:
    """Fails where a token is wrong, said twice or left out."""
    if answer.error:
        assert tuple(answer.tokens) == scene.case.tokens[: len(answer.tokens)]
        return answer.error
    scene.case.check("after the fault", answer.tokens)
    return "answered"


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + CLIENT_SECONDS
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < end, what
        await asyncio.sleep(POLL_SECONDS)


async def _through(scene: Scene, ready: Callable[[Answer], bool], act: Callable[[], None]) -> str:
    """Acts once, when the request is where it should be; the client stays."""
    answer = Answer()
    async with asyncio.TaskGroup() as group:
        group.create_task(_stream(scene, answer))
        await _until(lambda: ready(answer), "the request was never where it should be")
        await asyncio.to_thread(act)
    return _outcome(scene, answer)


async def _leaving(scene: Scene, ready: Callable[[Answer], bool], after_seconds: float) -> str:
    """The client leaves, a moment after the request is where it should be."""
    answer = Answer()
    task = asyncio.create_task(_stream(scene, answer))
    try:
        await _until(lambda: ready(answer), "the request was never where it should be")
        await asyncio.sleep(after_seconds)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return "answered before" if answer.ended else "left"


def prefill_killed(scene: Scene) -> str:
    """During its push, which is held after a random number of frames."""
    hold(scene.stack.prefill, "push", after_frames=scene.rng.randrange(1, FRAMES))
    before = scene.sent()

    def act() -> None:
        time.sleep(scene.soon(0.2))
        for node in scene.busy(scene.stack.prefill)[:1]:
            node.kill()
        hold([node for node in scene.stack.prefill if node.alive], "")

    return asyncio.run(_through(scene, lambda _: scene.sent() > before, act))


def decode_killed(scene: Scene) -> str:
    """When the client has some of its tokens."""
    count = scene.rng.randrange(1, OUTPUT_TOKENS - 4)

    def act() -> None:
        for node in scene.busy(scene.stack.decode)[:1]:
            node.kill()

    return asyncio.run(_through(scene, lambda answer: len(answer.tokens) >= count, act))


def left_before_reservation(scene: Scene) -> str:
    """The decode pods answer nothing at that time."""
    for node in scene.stack.decode:
        node.pause()
    try:
        return asyncio.run(_leaving(scene, lambda _: True, scene.soon(0.8)))
    finally:
        for node in scene.stack.decode:
            node.resume()


def left_during_prefill(scene: Scene) -> str:
    hold(scene.stack.prefill, "prefill")
    return asyncio.run(_leaving(scene, lambda _: bool(scene.busy(scene.stack.prefill)), scene.soon(0.3)))


def left_during_push(scene: Scene) -> str:
    hold(scene.stack.prefill, "push", after_frames=scene.rng.randrange(1, FRAMES))
    before = scene.sent()
    return asyncio.run(_leaving(scene, lambda _: scene.sent() > before, scene.soon(0.3)))


def left_during_decode(scene: Scene) -> str:
    count = scene.rng.randrange(1, OUTPUT_TOKENS - 4)
    return asyncio.run(_leaving(scene, lambda answer: len(answer.tokens) >= count, scene.soon(0.02)))


def _run(scenario: Scenario, plan: Plan) -> Figures:
    cases = short(references(plan))
    rng = random.Random(1)
    outcomes: Counter[str] = Counter()
    freed: list[float] = []
    with running(
        plan.model,
        plan.scratch,
        prefill=2,
        decode=2,
        threads=plan.threads,
        engine_options={"no-prefix-caching": True},
        router_options={"local-prefill-tokens": "0"},
    ) as stack:
        for _ in range(plan.repeats):
            outcomes[scenario(Scene(stack, cases[PROMPT], rng))] += 1
            freed.append(_freed(stack))
            hold([node for node in stack.pods if node.alive], "")
            twenty_more(stack, cases)
            _revive(stack)
            assert_whole(stack.pods)
    return {
        "repeats": plan.repeats,
        "outcomes": dict(outcomes),
        "seconds_until_free": {"limit": FREE_SECONDS, "median": statistics.median(freed), "max": max(freed)},
    }


def _freed(stack: Stack) -> float:
    """Seconds until the living pods hold nothing any more. Fails over the limit, and tells late from never."""
    started = time.monotonic()
    assert_whole([node for node in stack.pods if node.alive], LEAK_SECONDS)
    seconds = time.monotonic() - started
    assert seconds < FREE_SECONDS, f"what was held was free only after {seconds:.2f} s"
    return seconds


def _revive(stack: Stack) -> None:
    for node in stack.pods:
        if not node.alive:
            node.restart()
    stack.wait_ready()


SCENARIOS: dict[str, tuple[str, Scenario]] = {
    "prefill-killed": ("kill -9 of a prefill pod at a random point of its push", prefill_killed),
    "decode-killed": ("kill -9 of a decode pod at a random token of a stream", decode_killed),
    "left-before-reservation": ("a client leaves while the decode pods do not answer", left_before_reservation),
    "left-during-prefill": ("a client leaves during its prefill", left_during_prefill),
    "left-during-push": ("a client leaves at a random point of its push", left_during_push),
    "left-during-decode": ("a client leaves at a random token", left_during_decode),
}


def _case(name: str) -> Case:
    what, scenario = SCENARIOS[name]
    return Case(f"faults-{name}", what, lambda plan: _run(scenario, plan))


CASES = [_case(name) for name in SCENARIOS]
