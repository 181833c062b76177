"""Prefixes out of the KV store, before a sequence computes the rest.

    a waiting sequence could start ── divert ──▶ LOADING: find ── worth it? ── load, a piece at a time ──▶ WAITING, with what it holds
                                                   └────────── nothing, too slow, no room ──────────────────▲

Steps of other sequences go on meanwhile. The sequence holds its own hits and the blocks that are written; each piece is found by others
as soon as it is here and checked. Where a store ends early, what it did not bring is computed.
"""

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Executor

from kvrelay.common.blocks import SPAN
from kvrelay.common.errors import NoCapacity
from kvrelay.common.ids import BlockId, RequestId
from kvrelay.common.tasks import end_task, outlast
from kvrelay.engine.connector.base import Connector, Load, Run, Stored
from kvrelay.engine.connector.copies import Copier
from kvrelay.engine.core import Engine
from kvrelay.engine.sequence import Sequence, State

log = logging.getLogger(__name__)

_BELIEF = 0.2
"""How much the newest measurement of a look-up's time is believed."""


OnLoaded = Callable[[RequestId, float, int], None]
"""Is told of a load that has ended: whose it was, since when it ran, and the tokens that it brought."""


def not_told(request_id: RequestId, since: float, num_tokens: int) -> None:
    """Nobody wants to know."""


@dataclasses.dataclass(slots=True)
class LoadCounters:
    lookups: int = 0
    hits: int = 0
    """Look-ups of which something was loaded."""
    declined: int = 0
    """Look-ups that found something, which would have taken longer than to compute it, or for which there was no room."""
    tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """From the look-up on."""
    corrupt: int = 0
    """Spans whose checksums were wrong."""


