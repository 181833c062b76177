"""Streams over HTTP, byte by byte; errors within them; clients that leave."""

import asyncio
import json

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from kvrelay.common.errors import DeadlineExceeded, Internal
from kvrelay.router.http import build_app, generation
from tests.router.stack import Fronts, Settings
from tests.router.stub import MODEL, SPEECH, StubRouter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
COMPLETIONS = "/v1/completions"


async def test_sse_bytes(fronts: Fronts) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "seed": 0, "stream": True, "stream_options": None}
    response = await fronts.http.post(COMPLETIONS, json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = response.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert set(first) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert first["choices"] == [{"index": 0, "text": "T", "logprobs": None, "finish_reason": None}]


async def test_an_error_in_a_stream_is_an_event_and_there_is_no_done(fronts: Fronts, stub: StubRouter) -> None:
    stub.failure, stub.fail_at = DeadlineExceeded("too late"), 2
    body = {"model": MODEL, "prompt": "x", "max_tokens": 9, "seed": 0, "stream": True}
    response = await fronts.http.post(COMPLETIONS, json=body)
    *texts, last = response.text.removesuffix("\n\n").split("\n\n")
    assert len(texts) == 2
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {"message": "too late", "type": "server_error", "param": None, "code": "deadline_exceeded"}
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]], ids=["one", "several"])
@pytest.mark.parametrize("stall_at", [0, 3])
async def test_a_client_that_leaves_ends_its_request(
    fronts: Fronts, stub: StubRouter, stream: bool, prompt: object, stall_at: int
) -> None:
    """While no token flows, too: nothing is written that could fail."""
    stub.stall_at = stall_at
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "seed": 0, "stream": stream}
    asking = asyncio.ensure_future(fronts.http.post(COMPLETIONS, json=body))
    await asyncio.wait_for(stub.stalled.wait(), 5)
    asking.cancel()
    for _ in range(len(prompt) if isinstance(prompt, list) else 1):
        await asyncio.wait_for(stub.closed.get(), 5)
    assert not stub.running
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "several"])
async def test_a_client_that_does_not_read_is_left_after_the_deadline(
    stub: StubRouter, monkeypatch: pytest.MonkeyPatch, prompt: object
) -> None:
    monkeypatch.setattr(generation, "READ_SECONDS", 0.05)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 30, "stream": True, "timeout_ms": 1}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
    never = asyncio.Event()

    async def receive() -> Message:
        if (message := next(messages, None)) is None:
            await never.wait()
        return message or {}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    app = build_app(stub, Settings(), CollectorRegistry())
    path = {"path": COMPLETIONS, "raw_path": COMPLETIONS.encode(), "query_string": b"", "root_path": ""}
    scope = {"type": "http", "method": "POST", "http_version": "1.1", "scheme": "http", "headers": [], **path}
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    assert stub.generated
    assert not stub.running


async def test_a_failed_prompt_ends_the_others(fronts: Fronts, stub: StubRouter) -> None:
    stub.failure, stub.fail_at = Internal("broken"), 0
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 400}
    response = await fronts.http.post(COMPLETIONS, json=body)
    assert response.status_code == 500
    assert not stub.running


async def test_many_streams_at_once_do_not_mix(fronts: Fronts) -> None:
    async def ask(seed: int) -> str:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 20, "seed": seed, "stream": True}
        response = await fronts.http.post(COMPLETIONS, json=body)
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and line != "data: [DONE]"]
        return "".join(event["choices"][0]["text"] for event in events)

    texts = await asyncio.gather(*(ask(seed) for seed in range(20)))
    assert texts[0] == SPEECH[:20]
    assert len(set(texts)) == 20
