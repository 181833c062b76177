"""The gRPC server: its services and its port."""

import dataclasses
from typing import Protocol

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from kvrelay.common import net
from kvrelay.common.errors import Internal
from kvrelay.router.front import ApiKeys, FrontSettings
from kvrelay.router.grpcfront.calls import Calls
from kvrelay.router.grpcfront.health import HEALTH, HealthService
from kvrelay.router.grpcfront.inference import INFERENCE, InferenceService
from kvrelay.router.job import Inference


class GrpcSettings(FrontSettings, Protocol):
    @property
    def host(self) -> str: ...

    @property
    def grpc_port(self) -> int:
        """0: any free one."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class GrpcServer:
    server: grpc.aio.Server
    port: int

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more calls; those that run have until then."""
        await self.server.stop(grace_seconds)


async def start_grpc(router: Inference, settings: GrpcSettings, registry: CollectorRegistry) -> GrpcServer:
    """The front's own metrics are added to `registry`. Raises Internal if the port cannot be had."""
    options = [("grpc.max_receive_message_length", settings.max_body_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    calls = Calls(ApiKeys(settings.api_keys), registry)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(INFERENCE, InferenceService(router).handlers(calls)),
            grpc.method_handlers_generic_handler(HEALTH, HealthService(router).handlers()),
        )
    )
    reflection.enable_server_reflection((INFERENCE, HEALTH, reflection.SERVICE_NAME), server)
    address = net.join(settings.host, settings.grpc_port)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Internal(f"cannot listen on {address}: {error}") from error
    await server.start()
    return GrpcServer(server, port)
