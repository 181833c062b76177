"""gRPC's standard health service: serving while the router is ready."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb

from kvrelay.router.grpcfront.calls import Context
from kvrelay.router.grpcfront.inference import INFERENCE
from kvrelay.router.job import Inference

HEALTH: Final = "grpc.health.v1.Health"
POLL_SECONDS: Final = 1.0
_SERVICES: Final = ("", INFERENCE)


class HealthService:
    def __init__(self, router: Inference) -> None:
        self._router = router

    def handlers(self) -> "dict[str, grpc.RpcMethodHandler[pb.HealthCheckRequest, pb.HealthCheckResponse]]":
        write = pb.HealthCheckResponse.SerializeToString
        read = pb.HealthCheckRequest.FromString
        return {
            "Check": grpc.unary_unary_rpc_method_handler(self.check, read, write),
            "Watch": grpc.unary_stream_rpc_method_handler(self.watch, read, write),
        }

    async def check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def watch(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """The state now, and each time that it has changed, until the client leaves."""
        last: pb.HealthCheckResponse.ServingStatus.ValueType | None = None
        while True:
            status = self._status(request.service)
            if status != last:
                last = status
                yield pb.HealthCheckResponse(status=status)
            await asyncio.sleep(POLL_SECONDS)

    def _status(self, service: str) -> pb.HealthCheckResponse.ServingStatus.ValueType:
        if service not in _SERVICES:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        if self._router.ready().ready:
            return pb.HealthCheckResponse.SERVING
        return pb.HealthCheckResponse.NOT_SERVING
