"""Both fronts of one router, on ports of their own, in the test's event loop."""

import contextlib
import dataclasses
import socket
from collections.abc import AsyncGenerator

import grpc.aio
import httpx
import uvicorn
from prometheus_client import CollectorRegistry

from kvrelay.router.console.state import Console
from kvrelay.router.grpcfront import start_grpc
from kvrelay.router.http import build_app
from kvrelay.router.job import Inference

MAX_BODY = 200_000


@dataclasses.dataclass(frozen=True)
class Settings:
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY
    host: str = "127.0.0.1"
    grpc_port: int = 0


@dataclasses.dataclass
class Fronts:
    """`http`: a client of the HTTP front; `channel`: one of the gRPC front's."""

    url: str
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    port: int


@contextlib.asynccontextmanager
async def fronts_of(
    router: Inference, settings: Settings | None = None, console: Console | None = None
) -> AsyncGenerator[Fronts, None]:
    settings = settings or Settings()
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    registry = CollectorRegistry()
    config = uvicorn.Config(
        build_app(router, settings, registry, console), lifespan="off", log_level="warning", http="httptools"
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    rpc = await start_grpc(router, settings, registry)
    await server.startup(sockets=[listening])
    url = f"http://127.0.0.1:{port}"
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}") as channel,
        ):
            yield Fronts(url, http, channel, port)
    finally:
        await server.shutdown(sockets=[listening])
        await rpc.stop(0)
