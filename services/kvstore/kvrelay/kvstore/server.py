"""A store's life: start, serve, drain, stop, each bounded."""

import asyncio
import importlib.metadata
import logging
import signal

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.common import net
from kvrelay.common.discovery import Registration
from kvrelay.common.errors import Internal, KvrelayError
from kvrelay.common.ids import new_epoch
from kvrelay.common.nodes import NodeRecord
from kvrelay.common.pod.security import TokenInterceptor, bind
from kvrelay.common.pod.state import PodState
from kvrelay.common.pod.web import WebApp, WebServer
from kvrelay.common.rpc import SERVER_OPTIONS
from kvrelay.common.tasks import end_task
from kvrelay.common.telemetry import exposition, new_registry
from kvrelay.kvstore.assembly import bucket_of
from kvrelay.kvstore.metrics import KvStoreCollector
from kvrelay.kvstore.node import Node
from kvrelay.kvstore.servicer import KvStoreServicer
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.kvstore.tiers.objects import ObjectTier
from kvrelay.v1 import kvstore_pb2_grpc

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0
"""For streams to hear that they end."""
LOOK_SECONDS = 0.05
VERSION = importlib.metadata.version("kvrelay")
SERVICE = "kvrelay.v1.KvStore"
NEVER_MS = 2**31 - 1
OPTIONS = (*SERVER_OPTIONS, ("grpc.keepalive_time_ms", NEVER_MS))
"""A pod that is stopped answers no ping, and may write into the arena when it goes on: only a connection that is gone ends its session.
Without pings gRPC sets no timeout on the socket either."""


async def serve_store(settings: KvStoreSettings) -> int:
    """Until SIGTERM, SIGINT or a drain. Returns the exit code; logs why it is not 0."""
    store = KvStore(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, store.state.ask_to_leave)
    try:
        if await store.start():
            await store.serve()
        return 0
    except (KvrelayError, OSError) as error:
        log.error("the store cannot go on: %s", error)
        return 1
    finally:
        await store.stop()


class KvStore:
    """Owns the arena, the tiers and the servers; everything runs on one event loop."""

    def __init__(self, settings: KvStoreSettings) -> None:
        self.state = PodState()
        self.state.reason = "the tiers are opening"
        self.epoch = new_epoch()
        self.grpc_port = 0
        self.http_port = 0
        self._settings = settings
        self._dead = asyncio.Event()
        self._registry = new_registry()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._node = Node(settings, self.epoch)
        self._registration: Registration | None = None
        self._server: grpc.aio.Server | None = None
        self._web: WebServer | None = None

    async def start(self) -> bool:
        """HTTP first, so that probes see a store that opens its tiers. False where it was asked to leave meanwhile."""
        self._start_web()
        self._server = self._make_server()
        leaving = asyncio.create_task(self.state.leaving.wait(), name="leaving")
        opening = asyncio.create_task(self._node.open(), name="open")
        try:
            await asyncio.wait((leaving, opening), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                log.info("asked to leave while the tiers opened")
                return False
            opening.result()
        finally:
            await end_task(leaving)
            if not opening.done():
                await end_task(opening)
        self._registry.register(KvStoreCollector(self._node, self.state))
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(KvStoreServicer(self._node, self.state, VERSION), self._server)
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.state.serve()
        self._registration = Registration(self._settings.redis_url, self._settings.cluster, self._record())
        self._registration.start()
        log.info("%s, epoch %s, serves on port %d", self._settings.node, self.epoch, self.grpc_port)
        return True

    async def serve(self) -> None:
        """Until it is asked to leave, and has drained. Raises Internal where a part of it has failed."""
        leaving = asyncio.create_task(self.state.leaving.wait(), name="leaving")
        working = self._node.tasks()
        try:
            await asyncio.wait((leaving, *working), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                await self.drain()
        finally:
            await end_task(leaving)
        for task in working:
            if task.done():
                self._dead.set()
                error = None if task.cancelled() else task.exception()
                raise Internal(f"{task.get_name()} has ended: {error!r}") from error

    async def drain(self) -> None:
        """No more pods; those that are there may finish what they read and write, then memory goes down, all within the grace period."""
        node, grace = self._node, self.state.grace_seconds
        seconds = self._settings.grace_seconds if grace is None else min(grace, self._settings.grace_seconds)
        log.info("draining, for %.1f s at most", seconds)
        self.state.drain()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._registration is not None:
            await self._registration.stop()
        node.sessions.leave()
        try:
            async with asyncio.timeout(seconds):
                while node.sessions.busy:
                    await asyncio.sleep(LOOK_SECONDS)
                await node.chain.flush()
        except TimeoutError:
            log.info("the grace period is over: pods hold %d pins", node.sessions.num_pins)
        else:
            log.info("drained")

    async def stop(self) -> None:
        """Also of a store that has not started, or half."""
        self.state.finish(self.state.reason or "the store is stopping")
        if self._registration is not None:
            await self._registration.stop()
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)
        await self._node.close()
        if self._web is not None:
            await self._web.stop()

    # Parts.

    def _start_web(self) -> None:
        settings = self._settings
        listener = net.listen(settings.host, settings.listen_http)
        self.http_port = listener.getsockname()[1]
        app = WebApp(self.state, self._dead, lambda: exposition(self._registry), self._details, settings.token)
        self._web = WebServer(app, listener)
        self._web.start()

    def _details(self) -> dict[str, object]:
        shown = ("tier", "healthy", "reason", "used_bytes", "limit_bytes")
        registration = self._registration
        return {
            "tiers": [{name: getattr(report, name) for name in shown} for report in self._node.reports()],
            "registered": registration is not None and registration.registered.is_set(),
        }

    def _record(self) -> NodeRecord:
        settings = self._settings
        host = net.advertised(settings.host, settings.advertise_host, settings.redis_url)
        objects = self._node.chain.health("s3")
        return NodeRecord(
            node_id=self._node.id,
            epoch=self.epoch,
            grpc_address=net.join(host, self.grpc_port),
            http_address=net.join(host, self.http_port),
            version=VERSION,
            transfer_address=self._node.transfer_address,
            bucket=bucket_of(settings),
            prefix=objects.tier.prefix if objects is not None and isinstance(objects.tier, ObjectTier) else "",
        )

    def _make_server(self) -> grpc.aio.Server:
        settings = self._settings
        interceptors = [TokenInterceptor(settings.token)] if settings.token else []
        server = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        address = net.join(settings.host, settings.listen_grpc)
        self.grpc_port = bind(server, address, settings.tls_cert, settings.tls_key, settings.tls_ca)
        return server

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus.ValueType") -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)
