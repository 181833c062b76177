"""The path of a request that generates: body → inputs → prepared → events → an answer, streamed or whole."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from kvrelay.common.errors import Internal, InvalidRequest, KvrelayError
from kvrelay.common.tracing import TRACEPARENT
from kvrelay.router.front import FrontSettings, check_request_id, shorter_timeout
from kvrelay.router.http.asgi import ClientGone, header, read_body, send_json, until_gone
from kvrelay.router.http.output import Output, Usage
from kvrelay.router.http.parse import parse
from kvrelay.router.http.schemas import GenerateBody, StreamOptions
from kvrelay.router.http.sse import EventStream
from kvrelay.router.job import Event, GenerateInput, Inference, PreparedRequest

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=GenerateBody)
B_co = TypeVar("B_co", bound=GenerateBody, covariant=True)
READ_SECONDS = 30.0
"""After a request's deadline: for what is left of its answer to be read."""
_TIMEOUT_HEADER = b"x-request-timeout-ms"
_SESSION_HEADER = b"x-session-id"
_TRACE_HEADER = TRACEPARENT.encode()


class Shape(Protocol[B_co]):
    """What one API makes of a body and of the events that answer it."""

    @property
    def id_prefix(self) -> str: ...
    @property
    def body(self) -> B_co: ...
    @property
    def n(self) -> int: ...
    @property
    def names(self) -> Mapping[str, str]:
        """Fields that this API calls differently than the core."""
        ...

    def inputs(self, answer_id: str, timeout_ms: int | None, session: str) -> list[GenerateInput]: ...
    def head(self, *, stream: bool) -> dict[str, object]: ...
    def chunks(self, job: int, event: Event) -> Iterator[dict[str, object]]: ...
    def extra(self, event: Event) -> dict[str, object]: ...
    def whole(self, outputs: Sequence[Output]) -> dict[str, object]: ...


class Generation(Generic[B]):
    """An ASGI endpoint for one API."""

    def __init__(
        self, router: Inference, settings: FrontSettings, schema: type[B], shape: Callable[[B], Shape[B]]
    ) -> None:
        self._router = router
        self._limit = settings.max_body_bytes
        self._decoder = msgspec.json.Decoder(schema)
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse(await read_body(scope, receive, self._limit), self._decoder)
        timeout_ms = shorter_timeout(body.timeout_ms, _header_timeout(scope))
        session = header(scope, _SESSION_HEADER).decode("latin-1") or body.session
        above = header(scope, _TRACE_HEADER).decode("latin-1")
        await until_gone(self._answer(self._shape(body), timeout_ms, session, above, send), receive)

    async def _answer(self, shape: Shape[B], timeout_ms: int | None, session: str, above: str, send: Send) -> None:
        body = shape.body
        options = _stream_options(body)
        unique = check_request_id(body.request_id) if body.request_id else secrets.token_hex(12)
        answer_id = f"{shape.id_prefix}-{unique}"
        inputs = shape.inputs(answer_id, timeout_ms, session)
        if above:
            inputs = [msgspec.structs.replace(source, traceparent=above) for source in inputs]
        prepared = await self._prepare(inputs, shape.names)
        head = {"id": answer_id, **shape.head(stream=bool(body.stream)), **self._about(prepared[0])}
        events = merged([self._router.generate(each) for each in prepared])
        remaining = max(each.deadline for each in prepared) - time.monotonic()
        try:
            async with asyncio.timeout(remaining + READ_SECONDS), contextlib.aclosing(events):
                if body.stream:
                    await _stream(events, shape, head, options, EventStream(send))
                else:
                    await _whole(events, shape, head, len(prepared), send)
        except TimeoutError:  # the client does not read: writes wait for it
            raise ClientGone from None

    async def _prepare(self, inputs: Sequence[GenerateInput], names: Mapping[str, str]) -> list[PreparedRequest]:
        """All of them, before any is started."""
        try:
            return [await self._router.prepare(source) for source in inputs]
        except InvalidRequest as error:
            raise type(error)(error.message, names.get(error.param or "", error.param)) from error

    def _about(self, prepared: PreparedRequest) -> dict[str, object]:
        info = self._router.model_info(prepared.input.model)
        return {
            "created": prepared.created,
            "model": info.name,
            "system_fingerprint": f"fp_{info.fingerprint[:10]}",
        }


async def _whole(
    events: AsyncGenerator[tuple[int, Event], None],
    shape: Shape[B],
    head: dict[str, object],
    num_prompts: int,
    send: Send,
) -> None:
    outputs = [Output(shape.n) for _ in range(num_prompts)]
    usage = Usage()
    async for job, event in events:
        outputs[job].add(event)
        usage.add(event)
    await send_json(send, {**head, **shape.whole(outputs), "usage": usage.shape()})


async def _stream(
    events: AsyncGenerator[tuple[int, Event], None],
    shape: Shape[B],
    head: dict[str, object],
    options: StreamOptions,
    stream: EventStream,
) -> None:
    total, so_far = Usage(), Usage()
    try:
        async for job, event in events:
            total.add(event)
            extra = shape.extra(event)
            if options.continuous_usage_stats:
                so_far.count(event)
                extra["usage"] = so_far.shape()
            elif options.include_usage:
                extra["usage"] = None
            for choice in shape.chunks(job, event):
                await stream.event({**head, "choices": [choice], **extra})
        if options.include_usage:
            await stream.event({**head, "choices": [], "usage": total.shape()})
        await stream.done()
    except Exception as error:  # a stream that has begun can only say it in the stream
        if not stream.started:
            raise
        await stream.failed(known(error))


def known(error: Exception) -> KvrelayError:
    """What a client is told: of an error that is not one of ours, only that it happened."""
    if isinstance(error, KvrelayError):
        return error
    logger.error("A request failed", exc_info=error)
    return Internal("The server had an error while processing your request.")


async def merged(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all streams as they come, with the stream's number. Closing this closes all of them."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for event in only:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Event, None]) -> None:
        async with contextlib.aclosing(stream):
            async for event in stream:
                queue.put_nowait((number, event))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()  # raises what its stream raised
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stream_options(body: GenerateBody) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options"
        )
    return body.stream_options


def _header_timeout(scope: Scope) -> int | None:
    value = header(scope, _TIMEOUT_HEADER)
    if not value:
        return None
    if not value.isdigit() or len(value) > 10:
        raise InvalidRequest("X-Request-Timeout-Ms must be a number of milliseconds", "X-Request-Timeout-Ms")
    return int(value)
