"""What a new link goes by, and how fast it is: found out once, before its first push.

Prober (sender's port)                               Probes (receiver's port)
    Probe ───────────────────────────────────────────▶ what comes under these bits is taken into staging and dropped
    a message to warm up, then some more, all at once ═▶
    ProbeOver ───────────────────────────────────────▶ no more of it
"""

import asyncio
import functools
import logging
import secrets

import msgspec

from kvrelay.common.errors import TransferFailed
from kvrelay.transfer.control import Probe, ProbeOver
from kvrelay.transfer.counters import Counters
from kvrelay.transfer.frame import make_tag, split_tag
from kvrelay.transfer.link import Acceptor, Link, LinkSpeed
from kvrelay.transfer.staging import Room, Staging
from kvrelay.transfer.transport import Landing, Memory, Verdict

log = logging.getLogger(__name__)


class LinkRules(msgspec.Struct, frozen=True, kw_only=True):
    """`probe_bytes` are sent at most, and no longer than `probe_seconds`; 0: nothing is measured."""

    require: tuple[str, ...] = ()
    """Transports as UCX calls them, or what their names begin with up to a _ (rc for rc_mlx5). A link must have one; none: any link."""
    refuse: bool = True
    """Links that have none of them; else they are warned of."""
    probe_bytes: int = 0
    probe_seconds: float = 0.5

    def allows(self, carriers: tuple[str, ...]) -> bool:
        names = [carrier.partition("/")[0] for carrier in carriers]
        return not self.require or any(f"{name}_".startswith(f"{wanted}_") for name in names for wanted in self.require)


class Prober:
    """`frame_bytes`: of a message. Shares the staging and the windows of pushes."""

    def __init__(self, rules: LinkRules, staging: Staging, frame_bytes: int, counters: Counters) -> None:
        self._rules = rules
        self._counters = counters
        self._staging = staging
        self._frame_bytes = frame_bytes

    async def check(self, link: Link) -> None:
        """Before anything else is sent over it. Raises TransferFailed where the link is refused, or breaks."""
        carriers = link.peer.carriers
        if not self._rules.allows(carriers):
            told = f"the link to {link.remote.pod_id} goes by {', '.join(carriers)}, none of {', '.join(self._rules.require)}"
            if self._rules.refuse:
                self._counters.links_refused += 1
                raise TransferFailed(told)
            log.warning("%s", told)
        rate = await self._measure(link) if self._rules.probe_bytes else 0.0
        link.speed = LinkSpeed(carriers, rate)
        log.info("link to %s: %s, %.2f GB/s", link.remote.pod_id, ", ".join(carriers), rate / 1e9)

    async def _measure(self, link: Link) -> float:
        """Bytes per second."""
        bits, size = 1 + secrets.randbelow((1 << 40) - 1), min(self._frame_bytes, link.remote.frame_bytes)
        link.tell(Probe(link=link.number, ticket_bits=bits))
        try:
            await self._send(link, bits, size, 1)
            started = asyncio.get_running_loop().time()
            count = await self._send(link, bits, size, max(1, self._rules.probe_bytes // size))
            return count * size / max(asyncio.get_running_loop().time() - started, 1e-9)
        finally:
            link.tell(ProbeOver(link=link.number, ticket_bits=bits))

    async def _send(self, link: Link, bits: int, size: int, count: int) -> int:
        """How many were sent, and taken there."""
        loop, sends = asyncio.get_running_loop(), list[asyncio.Future[None]]()
        end = loop.time() + self._rules.probe_seconds
        while len(sends) < count and loop.time() < end:
            await link.window.acquire()
            try:
                room = await self._staging.acquire(size)
            except BaseException:  # a cancellation as well: the place in the window is given back
                link.window.release()
                raise
            sends.append(link.peer.send(make_tag(bits, len(sends)), room.memory))
            sends[-1].add_done_callback(functools.partial(self._sent, link, room))
        await asyncio.gather(*sends)
        return len(sends)

    def _sent(self, link: Link, room: Room, sent: asyncio.Future[None]) -> None:
        link.window.release()
        self._staging.release(room)
        if not sent.cancelled() and (error := sent.exception()) is not None:
            log.debug("a probe was not sent: %s", error)


class Probes:
    def __init__(self, acceptor: Acceptor, staging: Staging) -> None:
        self._acceptor = acceptor
        self._staging = staging
        self._links: dict[int, int] = {}
        """By the bits of tags: whose they are."""

    def on_probe(self, message: Probe) -> None:
        self._links = {bits: link for bits, link in self._links.items() if self._acceptor.get(link) is not None}
        if self._acceptor.get(message.link) is not None:
            self._links[message.ticket_bits] = message.link

    def on_over(self, message: ProbeOver) -> None:
        self._links.pop(message.ticket_bits, None)

    def accept(self, tag: int, length: int) -> Landing | Verdict | None:
        """None: it is no probe."""
        if not self._links or split_tag(tag)[0] not in self._links:
            return None
        if length > self._staging.slot_bytes:
            return Verdict.DRAIN
        room = self._staging.try_acquire(length)
        return Verdict.WAIT if room is None else ProbeLanding(self._staging, room)


class ProbeLanding:
    __slots__ = ("_room", "_staging")

    def __init__(self, staging: Staging, room: Room) -> None:
        self._staging = staging
        self._room = room

    @property
    def buffer(self) -> Memory:
        return self._room.memory

    def landed(self) -> None:
        self._staging.release(self._room)

    def lost(self, error: TransferFailed) -> None:
        self._staging.release(self._room)
