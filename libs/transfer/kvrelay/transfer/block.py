"""A stored KV block: 16 tokens in all layers, and what must be known of its bytes before a model may read them."""

import functools
import struct

import msgspec
import xxhash

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype, KvLayout
from kvrelay.transfer.checksum import leaves

CHECKSUM_VERSION = 1


class BlockInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Of the bytes of one block, which are [layers, K and V, 16 tokens, heads, head_dim] of `dtype`, encoded as `encoding` says."""

    id: BlockId
    head: BlockId
    """The first block of the chain's segment that this one is in: what of the index lies together."""
    fingerprint: Fingerprint
    shape: str
    """Digest of the layout, dtype and block size aside: what differs in it is never converted."""
    dtype: KvDtype
    size: int
    """Bytes, as stored."""
    encoding: str = "exact"
    checksum: int = 0
    decoded_size: int = 0
    """Of what the bytes stand for, where they are encoded."""
    decoded_checksum: int = 0


def shape_of(layout: KvLayout, compute_dtype: str) -> str:
    """16 hexadecimal digits, the same for caches whose KV can be taken over but for dtype and block size.

    `compute_dtype` is the model's: equal tokens have equal KV only where it is computed alike.
    """
    groups = [
        (g.kind, g.layers, g.num_kv_heads, g.head_dim, g.sliding_window, g.first_head, g.shard_heads)
        for g in layout.groups
    ]
    ranks = (layout.tp_rank, layout.tp_size, layout.pp_rank, layout.pp_size)
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((groups, ranks, compute_dtype)))


def checksum(info: BlockInfo, payload: memoryview) -> int:
    """The tree of a KV push (`transfer.checksum`), bound to what the bytes are said to be.

    Any bit, order, length, id, dtype or encoding that differs changes it.
    """
    return root(info, len(payload), leaves(payload))


def root(info: BlockInfo, size: int, payload_leaves: bytes) -> int:
    """The checksum of a payload of `size` bytes that has these leaves, wherever they were computed."""
    head = struct.pack("<QQ", CHECKSUM_VERSION, size)
    kind = _kind(info.fingerprint, info.shape, info.dtype, info.encoding)
    return xxhash.xxh3_64_intdigest(head + payload_leaves + info.id + kind)


@functools.lru_cache(maxsize=256)
def _kind(*texts: str) -> bytes:
    """What blocks of one model have in common."""
    return b"".join(b"\0" + text.encode() for text in texts)
