"""The engine: one step after another over all requests, whatever part they are for.

    step = schedule ──▶ launch ──▶ result ──▶ update      launch and result touch the runner only and may happen on another
                                                          thread; all else, and every other call, is for the one thread that
                                                          owns the engine

Between `schedule` and `update` any other call may come. What a step in flight works on keeps its blocks until `update`. Where
the runner allows for it, the next step is scheduled and launched before the result of the first is there: it continues those
sequences whose next token depends on nothing but the KV, and takes the tokens that it does not know yet from the device.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, KeysView
from typing import Protocol

from kvrelay.common.errors import DeadlineExceeded, Internal, KvrelayError, TransferFailed
from kvrelay.common.ids import Fingerprint, RequestId
from kvrelay.common.request import ChoiceDelta, EngineRequest, PositionLogprobs
from kvrelay.engine.batch import NO_TOKEN, Batch, LayerHook, Running, StepResult, no_hook
from kvrelay.engine.budget import StepBudget
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.entry import Entry, Limits, delivered
from kvrelay.engine.ledger import Ledger, NoTransfer, StepUpdate, TransferPort
from kvrelay.engine.manager import KvManager
from kvrelay.engine.messages import (
    EngineStats,
    Inspection,
    KvStoreCounters,
    PrefillStarted,
    PromptComputed,
    TransferCounters,
)
from kvrelay.engine.pool import CacheListener
from kvrelay.engine.reserve import Admission, Reservation
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.sequence import Sequence, State
from kvrelay.engine.views import Counts, Views, on_the_host

__all__ = ["Engine", "Reservation", "Runner", "StepUpdate", "TransferPort"]

log = logging.getLogger(__name__)

Drawn = tuple[int, PositionLogprobs | None]
"""A token, or NO_TOKEN."""

_CHUNK = 16
_CPU_START = 64
"""Tokens of the first steps on a CPU, before their cost is known."""


class Runner(Protocol):
    depth: int
    """Steps that may be in flight: with 2, one is launched while the one before it computes."""

    def launch(self, batch: Batch, on_layer: LayerHook) -> Running: ...

    def forget(self, seq: Sequence) -> None:
        """The sequence is in no step any more, or not before it is computed anew. Never called during `launch`."""
        ...


class Engine:
    """One rank's requests, blocks and steps. `num_blocks`, `max_model_len` (tokens) and the eos ids are the model's."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        fingerprint: Fingerprint,
        listener: CacheListener | None = None,
    ) -> None:
        self.config = config
        self.runner = runner
        # A sequence that could outgrow the pool would preempt itself for ever: the pool bounds the length as well.
        self.limits = Limits(min(max_model_len, num_blocks * config.block_size), frozenset(eos_token_ids))
        self.manager = KvManager(
            num_blocks, config.block_size, fingerprint, prefix_caching=config.prefix_caching, listener=listener
        )
        self.budget = StepBudget(
            max_step_ms=config.max_step_ms,
            max_tokens=config.max_num_batched_tokens,
            floor=config.max_num_seqs + _CHUNK,
            start=_CPU_START if config.device == "cpu" else config.max_num_batched_tokens,
        )
        self.scheduler = Scheduler(
            self.manager,
            self.budget,
            max_num_seqs=config.max_num_seqs,
            watermark=-int(-config.watermark * num_blocks // 1),
            reclaim=lambda: self._admission.revoke_newest(),
        )
        self._ledger = Ledger(self.manager, self.scheduler, self.limits, NoTransfer())
        self._admission = Admission(self._ledger, self.manager, self.scheduler)
        self._flights: deque[Batch] = deque()
        """Scheduled and not updated, in order."""
        self._running: deque[tuple[Batch, Running]] = deque()
        """What `step` has launched."""
        self.counts = Counts()
        self._views = Views(self.manager, self.scheduler, self._ledger, self.budget, self.counts)

    def connect(self, port: TransferPort) -> None:
        """Who is told at once when the transfer loses blocks. Before the first request."""
        self._ledger.port = port

    # Requests. Each raises InvalidRequest, naming the field, for what can never be served.

    def add(self, request: EngineRequest) -> None:
        """Computes prompt and tokens here."""
        entry = self._ledger.open(request)
        self._ledger.launch(entry, entry.sequence(0, ()))

    def prefill(self, request: EngineRequest, attempt: int = 0) -> Sequence:
        """Computes the prompt and one token a choice. The blocks are held, also after an abort, until `push_done`.

        A push may read `blocks` of the returned sequence (one list for its life) below the positions computed. Resumed
        choices repeat their first token. A higher attempt ends the former one. Raises NoCapacity while that one's push goes on.
        """
        self._ledger.end_former_push(request.request_id, attempt)
        entry = self._ledger.open(request, attempt)
        seq = entry.sequence(0, (), request.sampling.n)
        seq.whole = entry.pushing = True
        entry.sequences.append(seq)
        self._ledger.enter(entry)
        self.scheduler.add(seq)
        return seq

    def push_done(self, request_id: RequestId) -> None:
        """The push has packed all blocks, failed, or was aborted: the blocks are free. Ends the request if it computes yet."""
        self._ledger.push_done(request_id)

    def reserve(self, request: EngineRequest, attempt: int) -> Reservation:
        """Admits a request whose KV a transfer brings. The same attempt gets the same answer; a higher one voids the lower.

        Raises NoCapacity, and StaleEpoch for an attempt that is over or that runs already.
        """
        return self._admission.reserve(request, attempt)

    def reserve_local(self, request: EngineRequest, attempt: int) -> int:
        """Admits a request to be computed here, soon: the number of prompt tokens found. Raises as `reserve` does."""
        return self._admission.reserve_local(request, attempt)

    def attach(self, request_id: RequestId, generation: int, first: Iterable[ChoiceDelta]) -> None:
        """The transfer has filled the reservation: its choices run on from their first tokens, which are said again.

        Raises StaleEpoch for another generation, TransferFailed where a choice has no first token (nothing changes then).
        """
        self._admission.attach(request_id, generation, first)

    def recompute(self, request_id: RequestId) -> None:
        """Gives up on the transfer: the prompt is computed here, after the pinned prefix. Raises StaleEpoch if it is over."""
        self._admission.recompute(request_id)

    def expire_reservation(self, request_id: RequestId) -> None:
        """The ticket's deadline has passed: recomputes or fails, as configured."""
        if self.config.on_ticket_expiry == "recompute":
            self.recompute(request_id)
        else:
            self.fail(request_id, TransferFailed("the KV did not arrive before the ticket's deadline"))

    def revoke(self, request_id: RequestId) -> None:
        """Takes a reservation back. Raises StaleEpoch if it is over."""
        self._admission.revoke(request_id)

    def abort(self, request_ids: Iterable[RequestId]) -> None:
        """Ends requests in any state, without a word. Unknown ids are ignored."""
        for request_id in request_ids:
            if (entry := self._ledger.entries.get(request_id)) is not None:
                self._ledger.retire(entry)

    def abort_choice(self, request_id: RequestId, choice: int) -> None:
        """As `abort`, of one choice; with the last of them the request is over. Those of a push share all: ignored as well."""
        entry = self._ledger.entries.get(request_id)
        if entry is not None and not entry.pushing and choice < entry.request.sampling.n:
            self._ledger.abort_choice(entry, choice)

    def fail(self, request_id: RequestId, error: KvrelayError) -> None:
        """Ends a request in any state, with a RequestFailed. Unknown ids are ignored."""
        if (entry := self._ledger.entries.get(request_id)) is not None:
            self._ledger.fail(entry, error)

    def expire(self, now: float) -> bool:
        """Fails what is overdue at `now`, on the monotonic clock; whether anything was."""
        overdue = [entry for entry in self._ledger.entries.values() if entry.deadline <= now]
        for entry in overdue:
            self._ledger.fail(entry, DeadlineExceeded(f"the deadline of {entry.request.request_id} has passed"))
        return bool(overdue)

    def next_deadline(self) -> float | None:
        return min((entry.deadline for entry in self._ledger.entries.values()), default=None)

    # Loads.

    def load_begins(self, seq: Sequence, end_load: Callable[[], object]) -> None:
        """From here on, until `load_ends`, a load may write into blocks of the sequence, whatever becomes of it.

        `end_load` is called when the sequence is over: the load is to end soon.
        """
        self._ledger.loads[seq] = end_load

    def load_ends(self, seq: Sequence) -> None:
        self._ledger.load_done(seq)

    # The step.

    def step(self) -> StepUpdate:
        batch = self.schedule()
        try:
            if batch is not None:
                self._running.append((batch, self.launch(batch)))
            if not self._running or (batch is not None and len(self._running) < self.runner.depth):
                return self.drain()
            first, running = self._running.popleft()
            result = running.result()
        except BaseException:  # Ctrl-C as well: the steps in flight let go of their blocks
            self.abandon()
            raise
        return self.update(first, result)

    @property
    def has_work(self) -> bool:
        """Something runs or waits. `schedule` may still find that it has to wait for a push or a transfer."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._flights)

    @on_the_host
    def schedule(self) -> Batch | None:
        """The next step; None where nothing can run before another call frees or adds something, or before a step in flight
        ends. `drain` has the news."""
        if self._flights and (len(self._flights) >= self.runner.depth or self.scheduler.starved):
            return None
        batch = self.scheduler.schedule(self.counts.num_steps + len(self._flights), ahead=bool(self._flights))
        self._forget()
        if batch is None:
            return None
        self._flights.append(batch)
        batch.take_off()
        self._announce()
        return batch

    @on_the_host
    def launch(self, batch: Batch, on_layer: LayerHook = no_hook) -> Running:
        return self.runner.launch(batch, on_layer)

    @on_the_host
    def update(self, batch: Batch, result: StepResult) -> StepUpdate:
        """Takes in what the first of the steps in flight has computed. Choices end, branch, or go on; what was ended meanwhile
        is freed."""
        assert batch is self._flights[0], "steps end in order"
        self._flights.popleft()
        self.counts.add(batch, result)
        self.budget.observe(batch.num_tokens, result.seconds)
        batch.land()
        self.manager.commit_step(batch.parts)
        if result.prompt_logprobs:
            self._collect(batch, result.prompt_logprobs)
        self.manager.end_step()
        self._ledger.end_step()
        self._advance(batch, result)
        self._forget()
        return self.drain()

    def abandon(self) -> None:
        """A step in flight has failed, what it was to write is undefined: the requests in it and in those after it fail."""
        flights, self._flights = self._flights, deque()
        self._running.clear()
        for batch in flights:
            self.manager.end_step()
            batch.land()
        for request_id in {part.seq.request.request_id for batch in flights for part in batch.parts}:
            self.fail(request_id, Internal("the step failed"))
        self._ledger.end_step()
        self._forget()

    def drain(self) -> StepUpdate:
        """What was said since the last update, if anything."""
        return self._ledger.drain()

    def _announce(self) -> None:
        """The requests that are in a step for the first time."""
        started = [seq for seq in self.scheduler.started if seq.num_ahead]
        self.scheduler.started = [
            seq for seq in self.scheduler.started if seq.state is State.RUNNING and not seq.num_ahead
        ]
        for seq in started:
            entry = self._ledger.entries[seq.request.request_id]
            if not entry.announced:
                entry.announced = True
                self.counts.prompt_tokens += seq.num_prompt
                self.counts.cached_tokens += seq.num_cached
                if entry.pushing:
                    self._ledger.note(entry, PrefillStarted(num_cached_tokens=seq.num_cached))

    def _collect(self, batch: Batch, logprobs: dict[Sequence, list[PositionLogprobs]]) -> None:
        for part in batch.parts:
            seq, entry = part.seq, self._ledger.entries.get(part.seq.request.request_id)
            if seq in logprobs and entry is not None and seq in entry.sequences[:1] and not entry.prompt_computed:
                entry.collect(part.start, logprobs[seq])

    def _advance(self, batch: Batch, result: StepResult) -> None:
        """Gives each sequence the token that was drawn for it, or its choices theirs, where they part."""
        entries, tokens, logprobs, first = self._ledger.entries, result.tokens, result.logprobs, 0
        running = State.RUNNING  # slow to look up
        for part in batch.parts:
            seq = part.seq
            # One that does not run any more has ended meanwhile, or another choice of the request has failed it a moment ago.
            if part.samples and seq.state is running:
                entry = entries[seq.request.request_id]
                if part.samples == 1 and entry.prompt_computed and tokens[first] != NO_TOKEN:
                    self._append(entry, seq, tokens[first], logprobs.get(first))
                else:
                    drawn = range(first, first + part.samples)
                    self._advance_first(entry, seq, [(tokens[i], logprobs.get(i)) for i in drawn])
            first += part.samples

    def _advance_first(self, entry: Entry, seq: Sequence, drawn: list[Drawn]) -> None:
        """As `_advance`, where the prompt has just been computed, or no token was to be had."""
        if any(token == NO_TOKEN for token, _ in drawn):
            log.error("the model's logits are not finite: %s", entry.request.request_id)
            self._ledger.fail(entry, Internal("the model gave no usable logits"))
            return
        if seq is entry.lead and not entry.prompt_computed:
            entry.prompt_computed = True
            self._ledger.note(
                entry,
                PromptComputed(num_cached_tokens=seq.num_cached, prompt_logprobs=entry.whole_prompt_logprobs()),
            )
        if seq.whole:
            self._hold_for_push(entry, seq, drawn)
            return
        for chosen, (token, logprobs) in zip(self._branches(entry, seq, len(drawn)), drawn, strict=True):
            self._append(entry, chosen, token, logprobs)
        self._ledger.end_aborted(entry)

    def _branches(self, entry: Entry, seq: Sequence, count: int) -> list[Sequence]:
        branches = [seq]
        for choice in range(seq.choice + 1, seq.choice + count):
            branch = entry.sequence(choice, ())
            branch.num_cached, branch.started = seq.num_cached, True
            self.manager.fork(seq, branch)
            entry.sequences.append(branch)
            self.scheduler.start(branch)
            branches.append(branch)
        seq.num_branches = 1
        return branches

    def _append(self, entry: Entry, seq: Sequence, token: int, logprobs: PositionLogprobs | None) -> None:
        """The next token of a choice. With its last one it is over, unless a push has it."""
        tokens, reason, stop = seq.tokens, None, None
        tokens.append(token)
        if token in seq.stop_ids or len(tokens) >= seq.max_length:
            reason, stop = seq.ending
        self.counts.generated_tokens += 1
        self._ledger.deltas.append(
            ChoiceDelta(
                request_id=entry.request.request_id,
                choice=seq.choice,
                index=len(tokens) - seq.num_prompt - 1,
                token_ids=(token,),
                logprobs=() if logprobs is None else (logprobs,),
                finish_reason=reason,
                stop_token_id=stop,
                attempt=entry.attempt,
            )
        )
        if reason is not None and not entry.pushing:
            self._ledger.finish(entry, seq, reason)

    def _hold_for_push(self, entry: Entry, seq: Sequence, drawn: list[Drawn]) -> None:
        self.scheduler.remove(seq)
        seq.state = State.PUSHING
        rest = delivered(entry.request)
        for choice, (token, logprobs) in enumerate(drawn, seq.choice):
            if forced := rest.get(choice, ()):
                request_id, attempt = entry.request.request_id, entry.attempt
                self._ledger.deltas.append(
                    ChoiceDelta(request_id=request_id, choice=choice, index=0, token_ids=forced[:1], attempt=attempt)
                )
            elif choice in rest:
                self._append(entry, entry.sequence(choice, ()), token, logprobs)

    def _forget(self) -> None:
        """The runner's rows of who has left. Only between steps: the runner's thread works on its rows during one."""
        dropped, self.scheduler.dropped = self.scheduler.dropped, []
        for seq in dropped:
            if seq.row >= 0 and seq.state is not State.RUNNING:
                self.runner.forget(seq)

    # Views.

    @property
    def request_ids(self) -> KeysView[RequestId]:
        """Of all that is not over."""
        return self._ledger.entries.keys()

    def stats(self, transfer: TransferCounters | None = None, store: KvStoreCounters | None = None) -> EngineStats:
        return self._views.stats(transfer or TransferCounters(), store or KvStoreCounters())

    def inspect(self, transfer: TransferCounters | None = None, staging_bytes: int = 0) -> Inspection:
        """Checks the invariants and counts what is held."""
        return self._views.inspect(transfer or TransferCounters(), staging_bytes)
