"""A frame: 64 bytes of header, then rows of KV (or the final state), in one buffer and one message.

    u16 magic 0x4B01    u8 flags (1 final, 2 checksum version 1)    u8 group    u16 layer    u8 dtype on the wire    u8 0
    u32 first token     u32 number of tokens     u32 payload bytes     u32 0     u64 generation     24 bytes 0     u64 checksum

Little endian. The payload of n tokens is K of all of them, then V of all of them, each [n, heads, head size]. The tag is
40 bits of the ticket and 24 bits of the frame's number, from 0; no frame has ticket bits 0.
"""

import dataclasses
import struct

import msgspec

from kvrelay.common.errors import TransferFailed
from kvrelay.common.layout import KvDtype
from kvrelay.common.request import ChoiceDelta
from kvrelay.transfer.checksum import checksum
from kvrelay.transfer.transport import Buffer

MAGIC = 0x4B01
FINAL = 1
CHECKED = 2
HEAD = struct.Struct("<HBBHBBIIIIQ24x")
HEADER_BYTES = 64
FRAME_BITS = 24
MAX_FRAMES = 1 << FRAME_BITS
MAX_FINAL_BYTES = 1 << 20
CODES = {KvDtype.FLOAT32: 1, KvDtype.BFLOAT16: 2, KvDtype.FLOAT16: 3, KvDtype.FLOAT8_E4M3: 4}


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
    return ticket_bits << FRAME_BITS | frame_number


def split_tag(tag: int) -> tuple[int, int]:
    return tag >> FRAME_BITS, tag & (MAX_FRAMES - 1)


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
    """Of a KV frame: `num_tokens` rows of `layer` from `first_token`, as the wire dtype of code `dtype`. Of a final one: zeros."""

    group: int
    layer: int
    dtype: int
    first_token: int
    num_tokens: int
    generation: int
    final: bool = False

    def seal(self, buffer: Buffer, tag: int, *, checked: bool) -> None:
        """Writes the header before the payload that `buffer` already holds."""
        flags = FINAL * self.final | CHECKED * checked
        payload_bytes = buffer.nbytes - HEADER_BYTES
        head = HEAD.pack(
            *(MAGIC, flags, self.group, self.layer, self.dtype, 0),
            *(self.first_token, self.num_tokens, payload_bytes, 0, self.generation),
        )
        value = checksum(*split_tag(tag), self.generation, head, buffer.data[HEADER_BYTES:]) if checked else 0
        buffer.data[:HEADER_BYTES] = head + value.to_bytes(8, "little")


def open_frame(buffer: Buffer, tag: int, *, checked: bool) -> Header:
    """The header of a frame that came whole and, with `checked`, as it was sent. Where it may go is for the ticket to say.

    Raises FrameRejected.
    """
    view = buffer.data
    head = bytes(view[: HEAD.size])
    magic, flags, group, layer, dtype, _, first_token, num_tokens, payload_bytes, _, generation = HEAD.unpack(head)
    if magic != MAGIC:
        raise FrameRejected(f"not a frame of this version: {magic:#06x}")
    if bool(flags & CHECKED) != checked:
        raise FrameRejected(f"checksums are {'on' if checked else 'off'} on this connection, and not in this frame")
    if payload_bytes != len(view) - HEADER_BYTES:
        raise FrameRejected(f"{len(view) - HEADER_BYTES} bytes of payload where {payload_bytes} were announced")
    if checked:
        value = checksum(*split_tag(tag), generation, head, view[HEADER_BYTES:])
        if value != int.from_bytes(view[HEAD.size : HEADER_BYTES], "little"):
            raise ChecksumError("a frame's checksum is wrong")
    return Header(group, layer, dtype, first_token, num_tokens, generation, bool(flags & FINAL))
