"""A pod's life: start, serve, drain, stop, each bounded."""

import asyncio
import contextlib
import importlib.metadata
import logging
import signal

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.common import net
from kvrelay.common.discovery import PodRecord, Registration
from kvrelay.common.errors import Draining, Internal, KvrelayError
from kvrelay.common.modelfiles import tokenizer_digest
from kvrelay.common.pod.security import TokenInterceptor, bind
from kvrelay.common.pod.state import PodState
from kvrelay.common.pod.web import WebApp, WebServer
from kvrelay.common.rpc import SERVER_OPTIONS
from kvrelay.common.tasks import end_task
from kvrelay.common.telemetry import SpanCollector, exposition
from kvrelay.common.tracing import make_tracer
from kvrelay.engine.api import EngineClient
from kvrelay.engine.messages import Progress
from kvrelay.engine.pod.control import PodServicer
from kvrelay.engine.pod.decode import DecodeServicer
from kvrelay.engine.pod.engines import make_engine
from kvrelay.engine.pod.kvevents import event_log
from kvrelay.engine.pod.metrics import pod_registry
from kvrelay.engine.pod.prefill import PrefillServicer
from kvrelay.engine.pod.routes import Routes
from kvrelay.engine.pod.settings import PodSettings
from kvrelay.engine.pod.tracing import Traces
from kvrelay.v1 import decode_pb2_grpc, pod_pb2_grpc, prefill_pb2_grpc

log = logging.getLogger(__name__)

STOP_SECONDS = 1.0
"""For streams to hear that they end."""
VERSION = importlib.metadata.version("kvrelay")
POD_SERVICE = "kvrelay.v1.Pod"
SERVICES = {
    "prefill": ("kvrelay.v1.Prefill",),
    "decode": ("kvrelay.v1.Decode",),
    "both": ("kvrelay.v1.Prefill", "kvrelay.v1.Decode"),
}


async def serve_pod(settings: PodSettings) -> int:
    """A pod with the engine that the settings name, to its end. Returns the exit code."""
    try:
        engine = make_engine(settings, settings.make_pod_id())
    except KvrelayError as error:
        log.error("the pod cannot start: %s", error)
        return 1
    return await run_pod(settings, engine)


async def run_pod(settings: PodSettings, engine: EngineClient) -> int:
    """Until SIGTERM, SIGINT, a drain or the engine's death. Returns the exit code; logs why it is not 0."""
    try:
        pod = Pod(settings, engine)
    except KvrelayError as error:
        log.error("the pod cannot start: %s", error)
        return 1
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, pod.state.ask_to_leave)
    try:
        if await pod.start():
            return await pod.serve()
        return 0
    except (KvrelayError, OSError) as error:
        log.error("the pod cannot go on: %s", error)
        return 1
    finally:
        await pod.stop()


