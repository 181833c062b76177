"""One process's end of all its transfers: a transport, a sender and a receiver on it, and who gets which message."""

import logging

import msgspec
import numpy as np

from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.layout import KvLayout
from kvrelay.transfer import checksum, control
from kvrelay.transfer.control import Abort, Ack, Begin, Gone, Hello, Identity, Nack, Probe, ProbeOver, Refused, Welcome
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.link import Acceptor, Dialer, Link
from kvrelay.transfer.linkcheck import LinkRules, Prober, Probes
from kvrelay.transfer.receiver import Receiver
from kvrelay.transfer.sender import PushOptions, Sender
from kvrelay.transfer.staging import Allocate, Staging, host_memory
from kvrelay.transfer.transport import Buffer, Landing, Transport, Verdict

log = logging.getLogger(__name__)

SLOT_ALIGNMENT = 256
"""So that a device reads and writes a frame in its widest words."""


class PortConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes. `staging_bytes` is for frames each way; `depth` the frames in flight over a link."""

    frame_bytes: int = 1 << 20
    staging_bytes: int = 64 << 20
    depth: int = 8
    checksums: bool = True
    handshake_seconds: float = 5.0
    grace_seconds: float = 0.3
    """What frames in flight get to end by themselves once their transfer has ended, before the link is broken."""
    rules: LinkRules = LinkRules()

    def __post_init__(self) -> None:
        for name in ("frame_bytes", "staging_bytes", "depth", "handshake_seconds", "grace_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


class TransferPort:
    """`start` once, on the loop that it lives on; `close` once. `sender` and `receiver` may be used between."""

    def __init__(
        self,
        transport: Transport,
        pod_id: PodId,
        epoch: Epoch,
        layout: KvLayout,
        config: PortConfig | None = None,
        allocate: Allocate = host_memory,
    ) -> None:
        """`allocate` makes the arenas of staging, whose memory the transport must be able to carry."""
        config = config or PortConfig()
        row_bytes = max(group.token_bytes for group in layout.groups)
        if config.frame_bytes < row_bytes:
            raise ValueError(
                f"frame_bytes {config.frame_bytes} does not hold one token of one layer, {row_bytes} bytes"
            )
        self.transport = transport
        self.counters = Counters()
        version = checksum.VERSION if config.checksums else 0
        identity = Identity(pod_id=pod_id, epoch=epoch, layout=layout, frame_bytes=config.frame_bytes, checksum=version)
        slot_bytes = -(-config.frame_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        arena_bytes = max(config.staging_bytes // slot_bytes, 1) * slot_bytes
        self._sending = Staging(allocate(arena_bytes), slot_bytes)
        self._receiving = Staging(allocate(arena_bytes), slot_bytes, transport.resume)
        self._dialer = Dialer(transport, identity, self.counters, config.depth, config.handshake_seconds)
        self._acceptor = Acceptor(transport, identity, self.counters, config.depth)
        self._dialer.check = Prober(config.rules, self._sending, config.frame_bytes, self.counters).check
        self._probes = Probes(self._acceptor, self._receiving)
        options = PushOptions(config.frame_bytes, config.checksums, config.grace_seconds)
        self.sender = Sender(self._dialer, self._sending, layout, self.counters, options)
        self.receiver = Receiver(
            self._acceptor,
            self._receiving,
            layout,
            self.counters,
            frame_bytes=config.frame_bytes,
            grace_seconds=config.grace_seconds,
        )

    @property
    def address(self) -> bytes:
        """For tickets: where senders connect to."""
        return self.transport.address

    @property
    def links(self) -> list[Link]:
        """Open, to receivers."""
        return self._dialer.links

    @property
    def staging_bytes(self) -> int:
        """In use now, both ways."""
        return self._sending.used_bytes + self._receiving.used_bytes

    def start(self) -> None:
        """Raises Internal where the transport does not start."""
        self.transport.start(self)

    async def close(self) -> None:
        """Ends pushes and revokes tickets, telling the other ends, then the transport."""
        await self.sender.close()
        self.receiver.close_all()
        await self._dialer.close()
        await self.transport.close()

    # The transport's inbox.

    def accept(self, tag: int, length: int) -> Landing | Verdict:
        if tag != control.TAG:
            probe = self._probes.accept(tag, length)
            return self.receiver.accept(tag, length) if probe is None else probe
        if length > control.MAX_CONTROL_BYTES:
            self.counters.messages_stray += 1
            return Verdict.DRAIN
        return ControlLanding(self, np.empty(length, np.uint8))

    def hear(self, buffer: Buffer) -> None:
        """One control message. Nothing in it, and nothing that it causes, ends the loop."""
        try:
            self._dispatch(control.decode(buffer))
        except (msgspec.MsgspecError, KvrelayError) as error:
            self.counters.handler_errors += 1
            log.warning("a control message was not understood: %s", error)
        except Exception:  # a fault of ours in one message must not end the transport of all others
            self.counters.handler_errors += 1
            log.exception("a control message was not handled")

    def _dispatch(self, message: control.AnyControl) -> None:
        match message:
            case Hello():
                self._acceptor.on_hello(message)
            case Welcome():
                self._dialer.on_welcome(message)
            case Refused():
                self._dialer.on_refused(message)
            case Gone():
                self._dialer.on_gone(message)
                self._acceptor.on_gone(message)
            case Begin():
                self.receiver.on_begin(message)
            case Abort():
                self.receiver.on_abort(message)
            case Probe():
                self._probes.on_probe(message)
            case ProbeOver():
                self._probes.on_over(message)
            case Ack():
                self.sender.on_ack(message)
            case Nack():
                self.sender.on_nack(message)


class ControlLanding:
    __slots__ = ("_port", "buffer")

    def __init__(self, port: TransferPort, buffer: Buffer) -> None:
        self.buffer = buffer
        self._port = port

    def landed(self) -> None:
        self._port.hear(self.buffer)

    def lost(self, error: TransferFailed) -> None:
        log.debug("a control message was lost: %s", error)
