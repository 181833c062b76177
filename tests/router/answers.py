"""Answers of both fronts in one form, to be compared."""

import dataclasses
import json
from typing import Any

import grpc.aio
import httpx

from kvrelay.common.errors import BY_CODE, InvalidRequest, error_from, status_of
from kvrelay.common.rpc import from_rpc_error
from kvrelay.common.wire import finish_from_proto
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, types_pb2
from tests.router.cases import Case

Logprob = tuple[float, tuple[float, ...]]
"""Of a position: the chosen token's, and the most likely ones', best first."""


@dataclasses.dataclass
class Choice:
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    stop_reason: str = ""
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Answer:
    """`error` is empty, or the error's code and field."""

    choices: dict[int, Choice] = dataclasses.field(default_factory=dict)
    prompt_token_ids: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, tuple[float, int]]] = dataclasses.field(default_factory=list)
    usage: tuple[int, int, int] = (0, 0, 0)
    error: str = ""
    param: str | None = None

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())


def near(value: float) -> float:
    """gRPC carries 32-bit floats."""
    return round(value, 4)


async def ask_grpc(channel: grpc.aio.Channel, case: Case, model: str) -> Answer:
    answer = Answer()
    try:
        async for message in inference_pb2_grpc.InferenceStub(channel).Generate(case.grpc(model), timeout=30):
            _add(answer, message)
    except grpc.aio.AioRpcError as rpc:
        return _from_rpc(rpc)
    return answer


def _from_rpc(rpc: grpc.aio.AioRpcError) -> Answer:
    error = from_rpc_error(rpc)
    assert rpc.code().name == status_of(error).grpc
    return Answer(error=error.code, param=error.param if isinstance(error, InvalidRequest) else None)


def _add(answer: Answer, message: pb.GenerateResponse) -> None:
    kind = message.WhichOneof("event")
    if kind == "prompt":
        answer.prompt_token_ids = list(message.prompt.token_ids)
        answer.prompt_logprobs = [
            {entry.token_id: (near(entry.logprob), entry.rank) for entry in (at.chosen, *at.top)}
            for at in message.prompt.prompt_logprobs
        ]
    elif kind == "usage":
        usage = message.usage
        answer.usage = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    else:
        _add_choice(answer.choice(message.choice.choice), message.choice)


def _add_choice(choice: Choice, output: pb.ChoiceOutput) -> None:
    choice.text += output.text
    choice.token_ids += output.token_ids
    choice.logprobs += [_logprob(at) for at in output.logprobs]
    reason = finish_from_proto(output.finish_reason)
    if reason is not None:
        choice.finish, choice.stop_reason = reason.value, output.stop_reason


def _logprob(at: types_pb2.PositionLogprobs) -> Logprob:
    return near(at.chosen.logprob), tuple(near(entry.logprob) for entry in at.top)


async def ask_http(client: httpx.AsyncClient, case: Case, model: str) -> Answer:
    response = await client.post(case.path, json=case.http(model))
    return from_error(response) if response.status_code != 200 else _whole(response.json(), case)


async def ask_stream(client: httpx.AsyncClient, case: Case, model: str) -> Answer:
    """The same, streamed: what the chunks add up to."""
    body = {**case.http(model), "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer()
    async with client.stream("POST", case.path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return from_error(response)
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        _add_chunk(answer, json.loads(event), case)
    return answer


def from_error(response: httpx.Response) -> Answer:
    """Checks that the shape is OpenAI's whole one, and that status and type are those of the code."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    code = {None: "invalid_request", "rate_limit_exceeded": "overloaded", "invalid_api_key": "unauthenticated"}.get(
        error["code"], error["code"]
    )
    status = status_of(error_from(code, ""))
    assert code in BY_CODE
    assert (response.status_code, error["type"]) == (status.http, status.openai_type)
    assert error["message"]
    return Answer(error=code, param=error["param"])


def _whole(shape: dict[str, Any], case: Case) -> Answer:
    answer = Answer(usage=_usage(shape["usage"]))
    for entry in shape["choices"]:
        choice = answer.choice(entry["index"])
        choice.text = entry["message"]["content"] if case.is_chat else entry["text"]
        _add_entry(choice, entry, case)
        _add_prompt(answer, shape if case.is_chat else entry)
    return answer


def _add_chunk(answer: Answer, shape: dict[str, Any], case: Case) -> None:
    if shape.get("usage"):
        answer.usage = _usage(shape["usage"])
    if case.is_chat:
        _add_prompt(answer, shape)
    for entry in shape["choices"]:
        choice = answer.choice(entry["index"])
        choice.text += entry["delta"].get("content", "") if case.is_chat else entry["text"]
        _add_entry(choice, entry, case)
        if not case.is_chat:
            _add_prompt(answer, entry)


def _add_entry(choice: Choice, entry: dict[str, Any], case: Case) -> None:
    choice.token_ids += entry.get("token_ids", [])
    choice.finish = entry["finish_reason"] or choice.finish
    choice.stop_reason = str(entry.get("stop_reason", choice.stop_reason))
    logprobs = entry["logprobs"]
    if logprobs is None:
        return
    if case.is_chat:
        choice.logprobs += [
            (near(at["logprob"]), tuple(near(top["logprob"]) for top in at["top_logprobs"]))
            for at in logprobs["content"]
        ]
        return
    tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
    for chosen, top in zip(logprobs["token_logprobs"], tops, strict=True):
        choice.logprobs.append((near(chosen), tuple(near(value) for value in sorted(top.values(), reverse=True))))


def _add_prompt(answer: Answer, shape: dict[str, Any]) -> None:
    answer.prompt_token_ids = shape.get("prompt_token_ids", answer.prompt_token_ids)
    if "prompt_logprobs" in shape:
        first, *later = shape["prompt_logprobs"]
        assert first is None
        answer.prompt_logprobs = [
            {int(token): (near(entry["logprob"]), entry["rank"]) for token, entry in at.items()} for at in later
        ]


def _usage(shape: dict[str, Any]) -> tuple[int, int, int]:
    assert shape["total_tokens"] == shape["prompt_tokens"] + shape["completion_tokens"]
    return shape["prompt_tokens"], shape["completion_tokens"], shape["prompt_tokens_details"]["cached_tokens"]
