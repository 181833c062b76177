"""A frame, version 2: a header of 64 bytes and a payload, rows of KV or the final state. Each is a message of its own, the header first.

    u16 magic 0x4B02    u8 flags (1 final, 2 checksum version 1)    u8 group    u16 layer    u16 number of layers
    u8 dtype on the wire    3 bytes 0    u32 first token    u32 number of tokens    u64 payload bytes    u64 generation
    20 bytes 0    u64 checksum

Little endian. The payload is, for one layer after the other, K of all tokens and then V of all of them, each [n, heads, head size].
So it may lie in a device's memory, which no host looks into, and the receiver knows where it goes before it takes it.

A tag is 40 bits of the ticket and 24 bits of the frame: the highest is the header's, the others the frame's number, from 0. No
frame has ticket bits 0.
"""

import dataclasses
import struct

import msgspec
import numpy as np

from kvrelay.common.errors import TransferFailed
from kvrelay.common.layout import KvDtype
from kvrelay.common.request import ChoiceDelta
from kvrelay.transfer.checksum import checksum
from kvrelay.transfer.copies import Part
from kvrelay.transfer.transport import Buffer

MAGIC = 0x4B02
FINAL = 1
CHECKED = 2
HEAD = struct.Struct("<HBBHHB3xIIQQ20x")
HEADER_BYTES = 64
FRAME_BITS = 24
IS_HEADER = 1 << FRAME_BITS - 1
MAX_FRAMES = IS_HEADER
MAX_FINAL_BYTES = 1 << 20
CODES = {KvDtype.FLOAT32: 1, KvDtype.BFLOAT16: 2, KvDtype.FLOAT16: 3, KvDtype.FLOAT8_E4M3: 4}
_DTYPES = {code: dtype for dtype, code in CODES.items()}


class FrameRejected(TransferFailed):
    """A frame that is not what its ticket lets in."""


class ChecksumError(FrameRejected):
    """What came is not what was sent."""


class FinalFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a push: the first token of each choice. `extra` is reserved for sampler and grammar state."""

    deltas: tuple[ChoiceDelta, ...]
    num_prompt_tokens: int
    extra: bytes = b""


_FINAL = msgspec.msgpack.Decoder(FinalFrame)


def make_tag(ticket_bits: int, frame_number: int) -> int:
    """Of a frame's payload; with IS_HEADER also set, of its header."""
    return ticket_bits << FRAME_BITS | frame_number


def split_tag(tag: int) -> tuple[int, int, bool]:
    """The ticket's bits, the frame's number, and whether it is a header."""
    return tag >> FRAME_BITS, tag & (MAX_FRAMES - 1), bool(tag & IS_HEADER)


def encode_final(final: FinalFrame) -> bytes:
    data = msgspec.msgpack.encode(final)
    if len(data) > MAX_FINAL_BYTES:
        raise TransferFailed(f"the final frame has {len(data)} bytes, over {MAX_FINAL_BYTES}")
    return data


def decode_final(payload: memoryview) -> FinalFrame:
    try:
        return _FINAL.decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise FrameRejected(f"not a final frame: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """Of a frame. `part` is None for a final one."""

    group: int
    part: Part | None
    payload_bytes: int
    generation: int

    @property
    def final(self) -> bool:
        return self.part is None

    def seal(self, tag: int, payload_leaves: bytes | None) -> Buffer:
        """The message that goes ahead of the payload under `tag`. No leaves: no checksum."""
        head = self._pack(checked=payload_leaves is not None)
        value = 0 if payload_leaves is None else self._checksum(tag, head, payload_leaves)
        return np.frombuffer(head + value.to_bytes(8, "little"), np.uint8)

    def _pack(self, *, checked: bool) -> bytes:
        flags, part = FINAL * self.final | CHECKED * checked, self.part
        place = (0, 0, 0, 0, 0)
        if part is not None:
            place = (part.layer, part.num_layers, CODES[part.dtype], part.first_token, part.num_tokens)
        return HEAD.pack(MAGIC, flags, self.group, *place, self.payload_bytes, self.generation)

    def _checksum(self, tag: int, head: bytes, payload_leaves: bytes) -> int:
        bits, number, _ = split_tag(tag)
        return checksum(bits, number, self.generation, head, payload_leaves)

    def check(self, tag: int, value: int, payload_leaves: bytes) -> None:
        """Raises ChecksumError unless `value` is the checksum of this header under `tag` and of a payload with these leaves."""
        if self._checksum(tag, self._pack(checked=True), payload_leaves) != value:
            raise ChecksumError("a frame's checksum is wrong")


def open_header(buffer: Buffer, *, checked: bool) -> tuple[Header, int]:
    """A header and its checksum. Where its payload may go is for the ticket to say; that the two belong together, for `check`.

    Raises FrameRejected.
    """
    if buffer.nbytes != HEADER_BYTES:
        raise FrameRejected(f"a header of {buffer.nbytes} bytes")
    head = bytes(buffer.data[: HEAD.size])
    magic, flags, group, layer, layers, code, first_token, num_tokens, payload_bytes, generation = HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameRejected(f"not a frame of this version: {magic:#06x}")
    if bool(flags & CHECKED) != checked:
        raise FrameRejected(f"checksums are {'on' if checked else 'off'} on this connection, and not in this frame")
    part = None
    if not flags & FINAL:
        if code not in _DTYPES:
            raise FrameRejected(f"no dtype has the code {code}")
        part = Part(layer, layers, first_token, num_tokens, _DTYPES[code])
    header = Header(group, part, payload_bytes, generation)
    if header._pack(checked=checked) != head:
        raise FrameRejected("a header with bits that say nothing")
    return header, int.from_bytes(buffer.data[HEAD.size :], "little")
