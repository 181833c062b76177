"""A small client of the router's OpenAI endpoints, for the terminal: text as it comes, then what the request cost."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Self

import httpx
import msgspec

CONNECT_SECONDS = 5.0
Body = Mapping[str, object]


class ApiError(Exception):
    """The server refused or broke off; the message is the server's."""


class Message(msgspec.Struct, frozen=True):
    content: str | None = None


class Choice(msgspec.Struct, frozen=True):
    text: str = ""
    delta: Message = Message()
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


class ErrorBody(msgspec.Struct, frozen=True):
    message: str = "the server gave no reason"


class Chunk(msgspec.Struct, frozen=True):
    """One event of a completion or chat completion, or one whole answer; fields of no use here are left out."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: ErrorBody | None = None

    @property
    def text(self) -> str:
        return "".join(choice.text or choice.delta.content or "" for choice in self.choices)


_decoder = msgspec.json.Decoder(Chunk)


@dataclass
class Timing:
    """Filled while a stream is read. Seconds from when the request was sent."""

    sent: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None

    def take(self, chunk: Chunk) -> None:
        now = time.perf_counter() - self.sent
        if chunk.choices:
            self.first = now if self.first is None else self.first
            self.last = now
            self.finish_reason = chunk.choices[0].finish_reason or self.finish_reason
        self.usage = chunk.usage or self.usage

    @property
    def ttft_ms(self) -> float:
        return 1000 * (self.first or 0.0)

    @property
    def tokens_per_second(self) -> float:
        """After the first token."""
        span = self.last - (self.first or 0.0)
        return (self.usage.completion_tokens - 1) / span if span > 0 else 0.0


def events(lines: Iterator[str]) -> Iterator[Chunk]:
    """The chunks of an SSE stream, up to [DONE]. Raises ApiError for an error event, and for a stream that breaks off."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        chunk = decode(data)
        yield chunk
    raise ApiError("the stream ended before it was done")


def decode(data: str | bytes) -> Chunk:
    """Raises ApiError."""
    try:
        chunk = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ApiError(f"an answer that is no completion: {error}") from error
    if chunk.error is not None:
        raise ApiError(chunk.error.message)
    return chunk


class Client:
    """Of one router, by its base URL. Close it, or use it as a context."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        """`url` may lack its scheme, as HOST:PORT."""
        base = url if "://" in url else f"http://{url}"
        self._http = httpx.Client(base_url=base, timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def stream(self, path: str, body: Body, timing: Timing) -> Iterator[str]:
        """The text of `path` (/v1/completions or /v1/chat/completions) as it comes. Raises ApiError."""
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", path, json=request) as answer:
                if answer.status_code != 200:
                    decode(answer.read())
                    raise ApiError(f"status {answer.status_code}")
                for chunk in events(answer.iter_lines()):
                    timing.take(chunk)
                    yield chunk.text
        except httpx.TransportError as error:
            raise ApiError(f"{self._http.base_url} does not answer: {error}") from error
