"""Block identity: the same id for the same tokens after the same prefix, in every process and on every machine.

An id is the first 128 bits of SHA-256 over a fixed encoding (little endian):

    b"kvrelay.block.v1\\0"
    u16 length of the fingerprint in UTF-8, the fingerprint     the namespace
    16 bytes: the parent's id, zeros for the first span
    u16 number of extra keys, then each: u16 length, UTF-8      LoRA, images, cache salt; sorted
    16 × u32: the token ids

Tenants may be hostile, so the hash is a cryptographic one. A span is always 16 tokens, whatever a pod's block size.
"""

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.common.ids import BlockId, Fingerprint

SPAN = 16
ID_BYTES = 16
NO_PARENT = BlockId(bytes(ID_BYTES))
_DOMAIN = b"kvrelay.block.v1\0"
_TOKENS = struct.Struct(f"<{SPAN}I")


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<H", len(data)) + data


class BlockHasher:
    """Chains the ids of one namespace and one set of extra keys."""

    def __init__(self, fingerprint: Fingerprint, extra_keys: Sequence[str] = ()) -> None:
        keys = sorted(extra_keys)
        self._head = _DOMAIN + _text(fingerprint)
        self._keys = struct.pack("<H", len(keys)) + b"".join(_text(key) for key in keys)

    def next_id(self, parent: BlockId, tokens: Sequence[int]) -> BlockId:
        """The id of the 16 `tokens` that follow the span `parent`."""
        data = self._head + parent + self._keys + _TOKENS.pack(*tokens)
        return BlockId(hashlib.sha256(data).digest()[:ID_BYTES])

    def extend(self, ids: list[BlockId], tokens: Sequence[int]) -> None:
        """Appends the ids of all full spans of `tokens` beyond those that `ids` already names."""
        parent = ids[-1] if ids else NO_PARENT
        for start in range(len(ids) * SPAN, len(tokens) - SPAN + 1, SPAN):
            parent = self.next_id(parent, tokens[start : start + SPAN])
            ids.append(parent)


def extra_keys(cache_salt: str = "", lora: str = "") -> tuple[str, ...]:
    """The request's keys that separate equal tokens: `salt:…` and `lora:…`, where set."""
    keys = (f"salt:{cache_salt}" if cache_salt else "", f"lora:{lora}" if lora else "")
    return tuple(key for key in keys if key)
