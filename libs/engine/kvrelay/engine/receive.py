"""Decode side: the tickets by which transfers fill reservations.

    grant ──▶ Ticket ──▶ frames ──▶ sink.write into the reservation's blocks ──▶ sink.complete ──▶ engine.attach
    close (revoked, aborted, superseded) or expired ──▶ what still comes is drained, never written
    sink.failed ──▶ the router is told and tries again by a higher attempt; else the ticket's deadline decides

Between the grant and any of these ends, a reservation's own blocks are the transfer's. The prefix that was found is shared and
lies outside of the ticket's range.
"""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import Callable

from kvrelay.common.errors import KvrelayError, TransferFailed
from kvrelay.common.ids import RequestId
from kvrelay.common.logs import about
from kvrelay.common.request import ChoiceDelta, Ticket, TicketTarget
from kvrelay.engine.cache import KvCache
from kvrelay.engine.core import Engine, Reservation
from kvrelay.engine.messages import EngineInfo
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.port import TransferPort
from kvrelay.transfer.transport import Memory

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Granted:
    ticket: Ticket
    expiry: asyncio.TimerHandle


class Tickets:
    """All tickets that may still be filled, by request. Everything runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        port: TransferPort,
        cache: KvCache,
        info: EngineInfo,
        on_change: Callable[[], None],
        on_filled: Callable[[RequestId], None],
        on_failed: Callable[[RequestId, int, KvrelayError], None],
    ) -> None:
        self.engine = engine
        self.cache = cache
        self.on_change = on_change
        self.on_filled = on_filled
        self.on_failed = on_failed
        self.vocab_size = info.vocab_size
        self._port = port
        self._info = info
        self._granted: dict[RequestId, Granted] = {}

    def grant(self, reservation: Reservation, timeout_ms: int) -> Ticket:
        """The reservation's ticket; the same one when the same attempt asks again."""
        request_id = reservation.request_id
        known = self._granted.get(request_id)
        if known is not None and known.ticket.generation == reservation.generation:
            return known.ticket
        self.close(request_id)
        target = TicketTarget(
            rank=0,
            group=0,
            address=self._port.address,
            ticket_bits=1 + secrets.randbelow((1 << 40) - 1),
            first_token=reservation.first_token,
            end_token=reservation.end_token,
        )
        ticket = Ticket(
            request_id=request_id,
            attempt=reservation.attempt,
            pod_id=self._info.pod_id,
            epoch=self._info.epoch,
            generation=reservation.generation,
            timeout_ms=timeout_ms,
            targets=(target,),
            layout=self._info.layout,
        )
        self._port.receiver.open(ticket, ReservationSink(self, reservation))
        expiry = asyncio.get_running_loop().call_later(timeout_ms / 1000, self._expired, request_id)
        self._granted[request_id] = Granted(ticket, expiry)
        return ticket

    def close(self, request_id: RequestId) -> None:
        """When this returns, nothing writes into the request's blocks any more. Unknown ids are ignored."""
        granted = self._granted.pop(request_id, None)
        if granted is not None:
            granted.expiry.cancel()
            self._port.receiver.close(granted.ticket)

    def _expired(self, request_id: RequestId) -> None:
        log.warning("the ticket of %s expired", request_id, extra=about(request_id))
        self.close(request_id)
        self.engine.expire_reservation(request_id)
        self.on_change()


class ReservationSink:
    """Where the KV of one ticket goes."""

    def __init__(self, tickets: Tickets, reservation: Reservation) -> None:
        self._tickets = tickets
        self._reservation = reservation

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        return self._tickets.cache.write_part(part, self._reservation.blocks, data, check)

    def complete(self, final: FinalFrame) -> None:
        """Raises TransferFailed for tokens that cannot be this request's first ones: the ticket's deadline still runs."""
        for delta in final.deltas:
            self._check(delta)
        self._tickets.engine.attach(self._reservation.request_id, self._reservation.generation, final.deltas)
        self._tickets.close(self._reservation.request_id)
        self._tickets.on_filled(self._reservation.request_id)
        self._tickets.on_change()

    def _check(self, delta: ChoiceDelta) -> None:
        mine = delta.request_id == self._reservation.request_id and delta.index == 0 and len(delta.token_ids) == 1
        if not mine or not 0 <= delta.token_ids[0] < self._tickets.vocab_size:
            raise TransferFailed(f"no first token of {self._reservation.request_id}: choice {delta.choice} there")

    def failed(self, error: KvrelayError) -> None:
        request_id = self._reservation.request_id
        log.warning("the transfer of %s failed: %s", request_id, error.message, extra=about(request_id))
        self._tickets.on_failed(self._reservation.request_id, self._reservation.attempt, error)
