"""Random lives of requests in small pools: whatever comes between two halves of a step, the blocks stay whole, every output
equals the plain loop, and in the end all is free."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrelay.common.errors import NoCapacity
from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, ResumedChoice
from kvrelay.engine.batch import Batch
from kvrelay.engine.core import Reservation
from kvrelay.engine.sequence import Sequence

pytestmark = pytest.mark.unit

PROMPTS = st.builds(
    lambda family, length: [family, *range(2, length + 1)],
    st.integers(0, 1),
    st.sampled_from([1, 15, 16, 33, 48, 64, 90]),
)
"""Prompts of one family are prefixes of each other."""


class Lives(RuleBasedStateMachine):
    harness: Any

    @initialize(
        block_size=st.sampled_from([16, 32]),
        num_tokens=st.sampled_from([160, 160, 192, 320]),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 40, 200]),
        watermark=st.sampled_from([0.0, 0.2]),
        caching=st.booleans(),
    )
    def start(
        self, block_size: int, num_tokens: int, max_num_seqs: int, budget: int, watermark: float, caching: bool
    ) -> None:
        self.h = self.harness(
            num_blocks=num_tokens // block_size,
            max_model_len=150,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            watermark=watermark,
            prefix_caching=caching,
        )
        self.requests: dict[RequestId, EngineRequest] = {}
        self.open: dict[RequestId, Reservation] = {}
        self.pushes: dict[RequestId, Sequence] = {}
        self.readable: dict[RequestId, list[int]] = {}
        """What each push may have begun to read."""
        self.prefills: set[RequestId] = set()
        self.attempts: dict[RequestId, int] = {}
        self.ended: set[RequestId] = set()
        """Aborted, revoked or failed: nothing is expected of them."""
        self.batch: Batch | None = None
        self.count = 0

    def new(self, data: Any, resume: tuple[ResumedChoice, ...] = ()) -> EngineRequest:
        self.count += 1
        n = data.draw(st.integers(1, 3))
        if data.draw(st.booleans()):
            tokens = tuple(data.draw(st.lists(st.integers(1, 9), max_size=5)))
            resume = (ResumedChoice(choice=n - 1, token_ids=tokens),)
        request = self.h.request(
            f"r{self.count}",
            data.draw(PROMPTS),
            n=n,
            priority=data.draw(st.integers(0, 1)),
            cache_salt=data.draw(st.sampled_from(["", "", "s"])),
            max_tokens=data.draw(st.sampled_from([1, 3, 40, 80])),
            ignore_eos=data.draw(st.booleans()),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0])),
            resume=resume,
        )
        for choice in resume:
            self.h.tokens[request.request_id, choice.choice] = list(choice.token_ids)
        return request

    def pick(self, data: Any, among: Any) -> RequestId:
        return data.draw(st.sampled_from(sorted(among)))

    @precondition(lambda self: self.h.engine.inspect().num_requests < 5)
    @rule(data=st.data())
    def add(self, data: Any) -> None:
        request = self.new(data)
        self.h.engine.add(request)
        self.requests[request.request_id] = request

    @precondition(lambda self: self.h.engine.inspect().num_requests < 5)
    @rule(data=st.data())
    def prefill(self, data: Any) -> None:
        request = self.new(data)
        self.pushes[request.request_id] = self.h.engine.prefill(request)
        self.requests[request.request_id] = request
        self.prefills.add(request.request_id)

    @precondition(lambda self: self.h.engine.inspect().num_requests < 7)
    @rule(data=st.data(), local=st.sampled_from([False, False, True]))
    def reserve(self, data: Any, local: bool) -> None:
        self._reserve(self.new(data), 0, local)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), local=st.booleans())
    def reserve_again(self, data: Any, local: bool) -> None:
        """As a router does that has given up on an attempt: with what the client has by now."""
        request_id = self.pick(data, self.attempts)
        old = self.requests[request_id]
        resume = tuple(
            ResumedChoice(
                choice=choice,
                token_ids=tuple(self.h.tokens[request_id, choice]),
                finished=(request_id, choice) in self.h.finished,
            )
            for choice in range(old.sampling.n)
        )
        if not all(choice.finished for choice in resume):
            old = msgspec.structs.replace(old, resume=resume)
            self._reserve(old, self.attempts[request_id] + 1, local)

    def _reserve(self, request: EngineRequest, attempt: int, local: bool) -> None:
        request_id = request.request_id
        self.open.pop(request_id, None)
        self.requests[request_id], self.attempts[request_id] = request, attempt
        self.ended.discard(request_id)
        try:
            if local:
                self.h.engine.reserve_local(request, attempt)
            else:
                reservation = self.h.engine.reserve(request, attempt)
                self.h.port.over.clear()  # the former attempt's
                self.open[request_id] = reservation
        except NoCapacity:
            self.ended.add(request_id)

    def _revoked(self) -> None:
        for request_id in self.h.port.over:
            self.open.pop(request_id, None)
            if "TicketRevoked" in self.h.kinds(request_id):
                self.h.notices = [notice for notice in self.h.notices if notice[0] != request_id]
                self.ended.add(request_id)
        self.h.port.over.clear()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), whole=st.booleans())
    def receive(self, data: Any, whole: bool) -> None:
        request_id = self.pick(data, self.open)
        reservation, request = self.open[request_id], self.requests[request_id]
        for position in range(reservation.first_token, reservation.end_token):
            assert self.h.engine.manager.pool.refs[self.h.runner.slot(reservation.blocks, position)[0]] == 1
        self.h.runner.fill(reservation, request.prompt_token_ids)
        if whole:
            del self.open[request_id]
            self.h.deliver(reservation, request)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), again=st.booleans())
    def lose(self, data: Any, again: bool) -> None:
        request_id = self.pick(data, self.open)
        del self.open[request_id]
        if again:
            self.h.engine.recompute(request_id)
        else:
            self.h.engine.revoke(request_id)
            self.ended.add(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        request_id = self.pick(data, self.requests)
        self.h.engine.abort([request_id])
        self.open.pop(request_id, None)
        if request_id in self.attempts:
            self.attempts[request_id] += 1
        self.ended.add(request_id)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def push_done(self, data: Any) -> None:
        request_id = self.pick(data, self.pushes)
        del self.pushes[request_id]
        self.h.engine.push_done(request_id)
        if not self.h.output(request_id):
            self.ended.add(request_id)

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        self.batch = self.h.engine.schedule()
        self.h.take(self.h.engine.drain())
        self._revoked()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def finish_step(self) -> None:
        assert self.batch is not None
        self.h.take(self.h.engine.update(self.batch, self.h.engine.run(self.batch)))
        self.batch = None

    @precondition(lambda self: self.batch is None)
    @rule(steps=st.integers(2, 20))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.h.step()
            self._revoked()

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "h"):
            self.h.check()
            for request_id, seq in self.pushes.items():
                before = self.readable.get(request_id, [])
                assert seq.blocks[: len(before)] == before, "a push has lost blocks"
                self.readable[request_id] = list(seq.blocks)
                self.h.runner.verify(seq.blocks, seq.tokens[: seq.num_computed])

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        if self.batch is not None:
            self.finish_step()
        for request_id, reservation in list(self.open.items()):
            self.h.deliver(reservation, self.requests[request_id])
        for _ in range(3000):
            self.h.step()
            self._revoked()
            for request_id in [key for key in self.pushes if self.h.output(key) or key in self.ended]:
                self.h.engine.push_done(request_id)
                del self.pushes[request_id]
            if not self.h.engine.has_work:
                break
        self.h.take(self.h.engine.drain())
        self._revoked()
        self.h.check_empty()
        for request_id, request in self.requests.items():
            if request_id not in self.ended:
                self._check_outputs(request_id, request)

    def _check_outputs(self, request_id: RequestId, request: EngineRequest) -> None:
        finished = {choice.choice for choice in request.resume if choice.finished}
        for choice in set(range(request.sampling.n)) - finished:
            if request_id in self.prefills:
                assert self.h.output(request_id, choice)[:1] == self.h.expected(request, choice)[0][:1]
            else:
                self.h.check_output(request, choice)


def test_lives(harness: Any) -> None:
    machine = type("Machine", (Lives,), {"harness": harness})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
