"""A node's KV store, asked over its gRPC port. Calls raise StoreError where it does not answer, or refuses."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from kvrelay.common.access import PodAccess
from kvrelay.common.rpc import CHANNEL_OPTIONS
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc

ASK_SECONDS = 3.0
OPEN = PodAccess()
WORK_SECONDS = 3600.0
"""For what goes through all blocks."""


class StoreError(Exception):
    """Why the store did not do it."""


@dataclass(frozen=True, kw_only=True)
class TierReport:
    tier: str
    healthy: bool
    reason: str
    num_blocks: int
    used_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    corrupt: int
    failures: int
    bytes_read: int
    bytes_written: int
    seconds_reading: float
    seconds_writing: float
    evictions: int
    dropped: int
    refused: int


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    node_id: str
    epoch: str
    version: str
    num_pods: int
    num_pins: int
    num_writing: int
    announcer_backlog: int
    violations: tuple[str, ...]
    tiers: tuple[TierReport, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    id: str
    tier: str
    """The nearest."""
    size: int
    dtype: str
    encoding: str
    fingerprint: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Verified:
    tier: str
    num_whole: int
    num_corrupt: int
    num_failed: int


@contextmanager
def _asked(address: str, access: PodAccess) -> Iterator[kvstore_pb2_grpc.KvStoreStub]:
    with access.blocking_channel(address, CHANNEL_OPTIONS) as channel:
        try:
            yield kvstore_pb2_grpc.KvStoreStub(channel)
        except grpc.RpcError as error:
            raise StoreError(f"the KV store at {address}: {error.details() or error.code().name}") from error


def stat(address: str, access: PodAccess = OPEN) -> StoreReport:
    with _asked(address, access) as stub:
        seen = stub.Stat(pb.StatRequest(), timeout=ASK_SECONDS, metadata=access.metadata)
    return StoreReport(
        node_id=seen.node_id,
        epoch=seen.epoch,
        version=seen.version,
        num_pods=seen.num_pods,
        num_pins=seen.num_pins,
        num_writing=seen.num_writing,
        announcer_backlog=seen.announcer_backlog,
        violations=tuple(seen.violations),
        tiers=tuple(map(_tier, seen.tiers)),
    )


def _tier(seen: pb.TierStat) -> TierReport:
    counted = {field.name: getattr(seen.counters, field.name) for field in pb.TierCounters.DESCRIPTOR.fields}
    return TierReport(
        tier=_name(seen.tier),
        healthy=seen.healthy,
        reason=seen.reason,
        num_blocks=seen.num_blocks,
        used_bytes=seen.used_bytes,
        limit_bytes=seen.limit_bytes,
        **counted,
    )


def blocks(address: str, fingerprint: str = "", access: PodAccess = OPEN) -> Iterator[Block]:
    """Of one model, or of all."""
    with _asked(address, access) as stub:
        request = pb.ListRequest(fingerprint=fingerprint)
        for part in stub.List(request, timeout=WORK_SECONDS, metadata=access.metadata):
            for block in part.blocks:
                yield Block(
                    id=block.id.hex(),
                    tier=_name(block.tier),
                    size=block.size,
                    dtype=block.dtype,
                    encoding=pb.Encoding.Name(block.encoding).removeprefix("ENCODING_").lower(),
                    fingerprint=block.fingerprint,
                    checksum=f"{block.checksum:016x}",
                )


def remove(address: str, ids: Sequence[str], access: PodAccess = OPEN) -> int:
    """Those of these hexadecimal ids that were there; no ids: all blocks."""
    packed = b"".join(map(bytes.fromhex, ids))
    with _asked(address, access) as stub:
        request = pb.RemoveRequest(ids=packed, all=not ids)
        return int(stub.Remove(request, timeout=WORK_SECONDS, metadata=access.metadata).num_removed)


def verify(address: str, access: PodAccess = OPEN) -> Iterator[Verified]:
    """How far it is, again and again, tier after tier."""
    with _asked(address, access) as stub:
        for seen in stub.Verify(pb.VerifyRequest(), timeout=WORK_SECONDS, metadata=access.metadata):
            yield Verified(
                tier=_name(seen.tier),
                num_whole=seen.num_whole,
                num_corrupt=seen.num_corrupt,
                num_failed=seen.num_failed,
            )


def _name(tier: "pb.Tier.ValueType") -> str:
    return pb.Tier.Name(tier).removeprefix("TIER_").lower()
