"""What an engine says of itself: what it has counted, and what it holds."""

import dataclasses
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvrelay.engine.batch import Batch, StepResult
from kvrelay.engine.budget import StepBudget
from kvrelay.engine.check import violations
from kvrelay.engine.ledger import Ledger
from kvrelay.engine.manager import KvManager
from kvrelay.engine.messages import EngineStats, Inspection, KvStoreCounters, TransferCounters
from kvrelay.engine.scheduler import Scheduler


@dataclasses.dataclass(slots=True)
class Counts:
    """From the start on."""

    num_steps: int = 0
    step_ms: float = 0.0
    """Of the last step."""
    host_seconds: float = 0.0
    """Spent to schedule, launch and update steps, without the waits for results."""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, batch: Batch, result: StepResult) -> None:
        """A step is over."""
        self.num_steps += 1
        self.step_ms = result.seconds * 1000.0
        self.computed_tokens += batch.num_tokens


class Counting(Protocol):
    counts: Counts


Owner = TypeVar("Owner", bound=Counting)
P = ParamSpec("P")
R = TypeVar("R")


def on_the_host(part: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """A method that is a part of the step; its time is counted."""

    def timed(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        started = time.perf_counter()
        try:
            return part(owner, *args, **kwargs)
        finally:
            owner.counts.host_seconds += time.perf_counter() - started

    timed.__doc__ = part.__doc__
    return timed


class Views:
    def __init__(
        self, manager: KvManager, scheduler: Scheduler, ledger: Ledger, budget: StepBudget, counts: Counts
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._ledger = ledger
        self._budget = budget
        self._counts = counts

    def stats(self, transfer: TransferCounters, store: KvStoreCounters) -> EngineStats:
        scheduler, pool = self._scheduler, self._manager.pool
        waiting_tokens = sum(seq.num_to_compute for seq in (*scheduler.waiting, *scheduler.loading))
        waiting_tokens += sum(count for seq in scheduler.running if (count := seq.num_to_compute) > 1)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(scheduler.loading),
            num_reservations=self._num_reservations,
            num_pushes=self._num_pushes,
            waiting_tokens=waiting_tokens,
            free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            credits=self._credits(waiting_tokens),
            num_preemptions=scheduler.num_preemptions,
            transfer=transfer,
            store=store,
            **dataclasses.asdict(self._counts),
        )

    def _credits(self, waiting_tokens: int) -> int:
        """Requests that would start within about two steps: none while as much is queued."""
        busy = waiting_tokens >= 2 * self._budget.num_tokens or self._scheduler.spare_blocks <= 0
        return 0 if busy else self._scheduler.seats

    @property
    def _num_reservations(self) -> int:
        return sum(entry.is_reservation for entry in self._ledger.entries.values())

    @property
    def _num_pushes(self) -> int:
        return sum(entry.pushing for entry in self._ledger.entries.values()) + len(self._ledger.ending)

    def inspect(self, transfer: TransferCounters, staging_bytes: int) -> Inspection:
        ledger, pool = self._ledger, self._manager.pool
        return Inspection(
            violations=tuple(violations(self._manager, self._scheduler, ledger)),
            num_blocks=pool.num_blocks,
            free_blocks=pool.num_free,
            cached_blocks=len(pool.cached),
            num_requests=len(ledger.entries) + len(ledger.ending) + len(ledger.unloading),
            num_reservations=self._num_reservations,
            num_pushes=self._num_pushes,
            staging_bytes=staging_bytes,
            num_preemptions=self._scheduler.num_preemptions,
            transfer=transfer,
        )
