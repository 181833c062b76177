"""The HTTP front, to the letter: what is refused and how, headers, bodies."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from kvrelay.common.errors import Internal, InvalidRequest
from kvrelay.router.http import asgi
from kvrelay.router.http.parse import parse
from kvrelay.router.http.schemas import CompletionBody
from kvrelay.router.job import Readiness
from tests.router.answers import from_error
from tests.router.stack import MAX_BODY, Fronts, Settings, fronts_of
from tests.router.stub import MODEL, StubRouter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
BAD_CODES = ("invalid_request", "unsupported", "context_length_exceeded")


async def refused(fronts: Fronts, path: str, body: bytes | dict[str, Any]) -> tuple[str, str | None, str]:
    """The error's code, field and message."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await fronts.http.post(path, content=data)
    answer = from_error(response)
    return answer.error, answer.param, response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("temperature", '"0.5"', "temperature"),
        ("temperature", "true", "temperature"),
        ("temperature", "NaN", "temperature"),
        ("temperature", "-Infinity", "temperature"),
        ("temperature", "1e999", "temperature"),
        ("temperature", "1" + "0" * 400, "temperature"),
        ("max_tokens", "true", "max_tokens"),
        ("max_tokens", "1.5", "max_tokens"),
        ("max_tokens", "1e400", "max_tokens"),
        ("max_tokens", "9" * 5000, "max_tokens"),
        ("max_tokens", "99999999999999999999999", "max_tokens"),
        ("max_tokens", "-1", "max_tokens"),
        ("n", '"2"', "n"),
        ("n", "99999999999999999999", "n"),
        ("seed", "1e3", "seed"),
        ("seed", str(2**63), "seed"),
        ("stream", "1", "stream"),
        ("stop", "5", "stop"),
        ("stop", '["a", 1]', "stop[1]"),
        ("stop", json.dumps(["x"] * 10_000), "stop"),
        ("logit_bias", '{"a": 1}', "logit_bias"),
        ("logit_bias", '{"1": "x"}', "logit_bias"),
        ("logit_bias", '{"1": NaN}', "logit_bias"),
        ("logit_bias", "[1]", "logit_bias"),
        ("logit_bias", '{"99999999999999999999": 1}', "logit_bias"),
        ("stop_token_ids", "[true]", "stop_token_ids[0]"),
        ("stop_token_ids", "[-1]", "stop_token_ids"),
        ("priority", "99999999999", "priority"),
        ("timeout_ms", "0", "timeout_ms"),
        ("timeout_ms", "-5", "timeout_ms"),
        ("stream_options", '{"include_usage": true}', "stream_options"),
        ("stream_options", '{"what": 1}', "stream_options"),
        ("user", "7", "user"),
        ("user", '"\\ud800"', "user"),
        ("response_format", '{"type": "json_object"}', "response_format"),
        ("guided_json", "{}", "guided_json"),
        ("use_beam_search", "true", "use_beam_search"),
        ("request_id", '"a\\nb"', "request_id"),
        ("model", "5", "model"),
        ("model", "null", "model"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_fields_are_named(
    fronts: Fronts, stub: StubRouter, path: str, field: str, value: str, param: str
) -> None:
    body = {"model": MODEL, **({"prompt": "x"} if path == COMPLETIONS else {"messages": [USER]})}
    body.pop(field, None)
    raw = json.dumps(body)[:-1] + f', "{field}": {value}}}'
    code, named, message = await refused(fronts, path, raw.encode())
    assert code in BAD_CODES
    assert named == param
    assert len(message) < 1000
    assert stub.generated == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("best_of", 3),
        ("best_of", 1),
        ("logprobs", True),
        ("logprobs", 21),
        ("echo", "yes"),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [""]),
        ("prompt", {"text": "x"}),
        ("prompt", [1, "a"]),
        ("prompt", ["a", [1]]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [300]),
        ("prompt", [2**32 + 5]),
        ("prompt", [2**80]),
        ("prompt", [[1], [2**33]]),
        ("prompt", ["x"] * 257),
        ("prompt", "long " * 1000),
        ("prompt", ["fits", "long " * 1000]),
    ],
)
async def test_bad_completion_fields(fronts: Fronts, stub: StubRouter, field: str, value: object) -> None:
    code, param, _ = await refused(fronts, COMPLETIONS, {"model": MODEL, "prompt": "x", "n": 2, field: value})
    assert code in BAD_CODES
    assert param is not None
    assert param.split("[")[0] == field
    assert stub.generated == []


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
        ("tools", {}, "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("functions", [{"name": "f"}], "functions"),
        ("audio", {"voice": "alloy", "format": "wav"}, "audio"),
        ("modalities", ["text", "audio"], "modalities"),
        ("prediction", {"type": "content", "content": "x"}, "prediction"),
        ("reasoning_effort", "high", "reasoning_effort"),
        ("web_search_options", {}, "web_search_options"),
        ("response_format", {"type": "json_schema", "json_schema": {}}, "response_format"),
        ("chat_template", "{{x}}", "chat_template"),
        ("logprobs", 5, "logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
        ("max_completion_tokens", 10_000, "max_completion_tokens"),
        ("metadata", {"a": 1}, "metadata"),
        ("service_tier", "gold", "service_tier"),
        ("messages", [], "messages"),
        ("messages", "Hi", "messages"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [USER, {"role": "user"}], "messages[1].content"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("messages", [{"role": "user", "content": [{}]}], "messages[0].content[0].type"),
        ("messages", [{"role": "assistant", "content": "", "tool_calls": [1]}], "messages[0].tool_calls"),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ("messages", [{**USER, "mood": "good"}], "messages[0]"),
        ("messages", [{"role": "user", "content": "long " * 1000}], "messages"),
    ],
)
async def test_bad_chat_fields(fronts: Fronts, stub: StubRouter, field: str, value: object, param: str) -> None:
    code, named, _ = await refused(fronts, CHAT, {"model": MODEL, "messages": [USER], field: value})
    assert code in BAD_CODES
    assert named == param
    assert stub.generated == []


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}, "tool_choice": "none", "modalities": ["text"], "service_tier": "auto"},
        {"user": "u", "store": False, "metadata": {}, "prompt_cache_key": "k", "safety_identifier": "s"},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "seed": None, "logit_bias": None, "tools": None},
        {"tools": [], "functions": [], "tool_choice": "auto"},
        {"logprobs": False, "top_logprobs": 0, "stream": False, "stream_options": None},
        {"logprobs": True, "top_logprobs": 20, "logit_bias": {"5": -100}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        {"max_tokens": 3, "max_completion_tokens": 2},
    ],
)
async def test_accepted_chat_fields(fronts: Fronts, fields: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [USER], "max_tokens": 2, **fields}
    response = await fronts.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 2


