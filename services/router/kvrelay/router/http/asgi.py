"""ASGI by hand, where each streamed token passes: a bounded body, an answer, and work that ends when its client is gone."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, MutableMapping

import orjson
from starlette.types import Receive, Scope, Send

from kvrelay.common.errors import InvalidRequest, KvrelayError, RequestTooLarge, status_of
from kvrelay.router.http.errors import Headers, error_body, error_headers

BODY_SECONDS = 60.0
"""For the whole of a request's body to arrive."""


class ClientGone(Exception):
    """There is no one left to answer."""


def header(scope: Scope, name: bytes) -> bytes:
    """The first one of the (lower case) name; empty where there is none."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"")


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Raises RequestTooLarge for over `limit` bytes, announced or not, InvalidRequest for a body that takes too long, and
    ClientGone."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _whole_body(scope, receive, limit)
    except TimeoutError:
        raise InvalidRequest(f"The body of the request did not arrive within {BODY_SECONDS} seconds.") from None


async def _whole_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Some of a body that is too large is read and dropped, so that a client that only writes gets to read its answer."""
    announced = header(scope, b"content-length")
    too_large = announced.isdigit() and int(announced) > limit
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= 2 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        too_large = too_large or size > limit
        if too_large:
            parts.clear()
        else:
            parts.append(part)
        more = message.get("more_body", False)
    if too_large:
        raise RequestTooLarge(f"The body of the request is over {limit} bytes.")
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def until_gone(work: Coroutine[object, object, None], receive: Receive) -> None:
    """Runs `work` in this task, and cancels it as soon as the client disconnects. The request's body was read before."""
    task = asyncio.current_task()
    assert task is not None
    watch = asyncio.ensure_future(_gone(receive))
    left = False

    def leave(_: object) -> None:
        nonlocal left
        left = True
        task.cancel()

    watch.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not left or task.cancelling() > 1:  # somebody else's cancellation
            raise
    finally:
        watch.remove_done_callback(leave)
        watch.cancel()
        if left:
            task.uncancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def send_json(send: Send, value: object, status: int = 200, headers: Headers | None = None) -> Awaitable[None]:
    return send_bytes(send, orjson.dumps(value), b"application/json", status, headers)


async def send_bytes(
    send: Send, body: bytes, content_type: bytes, status: int = 200, headers: Headers | None = None
) -> None:
    start: MutableMapping[str, object] = {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *(headers or ()),
        ],
    }
    await send(start)
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: KvrelayError) -> None:
    headers = error_headers(error)
    if isinstance(error, RequestTooLarge):
        headers.append((b"connection", b"close"))  # what is left of its body is not read
    await send_json(send, error_body(error), status_of(error).http, headers)
