"""The router's gRPC front: `kvrelay.v1.Inference`, with health and reflection. `start_grpc` starts it."""

from kvrelay.router.grpcfront.server import GrpcServer, start_grpc

__all__ = ["GrpcServer", "start_grpc"]
