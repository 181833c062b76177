"""The HTTP application: routes, and nothing else."""

from collections.abc import Mapping

from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrelay.router.console.state import Console
from kvrelay.router.front import ApiKeys, FrontSettings
from kvrelay.router.http.chat import ChatCompletion
from kvrelay.router.http.completions import Completion
from kvrelay.router.http.console import console_routes
from kvrelay.router.http.gate import FrontMetrics, Gate, routing_error
from kvrelay.router.http.generation import Generation
from kvrelay.router.http.health import Health, Metrics, Model, Models, Ready
from kvrelay.router.http.schemas import ChatBody, CompletionBody
from kvrelay.router.http.tokenize import Detokenize, Tokenize
from kvrelay.router.job import Inference


def build_app(
    router: Inference,
    settings: FrontSettings,
    registry: CollectorRegistry = REGISTRY,
    console: Console | None = None,
) -> ASGIApp:
    """The ASGI application of a router. `/metrics` shows `registry`, to which the front's own metrics are added. `console` None:
    there is no such page.

    The endpoints are plain ASGI, and those that generate are called past FastAPI: no layer but the gate stands between a token
    and the socket.
    """
    routes = [
        Route("/v1/completions", Generation(router, settings, CompletionBody, Completion), methods=["POST"]),
        Route("/v1/chat/completions", Generation(router, settings, ChatBody, ChatCompletion), methods=["POST"]),
        Route("/v1/models", Models(router), methods=["GET"]),
        Route("/v1/models/{model:path}", Model(router), methods=["GET"]),
        Route("/tokenize", Tokenize(router, settings), methods=["POST"]),
        Route("/detokenize", Detokenize(router, settings), methods=["POST"]),
        Route("/health", Health(), methods=["GET"]),
        Route("/healthz", Health(), methods=["GET"]),
        Route("/readyz", Ready(router), methods=["GET"]),
        Route("/metrics", Metrics(registry), methods=["GET"]),
        *(console_routes(console) if console is not None else ()),
    ]
    paths: dict[object, str] = {route.endpoint: route.path for route in routes}
    app = FastAPI(
        title="kvrelay",
        routes=list(routes),
        exception_handlers={HTTPException: routing_error},
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    keys, metrics = ApiKeys(settings.api_keys), FrontMetrics(registry)
    app.add_middleware(Gate, keys=keys, metrics=metrics, paths=paths)
    short = {route.path: route.endpoint for route in routes if isinstance(route.endpoint, Generation)}
    return Shortcut(app, Gate(_call_endpoint, keys=keys, metrics=metrics, paths=paths), short)


class Shortcut:
    """A POST to one of some paths goes to its endpoint through `gate`, everything else to `app`."""

    def __init__(self, app: ASGIApp, gate: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._gate = gate
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            scope["endpoint"] = endpoint
            await self._gate(scope, receive, send)


async def _call_endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    await scope["endpoint"](scope, receive, send)
