"""What a fake engine does in a step, and what its requests hold. No tasks and no sockets here."""

import secrets
import time
from collections import OrderedDict

import msgspec

from kvrelay.common.errors import NoCapacity, StaleEpoch
from kvrelay.common.ids import RequestId, RouterId
from kvrelay.common.request import ChoiceDelta, EngineRequest, Ticket, TicketTarget
from kvrelay.engine import messages as m
from kvrelay.engine.fake.cache import FakeCache
from kvrelay.engine.fake.config import FakeConfig
from kvrelay.engine.fake.link import Arrival
from kvrelay.engine.fake.tokens import Speaker, prompt_logprobs
from kvrelay.engine.fake.work import NO_ROUTER, Stage, Work, blocks_needed
from kvrelay.engine.timeline import Timelines

_MAX_ATTEMPTS = 4096
_ACTIVE = (Stage.WAITING, Stage.COMPUTING, Stage.RUNNING)


class FakeCore:
    """Admission, steps and ends of requests; blocks are counted, tokens come from `Speaker`."""

    def __init__(self, config: FakeConfig) -> None:
        self.works: dict[RequestId, Work] = {}
        self.hold = ""
        self.counters = m.TransferCounters()
        self.started_pushes: list[tuple[Work, tuple[ChoiceDelta, ...]]] = []
        """Prompts that the last step finished, with their first tokens; the owner of the link takes them."""
        self._config = config
        self._info: m.EngineInfo | None = None
        self._address = b""
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()
        self._cache = FakeCache(config)
        self._generation = 0
        self._held_blocks = 0
        self._deltas: list[ChoiceDelta] = []
        self._notices: list[m.Notice] = []
        self._timelines = Timelines()
        self._stats = m.EngineStats(transfer=self.counters)

    def open(self, info: m.EngineInfo, address: bytes) -> None:
        self._info = info
        self._address = address

    # Requests: from admission to their end.

    @property
    def free_blocks(self) -> int:
        return self._config.num_blocks - self._held_blocks

    def reserve(self, request: EngineRequest, attempt: int, router_id: RouterId, local_prefill: bool) -> Work:
        """Raises NoCapacity, StaleEpoch."""
        request_id = request.request_id
        self._timelines.begin(request, attempt, receives=not local_prefill)
        highest = self._attempts.get(request_id, -1)
        known = self.works.get(request_id)
        if attempt < highest:
            raise StaleEpoch(f"attempt {attempt} of {request_id}, after {highest}")
        if attempt == highest and known is not None:
            return known
        if known is not None:
            self.drop(known)
        stage = Stage.COMPUTING if local_prefill else Stage.RESERVED
        work = self._new(request, stage, attempt=attempt, router_id=router_id)
        if work.num_blocks > self.free_blocks or len(self.works) >= self._config.max_num_seqs:
            raise NoCapacity(f"{work.num_blocks} blocks are needed, {self.free_blocks} are free")
        self._attempts[request_id] = attempt
        self._attempts.move_to_end(request_id)
        if len(self._attempts) > _MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._admit(work)
        if not local_prefill:
            self._grant(work)
        return work

    def enqueue(self, request: EngineRequest, ticket: Ticket | None) -> None:
        """Waits for blocks; with a ticket, the KV is pushed. A request of the same id makes way."""
        if (known := self.works.get(request.request_id)) is not None:
            self.drop(known)
        attempt = 0 if ticket is None else ticket.attempt
        self._timelines.begin(request, attempt, pushes=ticket is not None)
        self.works[request.request_id] = self._new(request, Stage.WAITING, attempt=attempt, ticket=ticket)

    def drop(self, work: Work) -> None:
        """The request's end, whatever led to it: it holds nothing any more."""
        del self.works[work.request.request_id]
        if work.stage is not Stage.WAITING:
            self._held_blocks -= work.num_blocks
        if work.push is not None:
            work.push.cancel()

    def abort_choice(self, work: Work, choice: int) -> None:
        if choice < len(work.finished) and not work.pushes:
            work.finished[choice] = True
            if work.over:
                self.drop(work)

    def notify(self, request_id: RequestId, attempt: int, kind: m.NoticeKind) -> None:
        self._notices.append(m.Notice(request_id=request_id, attempt=attempt, kind=kind))  # type: ignore[arg-type]

    def _fail(self, work: Work, code: str, message: str) -> None:
        self.drop(work)
        self.notify(work.request.request_id, work.attempt, m.RequestFailed(code=code, message=message))

    def _new(
        self,
        request: EngineRequest,
        stage: Stage,
        *,
        attempt: int,
        router_id: RouterId = NO_ROUTER,
        ticket: Ticket | None = None,
    ) -> Work:
        speaker = Speaker(request, self._config)
        blocks = blocks_needed(request, speaker, self._config, pushes=ticket is not None)
        return Work(request, speaker, stage, blocks, attempt, router_id, pushes=ticket is not None, ticket=ticket)

    def _admit(self, work: Work) -> None:
        self.works[work.request.request_id] = work
        self._held_blocks += work.num_blocks
        work.num_cached = work.num_computed = self._cache.find(work.request)
        self._count(prompt_tokens=work.num_prompt, cached_tokens=work.num_cached)

    def _grant(self, work: Work) -> None:
        assert self._info is not None
        self._generation += 1
        timeout_ms = min(self._config.ticket_timeout_ms, work.request.timeout_ms)
        work.ticket_deadline = time.monotonic() + timeout_ms / 1000
        target = TicketTarget(
            rank=0,
            group=0,
            address=self._address,
            ticket_bits=secrets.randbits(40),
            first_token=work.num_cached,
            end_token=work.num_prompt,
        )
        work.ticket = Ticket(
            request_id=work.request.request_id,
            attempt=work.attempt,
            pod_id=self._info.pod_id,
            epoch=self._info.epoch,
            generation=self._generation,
            timeout_ms=timeout_ms,
            targets=(target,),
            layout=self._config.layout,
        )

    # Pushes.

    def arrive(self, arrival: Arrival) -> None:
        """The decode side takes a push in. Raises StaleEpoch where its ticket is not, or no longer, good."""
        work = self.works.get(arrival.request_id)
        ticket = None if work is None or work.stage is not Stage.RESERVED else work.ticket
        if work is None or ticket is None:
            raise StaleEpoch(f"{arrival.request_id} has no reservation here")
        named = (arrival.epoch, arrival.generation, arrival.ticket_bits)
        if named != (ticket.epoch, ticket.generation, ticket.targets[0].ticket_bits):
            raise StaleEpoch(f"the ticket of {arrival.request_id} is no longer good")
        work.stage = Stage.RUNNING
        self._timelines.received(arrival.request_id)
        work.adopt(arrival.deltas)
        self._deltas += arrival.deltas
        self._cache.insert(work.request)
        received = self.counters.payload_bytes_received + arrival.payload_bytes
        self.counters = msgspec.structs.replace(self.counters, payload_bytes_received=received, bytes_received=received)
        if work.over:
            self.drop(work)

    def push_ended(self, work: Work, end: m.PushCompleted | m.PushFailed) -> None:
        work.push = None
        if isinstance(end, m.PushCompleted):
            self._timelines.pushed(work.request.request_id, end.seconds)
        self.drop(work)
        self.notify(work.request.request_id, work.attempt, end)
        counters = self.counters
        if isinstance(end, m.PushFailed):
            self.counters = msgspec.structs.replace(counters, transfers_failed=counters.transfers_failed + 1)
            return
        sent = counters.payload_bytes_sent + end.payload_bytes
        self.counters = msgspec.structs.replace(
            counters,
            payload_bytes_sent=sent,
            bytes_sent=sent,
            transfers_completed=counters.transfers_completed + 1,
            seconds=counters.seconds + end.seconds,
        )

    # Steps.

    @property
    def busy(self) -> bool:
        return bool(self._notices or self._deltas) or any(work.stage in _ACTIVE for work in self.works.values())

    def seconds_to_expiry(self) -> float | None:
        times = [work.deadline for work in self.works.values()]
        times += [work.ticket_deadline for work in self.works.values() if work.stage is Stage.RESERVED]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def step(self) -> m.StepOutput:
        """Expire, admit, compute prompts, advance choices."""
        self._expire()
        budget = self._config.max_num_batched_tokens
        for work in sorted(self.works.values(), key=lambda work: work.request.priority):
            if work.stage is Stage.WAITING and work.num_blocks <= self.free_blocks:
                work.stage = Stage.COMPUTING
                self._admit(work)
            if work.stage is Stage.COMPUTING and self.hold != "prefill" and budget:
                budget -= self._compute(work, budget)
            elif work.stage is Stage.RUNNING and self.hold != "decode":
                self._advance(work)
        self._count(num_steps=1)
        self._notices += self._timelines.over(self.works)
        output = m.StepOutput(
            deltas=tuple(self._deltas),
            notices=tuple(self._notices),
            cache=self._cache.take_changes(),
            stats=self.stats(),
        )
        self._deltas, self._notices = [], []
        return output

    def _expire(self) -> None:
        now = time.monotonic()
        for work in list(self.works.values()):
            if work.deadline <= now:
                self._fail(work, "deadline_exceeded", "the request's deadline passed")
            elif work.stage is Stage.RESERVED and work.ticket_deadline <= now:
                if self._config.on_ticket_expiry == "fail":
                    self._fail(work, "transfer_failed", "no push came before the ticket's deadline")
                    continue
                work.ticket, work.stage = None, Stage.COMPUTING
                self.notify(work.request.request_id, work.attempt, m.RecomputeStarted())

    def _compute(self, work: Work, budget: int) -> int:
        """A chunk of the prompt and, with its last one, the first tokens. Returns the tokens computed."""
        request = work.request
        if work.pushes and not work.started:
            self.notify(request.request_id, work.attempt, m.PrefillStarted(num_cached_tokens=work.num_cached))
        work.started = True
        self._timelines.computing(request.request_id)
        count = min(budget, work.num_prompt - work.num_computed)
        work.num_computed += count
        self._count(computed_tokens=count)
        self._timelines.computed(request.request_id, count, last=work.num_computed == work.num_prompt)
        if work.num_computed < work.num_prompt:
            return count
        self._cache.insert(work.request)
        told = prompt_logprobs(request.prompt_token_ids, request.sampling, self._config.vocab_size)
        computed = m.PromptComputed(num_cached_tokens=work.num_cached, prompt_logprobs=told)
        self.notify(request.request_id, work.attempt, computed)
        work.stage = Stage.PUSHING if work.pushes else Stage.RUNNING
        first = self._advance(work)
        if work.pushes:
            self.started_pushes.append((work, first))
        return count

    def _advance(self, work: Work) -> tuple[ChoiceDelta, ...]:
        deltas = tuple(work.advance())
        self._deltas += deltas
        self._count(generated_tokens=len(deltas))
        if work.over and not work.pushes:
            self.drop(work)
        return deltas

    # What is told of the state.

    def _count(self, **more: int) -> None:
        self._stats = msgspec.structs.replace(
            self._stats, **{name: getattr(self._stats, name) + value for name, value in more.items()}
        )

    def _in(self, *stages: Stage) -> list[Work]:
        return [work for work in self.works.values() if work.stage in stages]

    def stats(self) -> m.EngineStats:
        waiting = self._in(Stage.WAITING, Stage.COMPUTING)
        return msgspec.structs.replace(
            self._stats,
            num_running=len(self._in(Stage.RUNNING, Stage.COMPUTING)),
            num_waiting=len(self._in(Stage.WAITING)),
            num_reservations=len(self._in(Stage.RESERVED)),
            num_pushes=len(self._in(Stage.PUSHING)),
            waiting_tokens=sum(work.num_prompt - work.num_computed for work in waiting),
            free_blocks=self.free_blocks,
            num_blocks=self._config.num_blocks,
            credits=max(0, self._config.max_num_seqs - len(self.works)),
            step_ms=self._config.step_ms,
            transfer=self.counters,
        )

    def inspect(self) -> m.Inspection:
        held = sum(work.num_blocks for work in self.works.values() if work.stage is not Stage.WAITING)
        wrong = () if held == self._held_blocks else (f"{self._held_blocks} blocks are held, requests hold {held}",)
        stats = self.stats()
        return m.Inspection(
            violations=wrong,
            num_blocks=stats.num_blocks,
            free_blocks=stats.free_blocks,
            cached_blocks=len(self._cache),
            num_requests=len(self.works),
            num_reservations=stats.num_reservations,
            num_pushes=stats.num_pushes,
            staging_bytes=0,
            num_preemptions=0,
            transfer=self.counters,
        )
