"""Checksum version 1: a tree of XXH3-64, whose leaves can be computed side by side, on a GPU as well.

    leaf i = XXH3-64(payload[16384 i : 16384 (i + 1)], seed 0)
    seed   = XXH3-64(u64 ticket bits, u64 frame number, u64 generation; seed 0)
    value  = XXH3-64(u64 leaf 0, u64 leaf 1, ..., head; seed)

All integers are little endian. `head` is the frame's header before its checksum. So the value changes with every bit, with the
order of leaves and of what is in them, with the length, and with the ticket, generation, frame, layer and tokens.
"""

import struct

import xxhash

VERSION = 1
LEAF_BYTES = 16 << 10
_SEED = struct.Struct("<QQQ")


def checksum(ticket_bits: int, frame_number: int, generation: int, head: bytes, payload_leaves: bytes) -> int:
    """Of a frame's header and of a payload that has these leaves, wherever they were computed."""
    seed = xxhash.xxh3_64_intdigest(_SEED.pack(ticket_bits, frame_number, generation))
    return xxhash.xxh3_64_intdigest(payload_leaves + head, seed)


def leaves(payload: memoryview) -> bytes:
    """The leaves of a payload, as what the value is computed of has them."""
    values = [
        xxhash.xxh3_64_intdigest(payload[start : start + LEAF_BYTES]) for start in range(0, len(payload), LEAF_BYTES)
    ]
    return struct.pack(f"<{len(values)}Q", *values)
