"""What a pod holds and has moved, asked over its gRPC port."""

from dataclasses import dataclass

import grpc

from kvrelay.common.access import bearer
from kvrelay.v1 import pod_pb2, pod_pb2_grpc

ASK_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class PodReport:
    role: str
    transport: str
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    num_requests: int
    num_reservations: int
    num_pushes: int
    num_preemptions: int
    violations: tuple[str, ...]
    payload_bytes_sent: int
    payload_bytes_received: int
    payload_bytes_overlapped: int
    transfers_completed: int
    transfers_failed: int
    transfer_seconds: float


def inspect(address: str, token: str = "") -> PodReport | None:
    """None where the pod does not answer, or wants another token."""
    with grpc.insecure_channel(address) as channel:
        stub = pod_pb2_grpc.PodStub(channel)
        try:
            info = stub.GetInfo(pod_pb2.GetInfoRequest(), timeout=ASK_SECONDS, metadata=bearer(token))
            held = stub.Inspect(pod_pb2.InspectRequest(), timeout=ASK_SECONDS, metadata=bearer(token))
        except grpc.RpcError:
            return None
    moved = held.transfer
    return PodReport(
        role=pod_pb2.Role.Name(info.role).removeprefix("ROLE_").lower(),
        transport=info.transport,
        num_blocks=held.num_blocks,
        free_blocks=held.free_blocks,
        cached_blocks=held.cached_blocks,
        num_requests=held.num_requests,
        num_reservations=held.num_reservations,
        num_pushes=held.num_pushes,
        num_preemptions=held.num_preemptions,
        violations=tuple(held.violations),
        payload_bytes_sent=moved.payload_bytes_sent,
        payload_bytes_received=moved.payload_bytes_received,
        payload_bytes_overlapped=moved.payload_bytes_overlapped,
        transfers_completed=moved.transfers_completed,
        transfers_failed=moved.transfers_failed,
        transfer_seconds=moved.seconds,
    )
