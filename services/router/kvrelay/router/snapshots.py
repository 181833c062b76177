"""What a pod has cached, asked of the pod itself: where its KV events begin, or go on after a gap."""

import dataclasses

import grpc.aio

from kvrelay.common.access import PodAccess
from kvrelay.common.blocks import ID_BYTES
from kvrelay.common.discovery import PodRecord
from kvrelay.common.errors import Internal
from kvrelay.common.ids import BlockId, Epoch
from kvrelay.common.rpc import CHANNEL_OPTIONS, from_rpc_error
from kvrelay.v1 import pod_pb2, pod_pb2_grpc

SNAPSHOT_SECONDS = 10.0


@dataclasses.dataclass(slots=True)
class Snapshot:
    """The keys of all cached blocks after the batch `sequence` of the epoch, in pieces as they came."""

    epoch: Epoch
    sequence: int
    pieces: list[list[BlockId]]


class Snapshots:
    """Each over a connection of its own: they are rare."""

    def __init__(self, access: PodAccess) -> None:
        self._access = access

    async def __call__(self, record: PodRecord) -> Snapshot:
        """Raises KvrelayError: what the pod says, and Internal for what no pod of this version says."""
        async with self._access.channel(record.grpc_address, CHANNEL_OPTIONS) as channel:
            call = pod_pb2_grpc.PodStub(channel).GetCachedBlocks(
                pod_pb2.GetCachedBlocksRequest(), timeout=SNAPSHOT_SECONDS, metadata=self._access.metadata
            )
            snapshot: Snapshot | None = None
            room = record.num_blocks
            try:
                async for piece in call:
                    snapshot = snapshot or Snapshot(Epoch(piece.epoch), piece.sequence, [])
                    keys = _keys(piece.keys)
                    room -= len(keys)
                    if room < 0:
                        raise Internal(f"{record.pod_id} says to have over {record.num_blocks} blocks")
                    snapshot.pieces.append(keys)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        if snapshot is None:
            raise Internal(f"{record.pod_id} ended its snapshot before it began")
        return snapshot


def _keys(data: bytes) -> list[BlockId]:
    if len(data) % ID_BYTES:
        raise Internal(f"{len(data)} bytes are no keys of blocks")
    return [BlockId(data[start : start + ID_BYTES]) for start in range(0, len(data), ID_BYTES)]
