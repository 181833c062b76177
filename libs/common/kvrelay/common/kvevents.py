"""KV events: what a pod's prefix cache gains and loses, one message a step.

    kvrelay:{cluster}:kv-events:{pod id}     Redis stream; field `batch` of an entry is an `EventBatch` in MessagePack

Batches of an epoch are numbered from 1 without a gap. Who misses one, or sees another epoch, needs a snapshot. A block's key is the id of
its last span of 16 tokens, which covers all that come before; a pod's blocks are of its block size.
"""

import msgspec

from kvrelay.common.ids import BlockId, Epoch, PodId


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that follow one another after the block `parent` (zeros: the first of a prompt)."""

    parent: BlockId
    keys: tuple[BlockId, ...]
    token_ids: tuple[int, ...]
    """Of all the blocks."""
    block_size: int
    """Tokens."""
    extra_keys: tuple[str, ...] = ()
    """What separates equal tokens, such as the cache salt."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    keys: tuple[BlockId, ...]


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    epoch: Epoch
    sequence: int
    time: float
    """Seconds since 1970, by the pod's clock."""
    events: tuple[Event, ...]


def stream_key(cluster: str, pod_id: PodId) -> str:
    return f"kvrelay:{cluster}:kv-events:{pod_id}"
