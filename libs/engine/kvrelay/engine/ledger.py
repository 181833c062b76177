"""All requests of an engine, and the end of each: what it held is free at once, after the step in flight, or after its push."""

import dataclasses
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvrelay.common.errors import InvalidRequest, KvrelayError, NoCapacity, StaleEpoch
from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta, EngineRequest, FinishReason
from kvrelay.engine.entry import Entry, Limits, delivered, ended
from kvrelay.engine.manager import KvManager
from kvrelay.engine.messages import (
    Notice,
    PrefillStarted,
    PromptComputed,
    RecomputeStarted,
    RequestFailed,
    TicketRevoked,
)
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.sequence import Sequence, State

News = PrefillStarted | PromptComputed | TicketRevoked | RecomputeStarted | RequestFailed

_MAX_REMEMBERED = 8192


class TransferPort(Protocol):
    """What the transfer is told at once, on the engine's own thread, when it loses a request."""

    def push_aborted(self, request_id: RequestId) -> None:
        """The request is over. The push still owns its blocks, ends soon, and then calls `push_done`."""
        ...

    def reservation_over(self, request_id: RequestId) -> None:
        """The reservation's blocks are no longer the transfer's: after this call nothing may be written into them."""
        ...


class NoTransfer:
    def push_aborted(self, request_id: RequestId) -> None:
        pass

    def reservation_over(self, request_id: RequestId) -> None:
        pass


@dataclasses.dataclass(frozen=True, slots=True)
class StepUpdate:
    """Tokens and news since the last one, in order."""

    deltas: list[ChoiceDelta]
    notices: list[Notice]


