"""A block as an object: its bytes, and its name, which says all that is known of it.

An object is a file's header page (see `blockfile`) and then the payload, nothing more. Its key says all that the header
says:

    <prefix>/<first 2 of the id's hex>/<hex id>.<version><base64url of a msgpack list: BlockInfo's fields after the id>

so that a listing is an index: opening a tier of half a million blocks takes 500 requests, where headers or object
metadata would take half a million. A name of over 240 characters goes on behind a `/`: stores that keep objects as
files have names of 255 bytes at most. Equal keys mean equal contents, so an object that is written twice, or late, does
no harm; and whoever has a block's BlockInfo and its owner's prefix has its key, for `ObjectTier.get_at`.
"""

import base64
import sys
from typing import Final

import msgspec

from kvrelay.kvstore.tiers.base import Corrupt
from kvrelay.kvstore.tiers.blockfile import ID_BYTES, PAGE_BYTES, Damaged, decode_header
from kvrelay.transfer.block import BlockInfo, checksum

KEY_VERSION: Final = "2"
NAME_MAX_CHARS: Final = 240
_FIELDS: Final = BlockInfo.__struct_fields__[1:]


def block_key(prefix: str, info: BlockInfo) -> str:
    rest = base64.urlsafe_b64encode(msgspec.msgpack.encode(msgspec.structs.astuple(info)[1:])).decode().rstrip("=")
    name = f"{info.id.hex()}.{KEY_VERSION}{rest}"
    parts = [name[start : start + NAME_MAX_CHARS] for start in range(0, len(name), NAME_MAX_CHARS)]
    return "/".join((prefix, name[:2], *parts))


def parse_key(prefix: str, key: str) -> BlockInfo | None:
    """What a key says; None for one that `block_key` does not make."""
    hex_id, _, rest = "".join(key.removeprefix(prefix + "/").split("/")[1:]).partition(f".{KEY_VERSION}")
    try:
        values = msgspec.msgpack.decode(base64.urlsafe_b64decode(rest + "=" * (-len(rest) % 4)), type=list)
        # Half a million blocks are of few models: equal texts are kept once.
        values = [sys.intern(value) if isinstance(value, str) else value for value in values]
        info = msgspec.convert({"id": bytes.fromhex(hex_id), **dict(zip(_FIELDS, values, strict=True))}, BlockInfo)
    except (ValueError, msgspec.MsgspecError):
        return None
    return info if len(info.id) == ID_BYTES and block_key(prefix, info) == key else None


def object_bytes(info: BlockInfo) -> int:
    return PAGE_BYTES + info.size


def verify(data: memoryview, info: BlockInfo) -> memoryview:
    """The payload of an object that is `info`'s to the bit. Raises Corrupt."""
    if len(data) != object_bytes(info):
        raise Corrupt(f"{len(data)} bytes long instead of {object_bytes(info)}")
    try:
        found = decode_header(data[:PAGE_BYTES])
    except Damaged as error:
        raise Corrupt(str(error)) from None
    if found != info:
        raise Corrupt(f"the header is of {found}")
    if checksum(info, data[PAGE_BYTES:]) != info.checksum:
        raise Corrupt("the payload does not match its checksum")
    return data[PAGE_BYTES:]
