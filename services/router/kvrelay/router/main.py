"""`kvrelay-router`: one router with both fronts, until SIGTERM or SIGINT; then it drains, within its grace period."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop

from kvrelay.common import net
from kvrelay.common.discovery import PodDirectory
from kvrelay.common.errors import KvrelayError
from kvrelay.common.logs import configure_logging
from kvrelay.common.settings import load
from kvrelay.common.telemetry import new_registry
from kvrelay.router.core import Router
from kvrelay.router.grpcfront import start_grpc
from kvrelay.router.http import build_app
from kvrelay.router.settings import RouterSettings

log = logging.getLogger(__name__)

PROG = "kvrelay-router"
CLOSE_SECONDS = 2.0
"""For what is left of HTTP and gRPC after the drain."""


class _Http(uvicorn.Server):
    """Signals are `serve`'s; uvicorn would take them for itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: RouterSettings, listening: socket.socket) -> None:
    """Raises Internal where the model or a port cannot be had."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    registry = new_registry()
    router = Router(settings, PodDirectory(settings.redis_url, settings.cluster), registry)
    await router.start()
    rpc = await start_grpc(router, settings, registry)
    http = _Http(
        uvicorn.Config(
            build_app(router, settings, registry, router.console),
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # no answer depends on who asks
            timeout_graceful_shutdown=int(CLOSE_SECONDS),
        )
    )
    serving = asyncio.create_task(http.serve(sockets=[listening]), name="http")
    # What stands now stays: the collector need not walk over it again and again while requests come and go.
    gc.freeze()
    log.info("serving %s: HTTP on %s, gRPC on port %d", settings.model_name, listening.getsockname(), rpc.port)
    try:
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        log.info("draining")
        await router.drain(settings.drain_ms / 1000)
    finally:
        await router.close()
        http.should_exit = True
        await asyncio.gather(serving, rpc.stop(CLOSE_SECONDS))


def main() -> None:
    settings = load(RouterSettings, prog=PROG)
    configure_logging(PROG, settings.log_level, settings.log_format)
    try:
        with net.listen(settings.host, settings.http_port) as listening:
            uvloop.run(serve(settings, listening))
    except (KvrelayError, OSError, ValueError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