async def test_unknown_fields_are_refused_as_openai_does(fronts: Fronts) -> None:
    body = {"model": MODEL, "prompt": "x", "flavour": "salty"}
    assert await refused(fronts, COMPLETIONS, body) == (
        "invalid_request",
        None,
        "Unrecognized request argument supplied: flavour",
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"%s": 1}', None),
        ('{"messages": [{"role": "%s", "content": "x"}]}', "messages[0].role"),
        ('{"messages": [], "logit_bias": {"%s": 1}}', "logit_bias"),
    ],
    ids=["field", "value", "key"],
)
@pytest.mark.parametrize("word", ["x", " - at `$"], ids=["plain", "path"])
async def test_long_words_are_not_said_back(fronts: Fronts, body: str, param: str | None, word: str) -> None:
    error, named, message = await refused(fronts, CHAT, (body % (word * 20_000)).encode())
    assert (error, named) == ("invalid_request", param)
    assert len(message) < 2000


async def test_a_long_word_is_not_searched() -> None:
    """Other requests' tokens wait meanwhile."""
    body = b'{"' + b"x" * (4 << 20) + b'": 1}'
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="Unrecognized request argument supplied: xxx"):
        parse(body, msgspec.json.Decoder(CompletionBody))
    assert time.process_time() - begin < 0.1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"model": "stub"',
        b'{"prompt": "\xff\xfe"}',
        b"\x00\x01\x02",
        b"[" * 100_000,
        b'{"messages": [' * 10_000,
        b'{"metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"tools": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"a": 1}' * 3,
    ],
    ids=range(12),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
async def test_bodies_that_are_no_request(fronts: Fronts, path: str, body: bytes) -> None:
    code, _, message = await refused(fronts, path, body)
    assert code == "invalid_request"
    assert len(message) < 1000


async def test_of_a_field_given_twice_the_last_counts(fronts: Fronts, stub: StubRouter) -> None:
    raw = b'{"model": "stub", "prompt": "x", "max_tokens": 9, "max_tokens": 2}'
    assert (await fronts.http.post(COMPLETIONS, content=raw)).status_code == 200
    assert stub.prepared[-1].sampling.max_tokens == 2


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(30):
        yield b" " * 10_000


@pytest.mark.parametrize("content", [b"x" * (MAX_BODY + 1), None], ids=["announced", "chunked"])
async def test_a_body_over_the_limit(fronts: Fronts, content: bytes | None) -> None:
    response = await fronts.http.post(COMPLETIONS, content=_endless() if content is None else content)
    assert response.status_code == 413
    assert from_error(response).error == "request_too_large"
    assert (await fronts.http.get("/health")).status_code == 200


