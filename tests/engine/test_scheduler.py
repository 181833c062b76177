"""Who gets a step's tokens, who is let in, who is preempted, and how the budget follows the clock."""

import random
from typing import Any

import pytest

from kvrelay.common.ids import RequestId
from kvrelay.engine.budget import StepBudget

pytestmark = pytest.mark.unit

Part = tuple[str, int, int, int]


def last(h: Any) -> list[Part]:
    batches: list[list[Part]] = h.runner.batches
    return batches[-1]


class TestBudget:
    def test_decode_goes_before_a_huge_prompt(self, harness: Any) -> None:
        h = harness(num_blocks=128, max_model_len=2000, max_num_batched_tokens=40)
        h.engine.add(h.request("short", 5, max_tokens=50))
        h.step()
        h.engine.add(h.request("huge", 1000))
        for _ in range(10):
            h.step()
            assert [(name, count) for name, _, _, count in last(h)] == [("short", 1), ("huge", 39)]
        assert len(h.output("short")) == 11

    def test_a_half_computed_prompt_goes_before_those_that_wait(self, harness: Any) -> None:
        h = harness(max_num_batched_tokens=40)
        for i, name in enumerate("ab"):
            h.engine.add(h.request(name, [i, *range(2, 61)]))
        h.step()
        assert last(h) == [("a", 0, 0, 40)]
        h.step()
        assert last(h) == [("a", 0, 40, 20), ("b", 0, 0, 20)]

    @pytest.mark.parametrize("budget", [1, 7, 16, 64])
    def test_the_limit_is_hard_and_all_still_end(self, harness: Any, budget: int) -> None:
        h = harness(max_num_batched_tokens=budget, max_num_seqs=8)
        requests = [h.request(f"r{i}", [i, *range(30)], n=2) for i in range(6)]
        for request in requests:
            h.engine.add(request)
        h.run()
        assert max(sum(part[3] for part in batch) for batch in h.runner.batches) <= budget
        for request in requests:
            h.check_output(request, 1)


class TestOrder:
    def test_priority_then_arrival(self, harness: Any) -> None:
        h = harness(max_num_seqs=1)
        for name, priority in (("late", 1), ("first", 0), ("second", 0), ("urgent", -1)):
            h.engine.add(h.request(name, [len(name), 2, 3], priority=priority, max_tokens=2))
        h.run()
        seen = list(dict.fromkeys(batch[0][0] for batch in h.runner.batches))
        assert seen == ["urgent", "first", "second", "late"]

    def test_no_more_run_than_may(self, harness: Any) -> None:
        h = harness(max_num_seqs=3)
        for i in range(5):
            h.engine.add(h.request(f"r{i}", [i, 2, 3], n=2))
        h.run()
        assert max(len(batch) for batch in h.runner.batches) == 3


class TestRoom:
    def test_the_newest_of_the_lowest_priority_is_preempted(self, harness: Any) -> None:
        h = harness(num_blocks=6, watermark=0.0)
        requests = [
            h.request(name, [i, *range(2, 17)], priority=p, max_tokens=40)
            for i, (name, p) in enumerate((("low", 1), ("high", 0), ("high2", 0)))
        ]
        for request in requests:
            h.engine.add(request)
        while not h.engine.stats().num_preemptions:
            h.step()
        assert {seq.request.request_id for seq in h.engine.scheduler.waiting} == {"low"}
        h.run()
        for request in requests:
            h.check_output(request)
        h.check_empty()

    def test_who_is_in_the_step_already_is_not_preempted(self, harness: Any) -> None:
        """Two decode sequences take the last blocks; the prompt, though of the best rank, comes after them and lets go."""
        h = harness(num_blocks=6, max_num_batched_tokens=20, watermark=0.0)
        decoding = [h.request(f"d{i}", [i, 4, 5], priority=1, max_tokens=40) for i in range(2)]
        for request in decoding:
            h.engine.add(request)
        for _ in range(13):
            h.step()
        prompt = h.request("p", 64)
        h.engine.add(prompt)
        h.step()
        h.step()
        assert [part[0] for part in last(h)] == ["d0", "d1"]
        assert h.engine.stats().num_preemptions == 1
        h.run()
        for request in (*decoding, prompt):
            h.check_output(request)

    def test_who_waits_with_blocks_gives_way_when_nothing_runs(self, harness: Any) -> None:
        h = harness(num_blocks=4, max_num_seqs=1, watermark=0.0)
        h.engine.add(h.request("r", 5))
        h.step()
        attached = [h.request(name, [i, *range(2, 17)]) for i, name in enumerate("ab")]
        for request in attached:
            h.deliver(h.engine.reserve(request, 0), request)
        urgent = h.request("urgent", [7] * 50, priority=-1)
        h.engine.add(urgent)
        h.engine.abort([RequestId("r")])
        h.step()
        assert last(h)[0][0] == "urgent"
        h.run()
        for request in (*attached, urgent):
            h.check_output(request)

    def test_a_preempted_sequence_finds_its_prefix_again(self, harness: Any) -> None:
        h = harness(num_blocks=7, watermark=0.0)
        a, b = (h.request(name, [i, *range(2, 41)], max_tokens=30) for i, name in enumerate("ab"))
        h.engine.add(a)
        h.engine.add(b)
        h.run()
        assert h.engine.stats().num_preemptions > 0
        again = [start for batch in h.runner.batches for name, _, start, count in batch if name == "b" and count > 1]
        assert 0 < again[-1] < 70
        h.check_output(a)
        h.check_output(b)

    def test_nobody_is_let_in_to_be_preempted_at_once(self, harness: Any) -> None:
        h = harness(num_blocks=10, max_num_batched_tokens=20, watermark=0.0)
        h.engine.add(h.request("a", [1, *range(2, 101)], max_tokens=2))
        h.engine.add(h.request("b", [2, *range(2, 101)], max_tokens=2))
        h.run()
        assert h.engine.stats().num_preemptions == 0

    def test_the_watermark_keeps_newcomers_out(self, harness: Any) -> None:
        h = harness(num_blocks=10, watermark=0.5)
        h.engine.add(h.request("a", [1, *range(2, 33)], max_tokens=30))
        h.step()
        h.engine.add(h.request("b", [2, *range(2, 65)], max_tokens=2))
        h.step()
        assert {part[0] for part in last(h)} == {"a"}
        h.run()
        assert h.output("b")

    def test_branches_that_wait_with_blocks_do_not_lock_the_pool(self, harness: Any) -> None:
        h = harness(num_blocks=4, max_num_seqs=1, watermark=0.0)
        request = h.request("a", 20, n=4, max_tokens=40)
        h.engine.add(request)
        other = h.request("b", [9] * 40, priority=-1, max_tokens=20)
        h.step()
        h.engine.add(other)
        h.run()
        for choice in range(4):
            h.check_output(request, choice)
        h.check_output(other)
        h.check_empty()


