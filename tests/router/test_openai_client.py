"""OpenAI's own client, as it is, against the HTTP front."""

import asyncio
from collections.abc import AsyncGenerator

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI

from kvrelay.common.errors import Internal, Overloaded, Unavailable
from tests.router.stack import Fronts, Settings, fronts_of
from tests.router.stub import MODEL, SPEECH, StubRouter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest_asyncio.fixture(loop_scope="module")
async def client(fronts: Fronts) -> AsyncGenerator[AsyncOpenAI, None]:
    async with AsyncOpenAI(base_url=f"{fronts.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_completion(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hello there, tell me!", max_tokens=10, seed=0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.created == 1_700_000_001
    assert answer.model == MODEL
    assert answer.system_fingerprint is not None
    assert answer.choices[0].text == SPEECH[:10]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (21, 10, 31)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_completion_defaults_to_16_tokens(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=10, seed=0, store=True, metadata={"a": "b"}, user="u"
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == SPEECH[:10]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


async def test_an_answers_message_goes_back_into_the_conversation(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    for said in (answer.choices[0].message, answer.choices[0].message.model_dump()):
        conversation = [*HELLO, said, *HELLO]
        again = await client.chat.completions.create(model=MODEL, messages=conversation, max_tokens=4)
        assert again.choices[0].message.content


async def test_synchronous_client(fronts: Fronts) -> None:
    def ask() -> tuple[str | None, str]:
        with OpenAI(base_url=f"{fronts.url}/v1", api_key="any", max_retries=0) as client:
            whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=0)
            stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=0, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, streamed

    assert await asyncio.to_thread(ask) == (SPEECH[:12], SPEECH[:12])


async def test_chat_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=60, seed=0, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts, roles, reasons = ["", ""], [], {}
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk"
        assert chunk.usage is None
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles.append(choice.delta.role)
        reasons[choice.index] = choice.finish_reason
    assert roles == ["assistant"] * 2 + [None] * (len(roles) - 2)
    assert texts[0] == SPEECH.encode()[:60].decode()
    assert texts[1].startswith(SPEECH[7:30])
    assert reasons == {0: "length", 1: "length"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 120
    assert chunks[-1].usage.prompt_tokens_details is not None
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_stream_of_several_prompts(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=["one", "two"], n=2, max_tokens=9, seed=0, stream=True, echo=True
    )
    texts = [""] * 4
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [prompt + SPEECH[start : start + 9] for prompt in ("one", "two") for start in (0, 7)]


async def test_usage_within_a_stream(client: AsyncOpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=3, seed=0, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", [3]),
        (["one", "three"], [3, 5]),
        ([1, 2, 3, 4], [4]),
        ([[1, 2], [3]], [2, 1]),
    ],
)
async def test_forms_of_prompts(client: AsyncOpenAI, prompt: object, expected: list[int]) -> None:
    answer = await client.completions.create(
        model=MODEL,
        prompt=prompt,  # type: ignore[arg-type]
        max_tokens=1,
        n=2,
        best_of=2,
        extra_body={"return_token_ids": True},
    )
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    lengths = [len(choice.model_extra["prompt_token_ids"]) for choice in answer.choices if choice.model_extra]
    assert lengths == [length for length in expected for _ in range(2)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(expected), 2 * len(expected))


async def test_chat_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=3, seed=27, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(entry.token, entry.bytes) for entry in logprobs.content] == [
        ("\\xe2", [0xE2]),
        ("\\x80", [0x80]),
        ("\\x93", [0x93]),
    ]
    assert logprobs.content[0].logprob == pytest.approx(-0.5)
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
    assert answer.choices[0].message.content == "–"


async def test_completion_logprobs(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=4, seed=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["T", "h", "e", " "]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.token_logprobs == pytest.approx([-0.5 - at / 64 for at in range(4)])
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == pytest.approx({"T": -0.5, "U": -1.5})


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(client: AsyncOpenAI, stream: bool) -> None:
    """What evaluation harnesses ask for: the prompt's own log-probabilities, and offsets that count through."""
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    text = ""
    given = {"model": MODEL, "prompt": "Hé", "max_tokens": 2, "seed": 0, "logprobs": 0, "echo": True}
    if stream:
        answers = [answer async for answer in await client.completions.create(**given, stream=True)]
    else:
        answers = [await client.completions.create(**given)]
    for answer in answers:
        text += answer.choices[0].text
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        tokens += logprobs.tokens or []
        offsets += logprobs.text_offset or []
        values += logprobs.token_logprobs or []
    assert text == "HéTh"
    assert tokens == ["H", "bytes:\\xc3", "bytes:\\xa9", "T", "h"]
    assert offsets == [0, 1, 1, 2, 3]
    assert values[0] is None
    assert all(isinstance(value, float) for value in values[1:])


async def test_stop(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=50, seed=0, stop=[" baton"])
    assert answer.choices[0].text == "The relay passes the"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": " baton"}


async def test_extensions_by_extra_body(client: AsyncOpenAI, stub: StubRouter) -> None:
    extra = {"top_k": 3, "min_p": 0.1, "priority": 5, "cache_salt": "s", "timeout_ms": 9000, "stop_token_ids": [7]}
    await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1, extra_body=extra)
    asked = stub.prepared[-1]
    assert (asked.sampling.top_k, asked.sampling.min_p, asked.sampling.stop_token_ids) == (3, 0.1, (7,))
    assert (asked.priority, asked.cache_salt, asked.timeout_ms) == (5, "s", 9000)


async def test_models(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [(model.id, model.object, model.owned_by) for model in models] == [(MODEL, "model", "kvrelay")]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as error:
        await client.models.retrieve("gpt-4o")
    assert error.value.code == "model_not_found"


async def test_error_types(client: AsyncOpenAI, stub: StubRouter) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")
    stub.failure = Overloaded("the queue is full", 7.2)
    with pytest.raises(openai.RateLimitError) as busy:
        await client.completions.create(model=MODEL, prompt="x")
    assert busy.value.response.headers["retry-after"] == "8"
    assert busy.value.code == "rate_limit_exceeded"
    stub.failure = Unavailable("no pod lives")
    with pytest.raises(openai.InternalServerError) as gone:
        await client.completions.create(model=MODEL, prompt="x", stream=True)
    assert gone.value.status_code == 503


async def test_error_within_a_stream(client: AsyncOpenAI, stub: StubRouter) -> None:
    stub.failure, stub.fail_at = Internal("the engine broke"), 3
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, seed=0, stream=True)
    text = ""

    async def read() -> None:
        nonlocal text
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError, match="the engine broke"):
        await read()
    assert text == SPEECH[:3]


async def test_keys(stub: StubRouter) -> None:
    async with fronts_of(stub, Settings(api_keys=("first", "second"))) as fronts:
        url = f"{fronts.url}/v1"
        for key in ("first", "second"):
            async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                assert (await client.completions.create(model=MODEL, prompt="x", max_tokens=1)).choices
        async with AsyncOpenAI(base_url=url, api_key="third", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as error:
                await client.completions.create(model=MODEL, prompt="x")
        assert error.value.code == "invalid_api_key"
        anonymous: httpx.Response = await fronts.http.post("/tokenize", json={"prompt": "x"})
        assert anonymous.status_code == 401
        assert (await fronts.http.get("/health")).status_code == 200


async def test_leaving_a_stream_ends_the_request(client: AsyncOpenAI, stub: StubRouter) -> None:
    stub.stall_at = 4
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=50, seed=0, stream=True)
    await asyncio.wait_for(stub.stalled.wait(), 5)
    assert stub.running
    await stream.close()
    await asyncio.wait_for(stub.closed.get(), 5)
    assert not stub.running
