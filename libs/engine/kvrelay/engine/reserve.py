"""Decode side: requests admitted before their KV is here.

    reserve ──▶ RESERVED ── attach ──▶ RUNNING or WAITING, one sequence a choice
                   │  ├──── recompute ──▶ WAITING, with the prefix that was pinned
                   │  └──── a higher attempt ──▶ RESERVED anew, the same blocks, another generation
                   └─────── revoke, abort, deadline ──▶ over

From `reserve` to any of these the blocks beyond the pinned prefix are the transfer's to write, under the generation that
was granted; then they are the sequences'. The pinned prefix is only ever read.
"""

import dataclasses
import itertools
from collections.abc import Iterable

import msgspec

from kvrelay.common.errors import NoCapacity, StaleEpoch, TransferFailed
from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta, EngineRequest
from kvrelay.engine.entry import Entry, delivered
from kvrelay.engine.ledger import Ledger
from kvrelay.engine.manager import KvManager
from kvrelay.engine.messages import RecomputeStarted, TicketRevoked
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.sequence import Sequence, State


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """What a transfer is to fill: positions `first_token` … `end_token` - 1; position p lies in `blocks[p // block_size]`."""

    request_id: RequestId
    attempt: int
    generation: int
    num_cached: int
    """Prompt tokens found here."""
    first_token: int
    end_token: int
    blocks: tuple[int, ...]


