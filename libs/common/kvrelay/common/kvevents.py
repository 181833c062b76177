"""KV events: what a pod's prefix cache gains and loses, one message a step.

    kvrelay:{cluster}:kv-events:{pod id}     Redis stream; field `batch` of an entry is an `EventBatch` in MessagePack

Batches of an epoch are numbered from 1 without a gap. One without events repeats the last number, 0 before the first: a reader
that has not come as far has missed something. Who misses a batch, or sees another epoch, needs a snapshot. An entry may come twice.
A block's key is the id of its last span of 16 tokens, which covers all that come before; a pod's blocks are of its block size.

On Redis a batch has keys only: no tokens and no salts, which are the tenants' own.
"""

from typing import Annotated, Final

import msgspec

from kvrelay.common.blocks import ID_BYTES
from kvrelay.common.ids import BlockId, Epoch, PodId

BATCH_FIELD: Final = "batch"
MAX_BATCH_BYTES: Final = 8 << 20
"""Of one entry of the stream; a pod's batches are far smaller."""

Key = Annotated[BlockId, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", omit_defaults=True):
    """Blocks that follow one another after the block `parent` (zeros: the first of a prompt)."""

    parent: Key
    keys: tuple[Key, ...]
    token_ids: tuple[int, ...] = ()
    """Of all the blocks; empty where they are not told."""
    block_size: int
    """Tokens."""
    extra_keys: tuple[str, ...] = ()
    """What separates equal tokens, such as the cache salt; empty where it is not told."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    keys: tuple[Key, ...]


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    epoch: Epoch
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    time: float
    """Seconds since 1970, by the pod's clock."""
    events: tuple[Event, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(EventBatch)


def stream_key(cluster: str, pod_id: PodId) -> str:
    return f"kvrelay:{cluster}:kv-events:{pod_id}"


def encode_batch(batch: EventBatch) -> bytes:
    """For the stream: without tokens and salts."""
    return _encoder.encode(msgspec.structs.replace(batch, events=tuple(map(_bare, batch.events))))


def _bare(event: Event) -> Event:
    if isinstance(event, BlockStored) and (event.token_ids or event.extra_keys):
        return msgspec.structs.replace(event, token_ids=(), extra_keys=())
    return event


def decode_batch(data: bytes) -> EventBatch:
    """Raises ValueError for what is no batch, or too large for one."""
    if len(data) > MAX_BATCH_BYTES:
        raise ValueError(f"a batch of {len(data)} bytes is over the limit of {MAX_BATCH_BYTES}")
    return _decoder.decode(data)