async def test_a_body_that_does_not_come(fronts: Fronts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODY_SECONDS", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", fronts.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await writer.wait_closed()


async def test_in_a_large_body_that_is_no_json_no_field_is_looked_for(stub: StubRouter) -> None:
    async with fronts_of(stub, Settings(max_body_bytes=1 << 20)) as fronts:
        body = b'{"model": "stub", "temperature": NaN, "prompt": "' + b"x" * 300_000 + b'"}'
        assert (await refused(fronts, COMPLETIONS, body))[1] is None


async def test_a_body_at_the_limit(fronts: Fronts) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
    response = await fronts.http.post(COMPLETIONS, content=body + b" " * (MAX_BODY - len(body)))
    assert response.status_code == 200


async def test_paths_and_methods(fronts: Fronts) -> None:
    nowhere = await fronts.http.post("/v1/embeddings", json={})
    assert (nowhere.status_code, nowhere.json()["error"]["message"]) == (404, "Invalid URL (POST /v1/embeddings)")
    wrong = await fronts.http.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["type"] == "invalid_request_error"


async def test_request_ids(fronts: Fronts) -> None:
    given = await fronts.http.get("/health", headers={"X-Request-Id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = await fronts.http.get("/nowhere", headers={"X-Request-Id": "x" * 500})
    assert made.headers["x-request-id"].startswith("req-")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "request_id": "mine"}
    assert (await fronts.http.post(COMPLETIONS, json=body)).json()["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [("500", None, 500), (None, 700, 700), ("500", 700, 500), ("900", 700, 700), (None, None, None)],
)
async def test_deadlines(
    fronts: Fronts, stub: StubRouter, header: str | None, field: int | None, expected: int | None
) -> None:
    headers = {} if header is None else {"X-Request-Timeout-Ms": header}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "timeout_ms": field}
    assert (await fronts.http.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    assert stub.prepared[-1].timeout_ms == expected


@pytest.mark.parametrize(
    ("header", "fields", "expected"),
    [
        (None, {}, ""),
        (None, {"user": "u-1"}, "u-1"),
        (None, {"user": "u-1", "prompt_cache_key": "k-1"}, "k-1"),
        ("s-1", {"user": "u-1", "prompt_cache_key": "k-1"}, "s-1"),
    ],
)
async def test_sessions(
    fronts: Fronts, stub: StubRouter, header: str | None, fields: dict[str, str], expected: str
) -> None:
    headers = {} if header is None else {"X-Session-Id": header}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    assert (await fronts.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
    assert stub.prepared[-1].session == expected


async def test_a_deadline_that_is_no_number(fronts: Fronts) -> None:
    headers = {"X-Request-Timeout-Ms": "soon"}
    response = await fronts.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"}, headers=headers)
    assert from_error(response).param == "X-Request-Timeout-Ms"


async def test_an_unexpected_error_tells_nothing(
    fronts: Fronts, stub: StubRouter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(source: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(stub, "prepare", broken)
    response = await fronts.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x"})
    assert from_error(response).error == Internal.code
    assert "secret" not in response.text
    assert "secret" in caplog.text


async def test_tokenize_and_detokenize(fronts: Fronts) -> None:
    text = {"model": MODEL, "prompt": "Hé", "return_token_strs": True}
    shape = (await fronts.http.post("/tokenize", json=text)).json()
    assert (shape["count"], shape["tokens"], shape["max_model_len"]) == (3, [72, 195, 169], 512)
    assert shape["token_strs"][0] == "H"
    chat = {"messages": [USER], "add_generation_prompt": False}
    tokens = (await fronts.http.post("/tokenize", json=chat)).json()["tokens"]
    back = await fronts.http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert back.json() == {"prompt": "<user>Hi\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
    ],
)
async def test_bad_tokenize_requests(fronts: Fronts, path: str, body: dict[str, Any], param: str) -> None:
    _, named, _ = await refused(fronts, path, body)
    assert named == param


async def test_health_and_readiness(fronts: Fronts, stub: StubRouter) -> None:
    for path in ("/health", "/healthz", "/readyz"):
        assert (await fronts.http.get(path)).status_code == 200
    stub.readiness = Readiness(ready=False, reason="no decode pod", num_prefill=2)
    waiting = await fronts.http.get("/readyz")
    assert waiting.status_code == 503
    assert waiting.json() == {"ready": False, "reason": "no decode pod", "num_prefill": 2, "num_decode": 0}
    assert (await fronts.http.get("/health")).status_code == 200


async def test_metrics_count_by_route(stub: StubRouter) -> None:
    async with fronts_of(stub) as fronts:
        await _check_metrics(fronts)


async def _check_metrics(fronts: Fronts) -> None:
    await fronts.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x", "max_tokens": 1})
    await fronts.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "x", "n": 0})
    await fronts.http.get("/made/up")
    shown: httpx.Response = await fronts.http.get("/metrics")
    assert 'kvrelay_http_requests_total{route="/v1/completions",status="200"} 1.0' in shown.text
    assert 'kvrelay_http_errors_total{code="invalid_request"} 1.0' in shown.text
    assert 'kvrelay_http_requests_total{route="none",status="404"} 1.0' in shown.text
    assert "made" not in shown.text
