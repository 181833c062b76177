"""Random lives of pods that share a store: whatever comes between two halves of a step, of a look-up and of a copy, every row of KV that
a step relies on is right, the blocks stay whole, every output is a cold engine's, and in the end all is free."""

import asyncio
import itertools
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.common.errors import NoCapacity
from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, ResumedChoice
from kvrelay.engine.batch import Batch
from kvrelay.engine.core import Reservation
from kvrelay.engine.messages import PromptComputed
from kvrelay.engine.sequence import Sequence
from tests.connector.memory import MemoryConnector, Shelf
from tests.connector.pods import Pod, identity, stock, turns

pytestmark = pytest.mark.unit

LENGTHS = (1, 17, 33, 48, 64, 90, 97, 130)
SHORT_MS, LONG_MS = 100_000, 10_000_000
DEEDS = {
    "half_step": 12,
    "steps": 4,
    "answer": 18,
    "copy": 12,
    "add": 6,
    "prefill": 2,
    "reserve": 2,
    "receive": 2,
    "lose": 1,
    "abort": 1,
    "abort_choice": 1,
    "expire": 1,
    "push_done": 1,
    "forget": 1,
    "restock": 3,
    "ready": 1,
}


class PodLife:
    """One pod: what its front, its transfer, its step loop and its store do to it, in random order."""

    def __init__(self, name: str, shelf: Shelf, rng: random.Random, faults: float) -> None:
        self.name = name
        self.rng = rng
        block_size = rng.choice((16, 32))
        self.connector = MemoryConnector(shelf, identity(block_size), rng)
        self.connector.faults = faults
        self.pod = Pod(
            self.connector,
            slow_copies=True,
            num_blocks=rng.choice((192, 256, 640)) // block_size,
            max_model_len=180,
            block_size=block_size,
            max_num_seqs=rng.randint(1, 5),
            max_num_batched_tokens=rng.choice((7, 40, 200)),
            watermark=rng.choice((0.0, 0.2)),
            prefix_caching=rng.random() < 0.9,
        )
        self.h = self.pod.h
        self.requests: dict[RequestId, EngineRequest] = {}
        self.open: dict[RequestId, Reservation] = {}
        self.pushes: dict[RequestId, Sequence] = {}
        self.prefills: set[RequestId] = set()
        self.attached: set[RequestId] = set()
        """Computed elsewhere."""
        self.ended: set[RequestId] = set()
        """Aborted, revoked or refused: nothing is expected of them."""
        self.ended_choices: set[tuple[RequestId, int]] = set()
        self.batch: Batch | None = None

    def deed(self) -> None:
        getattr(self, self.rng.choices(list(DEEDS), DEEDS.values())[0])()

    # Requests.

    def new(self) -> EngineRequest:
        rng, n = self.rng, self.rng.choice((1, 1, 2, 3))
        resume = ()
        if rng.random() < 0.2:
            resume = (ResumedChoice(choice=n - 1, token_ids=tuple(rng.choices(range(10), k=rng.randint(0, 5)))),)
        request = self.h.request(
            f"{self.name}{len(self.requests)}",
            self.prompt(),
            n=n,
            priority=rng.randint(0, 1),
            cache_salt=rng.choice(("", "", "", "s")),
            max_tokens=rng.choice((1, 3, 40)),
            ignore_eos=rng.random() < 0.7,
            prompt_logprobs=rng.choice((None, None, None, 0)),
            timeout_ms=rng.choice((SHORT_MS, LONG_MS, LONG_MS)),
            resume=resume,
        )
        for choice in resume:
            self.h.tokens[request.request_id, choice.choice] = list(choice.token_ids)
        self.requests[request.request_id] = request
        return request

    def prompt(self) -> list[int]:
        """Of few families of prefixes of each other, which part at few places."""
        rng, length, fork = self.rng, self.rng.choice(LENGTHS), self.rng.choice((40, 100, 1000))
        return [rng.randint(0, 1), *(p if p < fork else p + fork for p in range(2, length + 1))]

    @property
    def busy(self) -> bool:
        return bool(self.h.engine.inspect().num_requests >= 6)

    def any_request(self) -> RequestId | None:
        return self.rng.choice(list(self.requests)[-8:]) if self.requests else None

    def add(self) -> None:
        if not self.busy:
            self.h.engine.add(self.new())

    def prefill(self) -> None:
        if not self.busy:
            request = self.new()
            self.pushes[request.request_id] = self.h.engine.prefill(request)
            self.prefills.add(request.request_id)

    def reserve(self) -> None:
        request = self.new()
        try:
            if self.rng.random() < 0.4:
                self.h.engine.reserve_local(request, 0)
            else:
                self.open[request.request_id] = self.h.engine.reserve(request, 0)
                self.attached.add(request.request_id)
        except NoCapacity:
            self.ended.add(request.request_id)

    def receive(self) -> None:
        if self.open:
            request_id = self.rng.choice(list(self.open))
            self.h.deliver(self.open.pop(request_id), self.requests[request_id])

    def lose(self) -> None:
        if not self.open:
            return
        request_id = self.rng.choice(list(self.open))
        del self.open[request_id]
        if self.rng.random() < 0.7:
            self.h.engine.recompute(request_id)
        else:
            self.h.engine.revoke(request_id)
            self.ended.add(request_id)

    def abort(self) -> None:
        if (request_id := self.any_request()) is not None:
            self.h.engine.abort([request_id])
            self.open.pop(request_id, None)
            self.ended.add(request_id)

    def abort_choice(self) -> None:
        request_id = self.any_request()
        if request_id is None or request_id in self.prefills or request_id in self.open:
            return
        choice = self.rng.randrange(self.requests[request_id].sampling.n)
        self.h.engine.abort_choice(request_id, choice)
        self.ended_choices.add((request_id, choice))

    def expire(self) -> None:
        """The clock of the short ones has run out."""
        alive = list(self.h.engine.request_ids)
        if self.rng.random() < 0.3:
            self.h.engine.expire(time.monotonic() + SHORT_MS / 1000 + 1)
        for request_id in alive:
            if request_id not in self.h.engine.request_ids:
                self.open.pop(request_id, None)
                self.ended.add(request_id)

    def push_done(self) -> None:
        if self.pushes:
            request_id = self.rng.choice(list(self.pushes))
            del self.pushes[request_id]
            self.h.engine.push_done(request_id)
            if not self.computed(request_id):
                self.ended.add(request_id)

    def computed(self, request_id: RequestId) -> bool:
        return "PromptComputed" in self.h.kinds(request_id)

    # Steps.

    def half_step(self) -> None:
        if self.batch is None:
            self.batch = self.h.engine.schedule()
            self.h.take(self.h.engine.drain())
            for request_id in self.h.port.over:
                if self.open.pop(request_id, None) is not None:
                    self.ended.add(request_id)
            self.h.port.over.clear()
        else:
            self.h.take(self.h.engine.update(self.batch, self.h.engine.launch(self.batch).result()))
            self.batch = None

    def steps(self) -> None:
        for _ in range(2 * self.rng.randint(1, 8)):
            self.half_step()
            self.h.check()

    # The store.

    def answer(self) -> None:
        if self.connector.num_asked:
            self.connector.answer(self.rng.randrange(self.connector.num_asked))

    def copy(self) -> None:
        if busy := [thread for thread in self.pod.threads if thread.work]:
            self.rng.choice(busy).go_on()

    def forget(self) -> None:
        blocks = self.connector.shelf.blocks
        for block_id in self.rng.sample(list(blocks), min(len(blocks), self.rng.choice((1, 5, 50)))):
            del blocks[block_id]

    def restock(self) -> None:
        """What others have computed."""
        stock(self.connector.shelf, self.prompt())

    def ready(self) -> None:
        self.connector.ready = self.rng.random() < 0.8

    # What must hold.

    def check(self) -> None:
        self.h.check()
        for seq in self.pushes.values():
            self.h.runner.verify(seq.blocks, seq.tokens[: seq.num_computed])
        for block in self.h.engine.manager.lent:
            assert self.h.engine.manager.pool.refs[block] > 0

    async def end(self) -> None:
        """All transfers, pushes, answers and copies come to their ends, all that can run runs."""
        self.connector.at_once()
        self.connector.ready = True
        for request_id, reservation in self.open.items():
            self.h.deliver(reservation, self.requests[request_id])
        self.open.clear()
        engine = self.h.engine
        for _ in range(8000):
            self.half_step()
            while any(thread.work for thread in self.pod.threads):
                self.copy()
            await turns(3)
            for request_id in [key for key in self.pushes if self.computed(key) or key in self.ended]:
                engine.push_done(request_id)
                del self.pushes[request_id]
            storing = self.pod.store.counters().waiting_blocks or engine.manager.lent
            if self.batch is None and not engine.inspect().num_requests and not storing:
                break
        self.h.take(engine.drain())
        await turns()
        self.h.check_empty()
        assert engine.manager.lent == []
        assert (self.connector.num_given, self.connector.num_open) == (0, 0)
        assert self.connector.num_reported <= self.connector.num_corrupt
        for request_id in self.requests.keys() - self.ended:
            self.check_output(request_id, self.requests[request_id])
        await self.pod.close()
        assert self.connector.closed

    def check_output(self, request_id: RequestId, request: EngineRequest) -> None:
        for choice in range(request.sampling.n):
            if request_id in self.prefills:
                assert self.h.output(request_id, choice)[:1] == self.h.expected(request, choice)[0][:1]
            elif (request_id, choice) not in self.ended_choices:
                self.h.check_output(request, choice)
        if request_id not in self.attached and not request.resume:
            self.check_cached(request)
        if request_id not in self.attached and request.sampling.prompt_logprobs is not None and not request.resume:
            computed = [kind for key, kind in self.h.notices if key == request_id and isinstance(kind, PromptComputed)]
            lengths = {len(kind.prompt_logprobs) for kind in computed}
            assert lengths <= {len(request.prompt_token_ids) - 1}, "all of the prompt is computed"

    def check_cached(self, request: EngineRequest) -> None:
        """What is said to be cached is all that was not computed, where it was computed in one go."""
        said = [
            kind for key, kind in self.h.notices if key == request.request_id and hasattr(kind, "num_cached_tokens")
        ]
        parts = [
            (start, start + count)
            for batch in self.h.runner.batches
            for key, choice, start, count in batch
            if (key, choice) == (request.request_id, 0)
        ]
        at_once = all(before[1] == after[0] for before, after in itertools.pairwise(parts))
        if said and at_once:
            assert {kind.num_cached_tokens for kind in said} == {min(parts[0][0], len(request.prompt_token_ids))}


async def live(seed: int, num_deeds: int) -> None:
    rng = random.Random(seed)
    shelf, faults = Shelf(), rng.choice((0.0, 0.0, 0.05, 0.2))
    lives = [PodLife(name, shelf, rng, faults) for name in ("a", "b", "c")[: rng.randint(1, 3)]]
    try:
        for _ in range(num_deeds):
            life = rng.choice(lives)
            life.deed()
            life.check()
            if rng.random() < 0.7:
                await turns()
                life.check()
        for life in lives:
            await life.end()
    finally:  # of a failed life as well, no task waits for a copy for ever
        for thread in [thread for life in lives for thread in life.pod.threads]:
            thread.shutdown()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_lives(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """What fails in a task or on a thread is only logged."""
    caplog.clear()
    asyncio.run(live(seed, 150))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
