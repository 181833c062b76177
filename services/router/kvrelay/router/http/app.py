"""The HTTP application: routes, and nothing else."""

from fastapi import FastAPI
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.routing import Route

from kvrelay.router.front import ApiKeys, FrontSettings
from kvrelay.router.http.chat import ChatCompletion
from kvrelay.router.http.completions import Completion
from kvrelay.router.http.gate import FrontMetrics, Gate, routing_error
from kvrelay.router.http.generation import Generation
from kvrelay.router.http.health import Health, Metrics, Model, Models, Ready
from kvrelay.router.http.schemas import ChatBody, CompletionBody
from kvrelay.router.http.tokenize import Detokenize, Tokenize
from kvrelay.router.job import Inference


def build_app(router: Inference, settings: FrontSettings, registry: CollectorRegistry = REGISTRY) -> FastAPI:
    """The ASGI application of a router. `/metrics` shows `registry`, to which the front's own metrics are added.

    The endpoints are plain ASGI: no layer stands between a token and the socket.
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
    ]
    app = FastAPI(
        title="kvrelay",
        routes=list(routes),
        exception_handlers={HTTPException: routing_error},
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    paths: dict[object, str] = {route.endpoint: route.path for route in routes}
    app.add_middleware(Gate, keys=ApiKeys(settings.api_keys), metrics=FrontMetrics(registry), paths=paths)
    return app