class Loads:
    """Diverts an engine's sequences. Everything runs on the event loop but for the copies."""

    def __init__(
        self,
        engine: Engine,
        connector: Connector,
        copier: Copier,
        thread: Executor,
        on_change: Callable[[], None],
        on_loaded: OnLoaded,
        *,
        always: bool,
    ) -> None:
        """`always`: also what it would take less time to compute."""
        self.counters = LoadCounters()
        self._engine = engine
        self._manager = engine.manager
        self._connector = connector
        self._copier = copier
        self._thread = thread
        self._on_change = on_change
        self._on_loaded = on_loaded
        self._always = always
        self._look_up_seconds = 0.001
        """A guess until the first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._coming: dict[BlockId, asyncio.Event] = {}
        """By the key of the first block that a load brings: set when that load is over."""
        engine.scheduler.divert = self._divert

    async def close(self) -> None:
        """No copy runs any more."""
        for task in list(self._tasks):
            await end_task(task)

    def _divert(self, seq: Sequence, hits: list[int]) -> bool:
        if seq.looked_up or seq.blocks or not self._connector.ready:
            return False
        limit = self._limit(seq)
        missing = limit - len(hits) * self._manager.block_size
        if missing <= 0:
            return False
        if not self._always and self._engine.budget.prompt_seconds(missing) < self._look_up_seconds:
            return False
        seq.looked_up = True
        if hits:
            self._manager.pin(seq, hits)
        task = asyncio.create_task(self._bring(seq, limit), name="load")
        self._engine.load_begins(seq, task.cancel)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._ended, seq))
        return True

    def _limit(self, seq: Sequence) -> int:
        """Tokens that can be taken over: whole blocks, and never the last token, whose logits are needed."""
        if seq.request.sampling.prompt_logprobs is not None and not seq.num_output:
            return 0
        return (len(seq.tokens) - 1) // self._manager.block_size * self._manager.block_size

    def _ended(self, seq: Sequence, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a load failed", exc_info=error)  # a fault of ours: the rest is computed
        self._engine.load_ends(seq)
        self._on_change()

    async def _bring(self, seq: Sequence, limit: int) -> None:
        manager = self._manager
        keys = manager.keys(seq, 0, limit // manager.block_size)
        while (other := self._coming.get(keys[self._num_here(seq)])) is not None:
            await other.wait()
            if not self._wanted(seq):
                return
            self._take_hits(seq, keys)
            if self._num_here(seq) == len(keys):
                return
        done = self._coming[keys[self._num_here(seq)]] = asyncio.Event()
        first_key = keys[self._num_here(seq)]
        try:
            await self._look_up(seq, limit)
        finally:
            del self._coming[first_key]
            done.set()

    def _num_here(self, seq: Sequence) -> int:
        return seq.num_computed // self._manager.block_size

    def _take_hits(self, seq: Sequence, keys: Seq[BlockId]) -> None:
        """What others have brought or computed meanwhile."""
        more = self._manager.pool.find(keys[self._num_here(seq) :])
        self._manager.extend(seq, more)

    async def _look_up(self, seq: Sequence, limit: int) -> None:
        started = time.monotonic()
        ids, first = self._manager.chain(seq, limit), seq.num_computed // SPAN
        self.counters.lookups += 1
        runs = await self._connector.find(ids, first)
        self._look_up_seconds += _BELIEF * (time.monotonic() - started - self._look_up_seconds)
        if not runs or not self._wanted(seq):
            return
        num_spans = self._worth(runs, len(ids) - first)
        num_blocks = num_spans // self._manager.spans
        if not num_blocks or not self._make_room(seq, num_blocks):
            self.counters.declined += 1
            return
        load = self._connector.load(ids[: first + num_blocks * self._manager.spans], first, runs)
        try:
            await self._take_in(seq, load)
        finally:
            load.close()
        self.counters.hits += seq.num_computed > first * SPAN
        self.counters.tokens += seq.num_computed - first * SPAN
        self.counters.seconds += time.monotonic() - started
        self._on_loaded(seq.request.request_id, started, seq.num_computed - first * SPAN)

    def _wanted(self, seq: Sequence) -> bool:
        return seq.state is State.LOADING

    def _worth(self, runs: Seq[Run], most: int) -> int:
        """Spans, from the first on, whose loading saves the most time against computing them."""
        if self._always:
            return min(sum(run.num_spans for run in runs), most)
        best, saved, spans, seconds = 0, 0.0, 0, 0.0
        for run in runs:
            spans += run.num_spans
            seconds += run.seconds + run.num_bytes / self._copier.bytes_per_second
            gain = self._engine.budget.prompt_seconds(spans * SPAN) - seconds
            if gain > saved:
                best, saved = spans, gain
        return min(best, most)

    def _make_room(self, seq: Sequence, num_blocks: int) -> bool:
        """Blocks for the sequence, if it could start with them as well."""
        if not self._engine.scheduler.can_load:
            return False
        try:
            seq.blocks.extend(self._manager.pool.allocate(num_blocks))
        except NoCapacity:
            return False
        return True

    async def _take_in(self, seq: Sequence, load: Load) -> None:
        loop = asyncio.get_running_loop()
        spans_here = seq.num_computed // SPAN
        while spans := await load.next():
            try:
                if not self._wanted(seq):
                    return
                slots = [self._slot(seq, spans_here + i) for i in range(len(spans))]
                whole, damaged = await outlast(loop.run_in_executor(self._thread, self._copier.load, spans, slots))
                if damaged:
                    self._report(load, damaged)
            finally:
                load.release(spans)
            spans_here += whole
            self.counters.num_bytes += sum(span.info.size for span in spans[:whole])
            if self._wanted(seq):
                self._manager.adopt(seq, spans_here // self._manager.spans * self._manager.block_size)
            if damaged:
                return

    def _slot(self, seq: Sequence, span: int) -> int:
        block, within = divmod(span, self._manager.spans)
        return seq.blocks[block] * self._manager.block_size + within * SPAN

    def _report(self, load: Load, damaged: Seq[Stored]) -> None:
        """All of them: one that the store still takes to be whole would not be stored anew."""
        self.counters.corrupt += len(damaged)
        log.warning("%d blocks of the KV store are corrupt, the first is %s", len(damaged), damaged[0].info.id.hex())
        load.corrupt(damaged)