class Clock:
    """A machine whose steps take so long."""

    def __init__(self, fixed: float, each: float, quadratic: float = 0.0) -> None:
        self._fixed, self._each, self._quadratic = fixed, each, quadratic

    def seconds(self, tokens: int, context: int = 0) -> float:
        return self._fixed + self._each * tokens + self._quadratic * tokens * context


def budget(start: int = 256, max_tokens: int = 4096) -> StepBudget:
    return StepBudget(max_step_ms=300, max_tokens=max_tokens, floor=80, start=start)


class TestStepTime:
    @pytest.mark.parametrize("each_us", [50, 300, 1000])
    def test_finds_what_fits(self, each_us: int) -> None:
        machine, b = Clock(0.01, each_us / 1e6), budget()
        times = []
        for _ in range(60):
            tokens = b.num_tokens
            times.append(machine.seconds(tokens))
            b.observe(tokens, times[-1])
        fits = min(4096, max(80, int((0.24 - 0.01) / (each_us / 1e6))))
        assert 0.9 * fits <= b.num_tokens <= 1.1 * fits
        assert max(times) <= 0.3

    def test_decode_steps_do_not_unlearn_a_chunks_cost(self) -> None:
        machine, b = Clock(0.02, 0.0004), budget()
        for _ in range(40):
            b.observe(b.num_tokens, machine.seconds(b.num_tokens))
        before = b.num_tokens
        for _ in range(500):
            b.observe(8, machine.seconds(8))
        assert abs(b.num_tokens - before) <= 0.2 * before

    def test_follows_a_growing_context(self) -> None:
        machine, b = Clock(0.01, 0.0003, quadratic=1e-7), budget()
        context, over = 0, 0
        while context < 16_000:
            tokens = b.num_tokens
            seconds = machine.seconds(tokens, context)
            over += seconds > 0.3
            b.observe(tokens, seconds)
            context += tokens
        assert over == 0

    def test_noise_moves_it_little(self) -> None:
        rng, machine, b = random.Random(0), Clock(0.01, 0.0003), budget()
        for i in range(300):
            tokens = b.num_tokens
            seconds = machine.seconds(tokens) * rng.uniform(0.9, 1.1)
            b.observe(tokens, seconds + (0.2 if i % 50 == 49 else 0.0))
            if i > 50 and i % 50 > 10:
                assert 300 <= b.num_tokens <= 1000

    def test_an_over_long_step_halves_it_and_the_floor_holds(self) -> None:
        b = budget()
        for _ in range(20):
            b.observe(b.num_tokens, 10.0)
        assert b.num_tokens == 80
        for _ in range(40):
            b.observe(b.num_tokens, 0.01)
        assert b.num_tokens > 1000

    def test_never_over_the_configured_limit(self) -> None:
        b = budget(max_tokens=50)
        assert b.num_tokens == 50
        for _ in range(20):
            b.observe(50, 0.001)
        assert b.num_tokens == 50
