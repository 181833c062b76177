"""What two ports say to one another beside frames: messages of tag 0, in MessagePack, 64 KiB at most."""

from typing import Annotated

import msgspec
import numpy as np

from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.layout import KvLayout
from kvrelay.transfer.transport import Buffer

TAG = 0
PROTOCOL = 2
"""With frames of version 2."""
MAX_CONTROL_BYTES = 64 << 10
MAX_TEXT = 500

LinkId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
TicketBits = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Generation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Address = Annotated[bytes, msgspec.Meta(max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who a port is. `checksum` is the version that its frames carry, 0 for none."""

    pod_id: PodId
    epoch: Epoch
    layout: KvLayout
    frame_bytes: Annotated[int, msgspec.Meta(ge=1)]
    checksum: int

    @property
    def place(self) -> tuple[str, int, int, int]:
        """What one process at a time can be: a rank of a pod."""
        return self.pod_id, self.layout.dp_rank, self.layout.pp_rank, self.layout.tp_rank


class Control(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Hello(Control, frozen=True, kw_only=True):
    """Sender → receiver, first. `link` is random and names the connection in what the sender says later."""

    protocol: int
    link: LinkId
    address: Address
    identity: Identity


class Welcome(Control, frozen=True, kw_only=True):
    link: LinkId
    identity: Identity


class Refused(Control, frozen=True, kw_only=True):
    link: LinkId
    code: Text
    message: Text


class Gone(Control, frozen=True, kw_only=True):
    """Either way, over a connection of its own: this link is broken at my end. (Closing one end does not close the other.)"""

    link: LinkId


class Begin(Control, frozen=True, kw_only=True):
    """Sender → receiver: frames of this ticket come over this link from here on. To `address` goes Gone if there is no link."""

    link: LinkId
    address: Address
    ticket_bits: TicketBits
    generation: Generation


class Abort(Control, frozen=True, kw_only=True):
    """Sender → receiver: no more frames come."""

    link: LinkId
    ticket_bits: TicketBits
    generation: Generation
    code: Text
    message: Text


class Probe(Control, frozen=True, kw_only=True):
    """Sender → receiver: what comes under these bits measures the link; it is taken and dropped."""

    link: LinkId
    ticket_bits: TicketBits


class ProbeOver(Control, frozen=True, kw_only=True):
    """Sender → receiver: no more of it comes."""

    link: LinkId
    ticket_bits: TicketBits


class Ack(Control, frozen=True, kw_only=True):
    """Receiver → sender: all of it lies in the receiver's blocks."""

    ticket_bits: TicketBits
    generation: Generation


class Nack(Control, frozen=True, kw_only=True):
    """Receiver → sender: it never will."""

    ticket_bits: TicketBits
    generation: Generation
    code: Text
    message: Text


AnyControl = Hello | Welcome | Refused | Gone | Begin | Abort | Probe | ProbeOver | Ack | Nack
_DECODER: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def encode(message: Control) -> Buffer:
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_CONTROL_BYTES:
        raise ValueError(f"a control message of {len(data)} bytes, over {MAX_CONTROL_BYTES}")
    return np.frombuffer(data, np.uint8)


def decode(buffer: Buffer) -> AnyControl:
    """Raises msgspec.MsgspecError or ValueError."""
    return _DECODER.decode(buffer.data)