class Ledger:
    """A sequence is in exactly one place: `entries` (alive), `ending` (over, a push owns the blocks), `doomed` (over, in
    a step in flight) or `unloading` (over, a load still writes). Its blocks go back to the pool when it leaves the last of them."""

    def __init__(self, manager: KvManager, scheduler: Scheduler, limits: Limits, port: TransferPort) -> None:
        self.entries: dict[RequestId, Entry] = {}
        self.ending: dict[RequestId, Entry] = {}
        self.doomed: list[Sequence] = []
        self.loads: dict[Sequence, Callable[[], object]] = {}
        """Those whose blocks a load may write, until `load_done`, and what makes it end soon."""
        self.unloading: list[Sequence] = []
        self.port = port
        self._manager = manager
        self._scheduler = scheduler
        self._limits = limits
        self._orders = itertools.count()
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()
        """Of reservations that are over: the lowest attempt that may still come."""
        self.deltas: list[ChoiceDelta] = []
        """Said since the last `drain`."""
        self._notices: list[Notice] = []

    # Begin.

    def open(self, request: EngineRequest, attempt: int = 0) -> Entry:
        """A new request, without sequences, not yet entered. Raises InvalidRequest where it can never be served."""
        if request.request_id in self.entries:
            raise InvalidRequest(f"request {request.request_id} is being served already", "request_id")
        self._limits.check(request)
        return Entry(request, attempt, time.monotonic() + request.timeout_ms / 1000.0, next(self._orders), self._limits)

    def enter(self, entry: Entry) -> None:
        self.entries[entry.request.request_id] = entry

    def launch(self, entry: Entry, lead: Sequence) -> None:
        """Queues what computes the request from its prompt on; `lead` has the prompt's tokens, and maybe blocks.

        Without resumed choices that is the lead for all of them, until they branch; else each has its own sequence.
        """
        n, rest = entry.request.sampling.n, delivered(entry.request)
        lead.num_branches = 1 if entry.request.resume else n
        lead.choice, output = next(iter(rest.items()))
        lead.tokens.extend(output)
        entry.sequences = [lead]
        if entry.request.resume:
            entry.sequences += [entry.sequence(c, tokens) for c, tokens in rest.items() if c != lead.choice]
        self.enter(entry)
        for seq in list(entry.sequences):
            self._scheduler.add(seq)
            self.end_if_complete(entry, seq)
        self.end_aborted(entry)

    def end_if_complete(self, entry: Entry, seq: Sequence) -> None:
        """A resumed choice may have nothing left to compute: it ends with a delta of no tokens."""
        reason, stop = seq.ending
        if reason is not None:
            self.deltas.append(ended(entry, seq, reason, stop))
            self.finish(entry, seq, reason)

    # Say.

    def note(self, entry: Entry, kind: News) -> None:
        self._notices.append(Notice(request_id=entry.request.request_id, attempt=entry.attempt, kind=kind))

    def drain(self) -> StepUpdate:
        update = StepUpdate(self.deltas, self._notices)
        self.deltas, self._notices = [], []
        return update

    # End.

    def finish(self, entry: Entry, seq: Sequence, reason: FinishReason) -> None:
        """One choice is over; with the last of them the request."""
        entry.sequences.remove(seq)
        seq.finish_reason = reason
        self._discard(seq)
        if not entry.sequences:
            self.remove(entry, entry.attempt + 1)

    def abort_choice(self, entry: Entry, choice: int) -> None:
        """Silently; at once where the choice has a sequence of its own, else as soon as it would get one."""
        entry.aborted.add(choice)
        if entry.aborted >= delivered(entry.request).keys():
            self.retire(entry)
        else:
            self.end_aborted(entry)

    def end_aborted(self, entry: Entry) -> None:
        """A sequence that stands for several choices goes on until they part."""
        for seq in list(entry.sequences):
            alone = seq.num_branches == 1 and seq.state in (State.WAITING, State.LOADING, State.RUNNING)
            if alone and seq.choice in entry.aborted:
                self.finish(entry, seq, FinishReason.ABORT)

    def remove(self, entry: Entry, next_attempt: int) -> None:
        """The request is no longer known; attempts of its reservation below `next_attempt` are stale from now on."""
        request_id = entry.request.request_id
        del self.entries[request_id]
        if entry.reserved:
            self._attempts[request_id] = next_attempt
            self._attempts.move_to_end(request_id)
            if len(self._attempts) > _MAX_REMEMBERED:
                self._attempts.popitem(last=False)

    def retire(self, entry: Entry, next_attempt: int | None = None) -> None:
        """Ends a request in any state, silently."""
        request_id, was_reservation = entry.request.request_id, entry.is_reservation
        self.remove(entry, entry.attempt + 1 if next_attempt is None else next_attempt)
        if was_reservation:
            self.port.reservation_over(request_id)
        if entry.pushing:
            self._hand_to_push(entry)
            self.port.push_aborted(request_id)
        else:
            self._discard_all(entry)

    def fail(self, entry: Entry, error: KvrelayError) -> None:
        self.note(entry, RequestFailed(code=error.code, message=error.message))
        self.retire(entry)

    def push_done(self, request_id: RequestId) -> None:
        """The push reads the request's blocks no more. Unknown ids are ignored."""
        entry = self.ending.pop(request_id, None)
        if entry is None:
            entry = self.entries.get(request_id)
            if entry is None or not entry.pushing:
                return
            self.remove(entry, 0)
        self._discard_all(entry)

    def end_step(self) -> None:
        """Who is over and in no step any more holds nothing."""
        landed = [seq for seq in self.doomed if not seq.num_ahead]
        self.doomed = [seq for seq in self.doomed if seq.num_ahead]
        for seq in landed:
            self._manager.free(seq)

    def load_done(self, seq: Sequence) -> None:
        """Nothing is written into the sequence's blocks any more. If it is alive, it waits for its turn."""
        self.loads.pop(seq, None)
        if seq in self.unloading:
            self.unloading.remove(seq)
            self._manager.free(seq)
        elif seq.state is State.LOADING:
            self._scheduler.loaded(seq)

    def _hand_to_push(self, entry: Entry) -> None:
        for seq in entry.sequences:
            self._scheduler.remove(seq)
            seq.state = State.PUSHING
        self.ending[entry.request.request_id] = entry

    def _discard_all(self, entry: Entry) -> None:
        for seq in entry.sequences:
            self._discard(seq)
        entry.sequences = []

    def _discard(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        seq.state = State.FINISHED
        if seq.num_ahead:
            self.doomed.append(seq)
        elif (end_load := self.loads.get(seq)) is not None:
            self.unloading.append(seq)
            end_load()
        else:
            self._manager.free(seq)

    # Attempts.

    def end_former_push(self, request_id: RequestId, attempt: int) -> None:
        """Of a lower attempt than `attempt`. Raises NoCapacity until it has ended."""
        known = self.entries.get(request_id)
        if known is not None and known.pushing and known.attempt < attempt:
            self.retire(known)
        if request_id in self.ending:
            raise NoCapacity(f"the push of a former attempt of {request_id} has not ended")

    def supersede(self, request: EngineRequest, attempt: int) -> Entry | None:
        """The request's live entry if `attempt` is not lower than its own. Raises StaleEpoch for a lower one, and
        InvalidRequest where the request can never be served."""
        self._limits.check(request)
        entry = self.entries.get(request.request_id)
        if entry is not None and not entry.reserved:
            raise InvalidRequest(f"request {request.request_id} is being served already", "request_id")
        lowest = self._attempts.get(request.request_id, 0) if entry is None else entry.attempt
        if attempt < lowest:
            raise StaleEpoch(f"attempt {attempt} of {request.request_id} is over")
        return entry
