"""What every request passes: its id, its API key, its count; and what every error becomes."""

import functools
import secrets
import time
from collections.abc import Mapping

import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.common.errors import BY_CODE, InvalidRequest, KvrelayError
from kvrelay.router.front import MAX_REQUEST_ID_CHARS, ApiKeys
from kvrelay.router.http.asgi import ClientGone, header, send_error
from kvrelay.router.http.errors import error_body
from kvrelay.router.http.generation import known

_PROTECTED = ("/v1/", "/tokenize", "/detokenize", "/console/api/")
_GONE = 499
"""Counted where no answer was begun because its client had left."""


class FrontMetrics:
    """Counted at the front: by route, so that a scan of made-up paths makes no new series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "kvrelay_http_requests", "Requests answered, by route and status.", ("route", "status"), registry=registry
        )
        self.requests = functools.cache(requests.labels)
        """By route and status, as many as there are of both."""
        self.errors = Counter(
            "kvrelay_http_errors", "Requests refused or failed, by the error's code.", ("code",), registry=registry
        )
        for code in BY_CODE:
            self.errors.labels(code)  # an error's first occurrence is an increase as well
        seconds = Histogram(
            "kvrelay_http_request_seconds",
            "From a request's headers to its answer's last byte.",
            ("route",),
            registry=registry,
            buckets=(0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
        )
        self.seconds = functools.cache(seconds.labels)


class Answer:
    """Passes an answer on, and adds the request's id to its headers."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.status = 0

    @property
    def started(self) -> bool:
        return self.status != 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._request_id)]
        await self._send(message)


class Gate:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: FrontMetrics, paths: Mapping[object, str]) -> None:
        """`paths`: of each endpoint, what its route is called in metrics."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = Answer(send, _request_id(scope))
        begin = time.monotonic()
        try:
            if scope["path"].startswith(_PROTECTED):
                self._keys.check(header(scope, b"authorization"))
            await self._app(scope, receive, answer)
        except ClientGone:
            pass
        except Exception as error:  # told to the client in the words of the API
            if answer.started:
                raise  # the server closes the connection: half an answer must not look whole
            await self._fail(answer, known(error))
        finally:
            self._count(scope, answer, time.monotonic() - begin)

    async def _fail(self, answer: Answer, error: KvrelayError) -> None:
        self._metrics.errors.labels(error.code).inc()
        await send_error(answer, error)

    def _count(self, scope: Scope, answer: Answer, seconds: float) -> None:
        route = self._paths.get(scope.get("endpoint"), "none")
        self._metrics.requests(route, answer.status or _GONE).inc()
        self._metrics.seconds(route).observe(seconds)


async def routing_error(request: Request, error: Exception) -> Response:
    """No such path, or no such method on it."""
    if not isinstance(error, HTTPException):
        raise error
    method, path = request.method, request.url.path
    what = f"Invalid URL ({method} {path})" if error.status_code == 404 else f"Not allowed to {method} on {path}."
    body = orjson.dumps(error_body(InvalidRequest(what)))
    return Response(body, error.status_code, error.headers, "application/json")


def _request_id(scope: Scope) -> bytes:
    """The client's own, where it fits into a header again."""
    given = header(scope, b"x-request-id")
    if 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.decode().isprintable():
        return given
    return f"req-{secrets.token_hex(12)}".encode()