class Pod:
    """Owns the engine, the servers and the lease; everything runs on one event loop."""

    def __init__(self, settings: PodSettings, engine: EngineClient) -> None:
        """Raises Internal where an option needs what is not installed."""
        self.state = PodState()
        self.grpc_port = 0
        self.http_port = 0
        self._settings = settings
        self._engine = engine
        self._events = event_log(settings, engine)
        self._tracer = make_tracer(settings.otlp_endpoint, f"kvrelay-{settings.role}", settings.make_pod_id())
        self._traces = Traces(self._tracer)
        self._routes = Routes(engine, self.state, self._events, self._traces)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: grpc.aio.Server | None = None
        self._web: WebServer | None = None
        self._registration: Registration | None = None
        self._outputs: asyncio.Task[None] | None = None

    async def start(self) -> bool:
        """HTTP first, so that probes see a pod that loads; registered last. False where it was asked to leave meanwhile."""
        self._start_web()
        self._server = self._make_server()
        leaving = asyncio.create_task(self.state.leaving.wait(), name="leaving")
        starting = asyncio.create_task(self._engine.start(self._progress), name="engine-start")
        try:
            await asyncio.wait((leaving, starting), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                log.info("asked to leave while the engine started")
                return False
            info = starting.result()
        finally:
            await end_task(leaving)
            if not starting.done():
                await end_task(starting)
        self._events.start()
        self._outputs = asyncio.create_task(self._routes.run(), name="outputs")
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self.state.serve()
        self._registration = Registration(self._settings.redis_url, self._settings.cluster, self._record())
        self._registration.start()
        log.info("%s serves %s on %s, over %s", info.pod_id, info.model, self._record().grpc_address, info.transport)
        return True

    async def serve(self) -> int:
        """Until it is asked to leave, and has drained (0), or the engine dies (1)."""
        leaving = asyncio.create_task(self.state.leaving.wait(), name="leaving")
        dead = asyncio.create_task(self._engine.dead.wait(), name="dead")
        outputs = self._outputs
        assert outputs is not None
        try:
            await asyncio.wait((leaving, dead, outputs), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                await self.drain()
        finally:
            await end_task(leaving)
            await end_task(dead)
        if outputs.done() and not outputs.cancelled() and (error := outputs.exception()) is not None:
            raise Internal(f"outputs could not be handed on: {error!r}") from error
        if self._engine.dead.is_set():
            self.state.finish("the engine process is gone")
            raise Internal("the engine process is gone")
        return 0

    async def drain(self) -> None:
        """No more requests; those that run may end within the grace period."""
        grace = self.state.grace_seconds
        seconds = self._settings.grace_seconds if grace is None else min(grace, self._settings.grace_seconds)
        log.info("draining, for %.1f s at most", seconds)
        self.state.drain()
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._registration is not None:
            await self._registration.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._routes.busy and not self._engine.dead.is_set():
                    await self.state.changed(seconds=1.0)
        log.info("drained" if not self._routes.busy else "the grace period is over, requests are left")

    async def stop(self) -> None:
        """Also of a pod that has not started, or half."""
        self.state.finish(self.state.reason or "the pod is stopping")
        if self._registration is not None:
            await self._registration.stop()
        self._routes.fail(Draining("the pod is leaving"))
        if self._server is not None:
            await self._server.stop(STOP_SECONDS)
        await self._engine.close()
        if self._outputs is not None:
            await end_task(self._outputs)
        await self._events.stop()
        await self._tracer.close()
        if self._web is not None:
            await self._web.stop()

    # Parts.

    def _start_web(self) -> None:
        settings = self._settings
        listener = net.listen(settings.host, settings.listen_http)
        self.http_port = listener.getsockname()[1]
        registry = pod_registry(
            self._engine, self.state, self._routes, self._events, settings.model_name, settings.role
        )
        registry.register(SpanCollector(self._tracer))
        app = WebApp(self.state, self._engine.dead, lambda: exposition(registry), self._details, settings.token)
        self._web = WebServer(app, listener)
        self._web.start()

    def _progress(self, progress: Progress) -> None:
        """Into /readyz's answer: what watches a start asks there."""
        share = 100 * progress.done // max(1, progress.total)
        self.state.reason = f"the engine is starting: {progress.what}, {share}%"

    def _details(self) -> dict[str, object]:
        registration = self._registration
        return {
            "role": self._settings.role,
            "registered": registration is not None and registration.registered.is_set(),
        }

    def _make_server(self) -> grpc.aio.Server:
        settings = self._settings
        interceptors = [TokenInterceptor(settings.token)] if settings.token else []
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        pod_pb2_grpc.add_PodServicer_to_server(
            PodServicer(
                self._engine,
                self.state,
                self._events if settings.tells_kv_events else None,
                role=settings.role,
                version=VERSION,
                test_hooks=settings.test_hooks,
            ),
            server,
        )
        if settings.role in ("prefill", "both"):
            servicer = PrefillServicer(self._engine, self.state, self._routes, self._traces)
            prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
        if settings.role in ("decode", "both"):
            decoding = DecodeServicer(self._engine, self.state, self._routes, self._traces)
            decode_pb2_grpc.add_DecodeServicer_to_server(decoding, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (POD_SERVICE, *SERVICES[settings.role], health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        address = net.join(settings.host, settings.listen_grpc)
        self.grpc_port = bind(server, address, settings.tls_cert, settings.tls_key, settings.tls_ca)
        return server

    async def _set_health(self, status: "health_pb2.HealthCheckResponse.ServingStatus.ValueType") -> None:
        for service in ("", POD_SERVICE, *SERVICES[self._settings.role]):
            await self._health.set(service, status)

    def _record(self) -> PodRecord:
        settings, info = self._settings, self._engine.info
        host = net.advertised(settings.host, settings.advertise_host, settings.redis_url)
        return PodRecord(
            pod_id=info.pod_id,
            epoch=info.epoch,
            role=settings.role,
            model=info.model,
            fingerprint=info.fingerprint,
            grpc_address=net.join(host, self.grpc_port),
            http_address=net.join(host, self.http_port),
            layout=info.layout,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            transport=info.transport,
            version=VERSION,
            tokenizer=tokenizer_digest(settings.model) if settings.model is not None else "",
        )
