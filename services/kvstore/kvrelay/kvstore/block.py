"""A stored KV block: 16 tokens in all layers, and what must be known of its bytes before a model may read them."""

import struct

import msgspec
import xxhash

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype

LEAF_BYTES = 16 << 10
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


def checksum(info: BlockInfo, payload: memoryview) -> int:
    """A tree of XXH3-64 over leaves of 16 KiB, bound to what the bytes are said to be; see docs/design/transfer.md.

    Any bit, order, length, id, dtype or encoding that differs changes it.
    """
    leaves = [
        xxhash.xxh3_64_intdigest(payload[start : start + LEAF_BYTES]) for start in range(0, len(payload), LEAF_BYTES)
    ]
    bound = b"\0".join(
        (info.id, info.fingerprint.encode(), info.shape.encode(), info.dtype.encode(), info.encoding.encode())
    )
    return xxhash.xxh3_64_intdigest(struct.pack(f"<QQ{len(leaves)}Q", CHECKSUM_VERSION, len(payload), *leaves) + bound)
