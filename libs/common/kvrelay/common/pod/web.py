"""A pod's small HTTP side: /healthz, /readyz, /metrics, /drain."""

import asyncio
import contextlib
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any  # ASGI's own types

import uvicorn

from kvrelay.common.pod.state import PodState
from kvrelay.common.telemetry import METRICS_TYPE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Answer = tuple[int, str, bytes]


class WebApp:
    """`metrics` gives the exposition; `dead` is set when the engine is gone; `details` goes into /readyz's answer.

    `token` is what draining takes; empty: anyone may ask.
    """

    def __init__(
        self,
        state: PodState,
        dead: asyncio.Event,
        metrics: Callable[[], bytes],
        details: Callable[[], dict[str, object]],
        token: str,
    ) -> None:
        self._state = state
        self._dead = dead
        self._metrics = metrics
        self._details = details
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, kind, body = self._answer(scope)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Scope) -> Answer:
        method = scope["method"]
        match scope["path"]:
            case "/healthz" if method in ("GET", "HEAD"):
                alive = not self._dead.is_set()
                return _json(200 if alive else 503, {"alive": alive})
            case "/readyz" if method in ("GET", "HEAD"):
                state = self._state
                answer = {"ready": state.ready, "reason": state.reason, "draining": state.draining, **self._details()}
                return _json(200 if state.ready else 503, answer)
            case "/metrics" if method in ("GET", "HEAD"):
                return 200, METRICS_TYPE, self._metrics()
            case "/drain" if method == "POST":  # it cannot be taken back: no crawler or curious GET may do it
                return self._drain(scope)
            case "/healthz" | "/readyz" | "/metrics" | "/drain":
                return _json(405, {"error": f"{method} is not allowed"})
            case _:
                return _json(404, {"error": "there is no such page"})

    def _drain(self, scope: Scope) -> Answer:
        if self._token:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return _json(401, {"error": "the token is missing or wrong"})
        self._state.ask_to_leave()
        return _json(200, {"draining": True})


def _json(status: int, body: dict[str, object]) -> Answer:
    return status, "application/json", json.dumps(body).encode()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the pod's."""
        yield


class WebServer:
    """Serves on a socket that already listens, in a task of its own."""

    def __init__(self, app: WebApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=5,
            limit_concurrency=256,
            server_header=False,
        )
        self._server = _Server(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")

    async def stop(self) -> None:
        """Within about two seconds."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._listener.close()
