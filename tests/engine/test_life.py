"""Random lives of requests in small pools: whatever comes between two halves of a step, the blocks stay whole, every output
equals the plain loop, and in the end all is free."""

import random
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.common.errors import NoCapacity
from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, ResumedChoice
from kvrelay.engine.batch import Batch, Running
from kvrelay.engine.core import Reservation
from kvrelay.engine.sequence import Sequence

pytestmark = pytest.mark.unit

LENGTHS = (1, 15, 16, 33, 48, 64, 90)
DEEDS = {
    "half_step": 12,
    "steps": 4,
    "add": 3,
    "prefill": 2,
    "reserve": 4,
    "reserve_again": 1,
    "receive": 2,
    "lose": 1,
    "abort": 1,
    "push_done": 1,
}


class Lives:
    """What a pod's front, its transfer and its step loop do to an engine, in random order, and what must come of it."""

    def __init__(self, harness: Any, rng: random.Random, depth: int) -> None:
        self.rng = rng
        block_size = rng.choice((16, 32))
        self.h = harness(
            num_blocks=rng.choice((160, 192, 320)) // block_size,
            max_model_len=150,
            block_size=block_size,
            max_num_seqs=rng.randint(1, 5),
            max_num_batched_tokens=rng.choice((1, 7, 40, 200)),
            watermark=rng.choice((0.0, 0.2)),
            prefix_caching=rng.random() < 0.7,
            depth=depth,
        )
        self.requests: dict[RequestId, EngineRequest] = {}
        self.open: dict[RequestId, Reservation] = {}
        self.pushes: dict[RequestId, Sequence] = {}
        self.readable: dict[RequestId, list[int]] = {}
        """What each push may have begun to read."""
        self.prefills: set[RequestId] = set()
        self.attempts: dict[RequestId, int] = {}
        self.ended: set[RequestId] = set()
        """Aborted, revoked or refused: nothing is expected of them."""
        self.flights: deque[Batch] = deque()
        self.launched: deque[Running] = deque()

    def live(self, num_deeds: int) -> None:
        for _ in range(num_deeds):
            getattr(self, self.rng.choices(list(DEEDS), DEEDS.values())[0])()
            self.check()
        self.end()

    def new(self) -> EngineRequest:
        rng, n = self.rng, self.rng.randint(1, 3)
        resume = ()
        if rng.random() < 0.3:
            resume = (ResumedChoice(choice=n - 1, token_ids=tuple(rng.choices(range(10), k=rng.randint(0, 5)))),)
        request = self.h.request(
            f"r{len(self.requests)}",
            [rng.randint(0, 1), *range(2, rng.choice(LENGTHS) + 1)],  # two families of prefixes of each other
            n=n,
            priority=rng.randint(0, 1),
            cache_salt=rng.choice(("", "", "s")),
            max_tokens=rng.choice((1, 3, 40, 80)),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=rng.choice(((), (), (7, 50))),
            presence_penalty=rng.choice((0.0, 0.0, 0.1)),
            prompt_logprobs=rng.choice((None, None, 0)),
            resume=resume,
        )
        for choice in resume:
            self.h.tokens[request.request_id, choice.choice] = list(choice.token_ids)
        self.requests[request.request_id] = request
        return request

    @property
    def busy(self) -> bool:
        return bool(self.h.engine.inspect().num_requests >= 6)

    def add(self) -> None:
        if not self.busy:
            self.h.engine.add(self.new())

    def prefill(self) -> None:
        if not self.busy:
            request = self.new()
            self.pushes[request.request_id] = self.h.engine.prefill(request)
            self.prefills.add(request.request_id)

    def reserve(self) -> None:
        self.enter(self.new(), 0)

    def reserve_again(self) -> None:
        """As a router does that has given up on an attempt: with what the client has by now."""
        if not self.attempts:
            return
        request_id = self.rng.choice(list(self.attempts))
        request = self.requests[request_id]
        resume = tuple(
            ResumedChoice(
                choice=choice,
                token_ids=tuple(self.h.output(request_id, choice)),
                finished=(request_id, choice) in self.h.finished,
            )
            for choice in range(request.sampling.n)
        )
        if not all(choice.finished for choice in resume):
            self.enter(msgspec.structs.replace(request, resume=resume), self.attempts[request_id] + 1)

    def enter(self, request: EngineRequest, attempt: int) -> None:
        request_id = request.request_id
        self.open.pop(request_id, None)
        self.requests[request_id], self.attempts[request_id] = request, attempt
        self.ended.discard(request_id)
        try:
            if self.rng.random() < 0.2:
                self.h.engine.reserve_local(request, attempt)
            else:
                self.open[request_id] = self.h.engine.reserve(request, attempt)
        except NoCapacity:
            self.ended.add(request_id)
        self.h.port.over.clear()  # the former attempt's

    def receive(self) -> None:
        """Part of a transfer, or the rest of it."""
        if not self.open:
            return
        request_id = self.rng.choice(list(self.open))
        reservation, request = self.open[request_id], self.requests[request_id]
        for position in range(reservation.first_token, reservation.end_token):
            block, _ = self.h.runner.slot(reservation.blocks, position)
            assert self.h.engine.manager.pool.refs[block] == 1
        self.h.runner.fill(reservation, request.prompt_token_ids)
        if self.rng.random() < 0.7:
            del self.open[request_id]
            self.h.deliver(reservation, request)

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
        if not self.requests:
            return
        request_id = self.rng.choice(list(self.requests)[-8:])
        self.h.engine.abort([request_id])
        self.open.pop(request_id, None)
        if request_id in self.attempts:
            self.attempts[request_id] += 1
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

    def half_step(self) -> None:
        """One of: schedule, launch what was scheduled, take in what the first step in flight has computed."""
        if len(self.launched) < len(self.flights):
            self.launched.append(self.h.engine.launch(self.flights[-1]))
        elif (batch := self.h.engine.schedule()) is not None:
            self.flights.append(batch)
        elif self.flights:
            self.h.take(self.h.engine.update(self.flights.popleft(), self.launched.popleft().result()))
        self.h.take(self.h.engine.drain())
        self.revoked()

    def steps(self) -> None:
        for _ in range(2 * self.rng.randint(1, 15)):
            self.half_step()
            self.h.check()

    def revoked(self) -> None:
        for request_id in self.h.port.over:
            if self.open.pop(request_id, None) is not None:
                self.ended.add(request_id)
        self.h.port.over.clear()

    def check(self) -> None:
        self.h.check()
        for request_id, seq in self.pushes.items():
            before = self.readable.get(request_id, [])
            assert seq.blocks[: len(before)] == before, "a push has lost blocks"
            self.readable[request_id] = list(seq.blocks)
            self.h.runner.verify(seq.blocks, seq.tokens[: seq.num_computed])

    def end(self) -> None:
        """All transfers and pushes come to their ends, all that can run runs: every request is done and nothing is held."""
        for request_id, reservation in self.open.items():
            self.h.deliver(reservation, self.requests[request_id])
        self.open.clear()
        for _ in range(8000):
            self.half_step()
            for request_id in [key for key in self.pushes if self.computed(key) or key in self.ended]:
                self.h.engine.push_done(request_id)
                del self.pushes[request_id]
            if not self.h.engine.has_work:
                break
        self.h.take(self.h.engine.drain())
        self.h.check_empty()
        for request_id in self.requests.keys() - self.ended:
            self.check_outputs(request_id, self.requests[request_id])

    def check_outputs(self, request_id: RequestId, request: EngineRequest) -> None:
        finished = {choice.choice for choice in request.resume if choice.finished}
        for choice in set(range(request.sampling.n)) - finished:
            if request_id in self.prefills:
                assert self.h.output(request_id, choice)[:1] == self.h.expected(request, choice)[0][:1]
            else:
                self.h.check_output(request, choice)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_lives(harness: Any, depth: int, seed: int) -> None:
    Lives(harness, random.Random(seed), depth).live(150)
