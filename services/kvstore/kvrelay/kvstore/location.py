"""Where a block lies, as the index keeps it: 40 bytes a location, several of them one after the other."""

import struct

import msgspec
import xxhash

from kvrelay.common.ids import Epoch
from kvrelay.common.layout import KvDtype

RECORD_BYTES = 40
MAX_LOCATIONS = 16
"""Of one block. More would be of no use: the oldest makes way."""
TIERS = ("cpu", "file", "s3")
ENCODINGS = ("exact", "zstd", "fp8")
_DTYPES = tuple(KvDtype)
_RECORD = struct.Struct("<Q8sBBBxI8sQ")


class Location(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    """See `node_key`."""
    epoch: Epoch
    """Of the node; what names another is gone."""
    tier: str
    dtype: KvDtype
    encoding: str
    size: int
    """Bytes, as stored."""
    shape: str
    """16 hexadecimal digits."""
    checksum: int

    def pack(self) -> bytes:
        return _RECORD.pack(
            self.node,
            bytes.fromhex(self.epoch),
            TIERS.index(self.tier),
            _DTYPES.index(self.dtype),
            ENCODINGS.index(self.encoding),
            self.size,
            bytes.fromhex(self.shape),
            self.checksum,
        )


def unpack(value: bytes) -> list[Location]:
    """What is no location is left out: someone else's bytes, or a later version's, are a miss."""
    found = []
    for start in range(0, len(value) - RECORD_BYTES + 1, RECORD_BYTES):
        node, epoch, tier, dtype, encoding, size, shape, checksum = _RECORD.unpack_from(value, start)
        if tier < len(TIERS) and dtype < len(_DTYPES) and encoding < len(ENCODINGS):
            found.append(
                Location(
                    node=node,
                    epoch=Epoch(epoch.hex()),
                    tier=TIERS[tier],
                    dtype=_DTYPES[dtype],
                    encoding=ENCODINGS[encoding],
                    size=size,
                    shape=shape.hex(),
                    checksum=checksum,
                )
            )
    return found


def node_key(node_id: str) -> int:
    """A node's name in the index. Two nodes of one key would answer for each other's blocks, with a miss."""
    return xxhash.xxh3_64_intdigest(node_id.encode())
