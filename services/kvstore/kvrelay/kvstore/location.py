"""Where a block lies, as the index keeps it: 43 bytes a location, several of them one after the other.

Four parts, little endian: what blocks of one node have in common (27 bytes), size (4), checksum (8), and when the location was
said (4), in seconds by the clock of Redis, which writes it.
"""

import functools
import itertools
import struct
from collections.abc import Sequence
from typing import cast

import msgspec
import xxhash

from kvrelay.common.ids import Epoch
from kvrelay.common.layout import KvDtype

RECORD_BYTES = 43
SAID_BYTES = 4
"""The last of them."""
MAX_LOCATIONS = 16
"""Of one block. More would be of no use: the oldest makes way."""
TIERS = ("cpu", "file", "s3")
ENCODINGS = ("exact", "zstd")
_DTYPES = tuple(KvDtype)
_COMMON = struct.Struct("<Q8sBBB8s")
_RECORD = struct.Struct("<27sIQI")


class Location(msgspec.Struct, frozen=True, gc=False):
    node: int
    """See `node_key`."""
    epoch: Epoch
    """Of the node; what names another is gone."""
    tier: str
    dtype: KvDtype
    encoding: str
    shape: str
    """16 hexadecimal digits."""
    size: int
    """Bytes, as stored."""
    checksum: int

    def pack(self) -> bytes:
        """Not yet said."""
        common = _COMMON.pack(
            self.node,
            bytes.fromhex(self.epoch),
            TIERS.index(self.tier),
            _DTYPES.index(self.dtype),
            ENCODINGS.index(self.encoding),
            bytes.fromhex(self.shape),
        )
        return _RECORD.pack(common, self.size, self.checksum, 0)


_Common = tuple[int, Epoch, str, KvDtype, str, str]


@functools.lru_cache(maxsize=4096)
def _common(packed: bytes) -> _Common | None:
    """The first fields of a location. Few at a time: nodes, by what they hold."""
    node, epoch, tier, dtype, encoding, shape = _COMMON.unpack(packed)
    if tier >= len(TIERS) or dtype >= len(_DTYPES) or encoding >= len(ENCODINGS):
        return None
    return node, Epoch(epoch.hex()), TIERS[tier], _DTYPES[dtype], ENCODINGS[encoding], shape.hex()


def unpack(values: Sequence[bytes | None]) -> list[list[Location]]:
    """Of each value. What is no location is left out: someone else's bytes, or a later version's, are a miss."""
    ours = [value if value and len(value) % RECORD_BYTES == 0 else b"" for value in values]
    decoded = _decode(b"".join(ours))
    if len(decoded) == len(ours) and all(ours):
        found = [[location] for location in decoded]
    else:
        ends = list(itertools.accumulate(len(value) // RECORD_BYTES for value in ours))
        found = [decoded[start:end] for start, end in itertools.pairwise([0, *ends])]
    if None in decoded:
        return [[location for location in locations if location is not None] for locations in found]
    return cast("list[list[Location]]", found)


def _decode(records: bytes) -> list[Location | None]:
    """Hundreds at once for each prompt, mostly of one node: what it costs is the making of objects."""
    decoded: list[Location | None] = []
    last, common = b"", None
    for packed, size, checksum, _ in _RECORD.iter_unpack(records):
        if packed != last:
            last, common = packed, _common(packed)
        if common is None:
            decoded.append(None)
        else:
            node, epoch, tier, dtype, encoding, shape = common
            decoded.append(Location(node, epoch, tier, dtype, encoding, shape, size, checksum))
    return decoded


def node_key(node_id: str) -> int:
    """A node's name in the index. Two nodes of one key would answer for each other's blocks, with a miss."""
    return xxhash.xxh3_64_intdigest(node_id.encode())
