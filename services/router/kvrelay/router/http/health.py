"""What operators ask: the served models, whether the process works, whether it can serve, and its metrics."""

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from kvrelay.router.http.asgi import send_bytes, send_json
from kvrelay.router.job import Inference, ModelInfo


class Models:
    def __init__(self, router: Inference) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"object": "list", "data": [_card(info) for info in self._router.models()]})


class Model:
    def __init__(self, router: Inference) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, _card(self._router.model_info(scope["path_params"]["model"])))


def _card(info: ModelInfo) -> dict[str, object]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "kvrelay",
        "max_model_len": info.max_model_len,
    }


class Health:
    """The process works: no more is said."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"status": "ok"})


class Ready:
    def __init__(self, router: Inference) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._router.ready()
        await send_json(send, msgspec.structs.asdict(state), 200 if state.ready else 503)


class Metrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, generate_latest(self._registry), CONTENT_TYPE_LATEST.encode())