class Admission:
    """Grants reservations, and turns each into sequences or takes it back."""

    def __init__(self, ledger: Ledger, manager: KvManager, scheduler: Scheduler) -> None:
        self._ledger = ledger
        self._manager = manager
        self._scheduler = scheduler
        self._generations = itertools.count(1)

    def reserve(self, request: EngineRequest, attempt: int) -> Reservation:
        known = self._ledger.supersede(request, attempt)
        if known is not None and known.attempt == attempt:
            if not known.is_reservation:
                raise StaleEpoch(f"attempt {attempt} of {request.request_id} runs already")
            return _reservation(known)
        if known is not None and known.is_reservation and _same_prompt(known.request, request):
            return self._renew(known, request, attempt)
        if known is not None:
            self._ledger.retire(known, attempt)
        return _reservation(self._grant(request, attempt))

    def _renew(self, entry: Entry, request: EngineRequest, attempt: int) -> Reservation:
        """A higher attempt takes over the blocks; what the lower one's ticket still sends is stale."""
        self._ledger.port.reservation_over(request.request_id)
        entry.renew(request, attempt)
        entry.generation = next(self._generations)
        return _reservation(entry)

    def _grant(self, request: EngineRequest, attempt: int) -> Entry:
        entry = self._ledger.open(request, attempt)
        lead = entry.sequence(0, ())
        hits = self._manager.find(lead, lead.num_prompt)
        if self._manager.cost(lead, lead.num_prompt, hits) > self._scheduler.spare_blocks:
            raise NoCapacity(f"a prompt of {lead.num_prompt} tokens does not fit beside what runs")
        self._manager.pin(lead, hits)
        grown = self._manager.grow(lead, lead.num_prompt)
        assert grown, "spare blocks are free ones"
        lead.num_cached = lead.num_computed
        lead.started = True
        lead.state = State.RESERVED
        entry.reserved, entry.generation, entry.sequences = True, next(self._generations), [lead]
        self._ledger.enter(entry)
        return entry

    def reserve_local(self, request: EngineRequest, attempt: int) -> int:
        known = self._ledger.supersede(request, attempt)
        if known is not None and known.attempt == attempt:
            if known.is_reservation:
                raise StaleEpoch(f"attempt {attempt} of {request.request_id} is a reservation")
            return max((seq.num_cached for seq in known.sequences), default=0)
        if known is not None:
            self._ledger.retire(known, attempt)
        entry = self._ledger.open(request, attempt)
        entry.reserved = True
        lead = entry.sequence(0, ())
        if not self._scheduler.admissible(lead):
            raise NoCapacity(f"a prompt of {lead.num_prompt} tokens could not start soon")
        found = len(self._manager.find(lead, lead.num_prompt - 1)) * self._manager.block_size
        self._ledger.launch(entry, lead)
        return found

    def attach(self, request_id: RequestId, generation: int, first: Iterable[ChoiceDelta]) -> None:
        entry = self._reserved(request_id)
        if entry.generation != generation:
            raise StaleEpoch(f"generation {generation} of {request_id} is over")
        given = {delta.choice: delta for delta in first}
        rest = {c: tokens for c, tokens in delivered(entry.request).items() if c not in entry.aborted}
        missing = [choice for choice, tokens in rest.items() if not tokens and choice not in given]
        if missing:
            raise TransferFailed(f"the first tokens of choices {missing} of {request_id} are missing")
        lead = entry.lead
        self._manager.commit(lead, lead.num_prompt)
        entry.prompt_computed = True
        entry.sequences = [self._branch(entry, lead, choice) for choice in rest]
        for seq in list(entry.sequences):
            self._begin(entry, seq, rest[seq.choice], given.get(seq.choice))

    def _branch(self, entry: Entry, lead: Sequence, choice: int) -> Sequence:
        if lead.state is State.RESERVED:
            lead.state, lead.choice = State.WAITING, choice
            return lead
        seq = entry.sequence(choice, ())
        self._manager.fork(lead, seq)
        seq.num_cached, seq.started = lead.num_cached, True
        return seq

    def _begin(self, entry: Entry, seq: Sequence, forced: tuple[int, ...], first: ChoiceDelta | None) -> None:
        """The choice goes on after its forced tokens, or after the first one, which the prefill side has sampled."""
        self._scheduler.start(seq)
        if forced or first is None:
            seq.tokens.extend(forced)
            self._ledger.end_if_complete(entry, seq)
            return
        seq.tokens.extend(first.token_ids)
        first = msgspec.structs.replace(first, attempt=entry.attempt)
        reason, stop = seq.ending
        if first.finish_reason is None and reason is not None:  # this side's model length may be the shorter
            first = msgspec.structs.replace(first, finish_reason=reason, stop_token_id=stop)
        self._ledger.deltas.append(first)
        if first.finish_reason is not None:
            self._ledger.finish(entry, seq, first.finish_reason)

    def recompute(self, request_id: RequestId) -> None:
        entry = self._reserved(request_id)
        self._ledger.port.reservation_over(request_id)
        entry.generation = next(self._generations)
        lead = entry.lead
        wants_logits = entry.request.sampling.prompt_logprobs is not None and not entry.request.resume
        self._manager.truncate(lead, 0 if wants_logits else lead.num_prompt - 1)
        lead.num_cached = lead.num_computed
        lead.state = State.WAITING
        self._ledger.launch(entry, lead)
        self._ledger.note(entry, RecomputeStarted())

    def revoke(self, request_id: RequestId) -> None:
        entry = self._reserved(request_id)
        self._ledger.note(entry, TicketRevoked())
        self._ledger.retire(entry, entry.attempt)

    def revoke_newest(self) -> bool:
        """For the scheduler, when who runs lacks a block. False where no reservation is left."""
        open_ones = [entry for entry in self._ledger.entries.values() if entry.is_reservation]
        if open_ones:
            self.revoke(max(open_ones, key=lambda entry: entry.generation).request.request_id)
        return bool(open_ones)

    def _reserved(self, request_id: RequestId) -> Entry:
        entry = self._ledger.entries.get(request_id)
        if entry is None or not entry.is_reservation:
            raise StaleEpoch(f"{request_id} is no open reservation")
        return entry


def _reservation(entry: Entry) -> Reservation:
    lead = entry.lead
    return Reservation(
        entry.request.request_id,
        entry.attempt,
        entry.generation,
        lead.num_cached,
        lead.num_cached,
        lead.num_prompt,
        tuple(lead.blocks),
    )


def _same_prompt(a: EngineRequest, b: EngineRequest) -> bool:
    return a.prompt_token_ids == b.prompt_token_ids and a.cache_salt == b.cache_salt
