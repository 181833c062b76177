"""The engine against the plain loop: outputs, branches, the prefill side, ends in every state."""

from typing import Any

import pytest

from kvrelay.common.errors import InvalidRequest, NoCapacity
from kvrelay.common.ids import RequestId
from kvrelay.common.request import FinishReason, ResumedChoice
from kvrelay.engine.messages import PrefillStarted, PromptComputed, RequestFailed

pytestmark = pytest.mark.unit


def resumed(choice: int, *tokens: int, finished: bool = False) -> ResumedChoice:
    return ResumedChoice(choice=choice, token_ids=tokens, finished=finished)


class TestLocal:
    @pytest.mark.parametrize("n", [1, 3, 6])
    @pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40])
    def test_equals_the_plain_loop(self, harness: Any, prompt: int, n: int) -> None:
        h = harness()
        request = h.request("a", prompt, n=n, max_tokens=20)
        h.engine.add(request)
        h.run()
        for choice in range(n):
            h.check_output(request, choice)
        assert h.kinds("a") == ["PromptComputed"]
        h.check_empty()

    def test_branches_share_the_prompt(self, harness: Any) -> None:
        h = harness(num_blocks=16)
        h.engine.add(h.request("a", 40, n=4, max_tokens=2))
        while not h.deltas:
            h.step()
        # 2 full blocks shared by all, the half-filled third copied by all but its last holder in the next step
        assert h.engine.inspect().free_blocks == 16 - 3
        batch = h.engine.schedule()
        assert batch is not None
        assert len(batch.copies) == 3
        h.take(h.engine.update(batch, h.engine.launch(batch).result()))
        h.check_empty()

    def test_ends_by_eos_stop_token_and_length(self, harness: Any) -> None:
        h = harness()
        tokens, _ = h.expected(h.request("x", 5, max_tokens=300))
        stop = h.request("stop", 5, max_tokens=300, stop_token_ids=(tokens[3],))
        length = h.request("length", 5, max_tokens=None)
        h.engine.add(stop)
        h.engine.add(length)
        h.run()
        assert h.output("stop") == tokens[: tokens.index(tokens[3]) + 1]
        last = [delta for delta in h.deltas if delta.request_id == "stop"][-1]
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, tokens[3])
        assert len(h.output("length")) == 512 - 5
        h.check_output(length)

    def test_eos_ends_unless_ignored(self, harness: Any) -> None:
        h = harness()
        requests = [h.request(f"r{i}", [i, 2, 3], ignore_eos=False, max_tokens=400) for i in range(4)]
        for request in requests:
            h.engine.add(request)
        h.run()
        for request in requests:
            h.check_output(request)
        assert FinishReason.STOP in h.finished.values()

    def test_prompt_logprobs_are_whole_and_skip_the_cache(self, harness: Any) -> None:
        h = harness(max_num_batched_tokens=20)
        for name in ("a", "b"):
            h.engine.add(h.request(name, 90, prompt_logprobs=0, logprobs=0))
            h.run()
        computed = {key: kind for key, kind in h.notices if isinstance(kind, PromptComputed)}
        assert computed[RequestId("b")].num_cached_tokens == 0
        assert [p.chosen.token_id for p in computed[RequestId("b")].prompt_logprobs] == list(range(2, 91))
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in h.deltas)

    def test_the_second_request_finds_the_prefix(self, harness: Any) -> None:
        h = harness()
        h.engine.add(h.request("a", 64))
        h.run()
        h.engine.add(h.request("b", 64))
        h.engine.add(h.request("salted", 64, cache_salt="s"))
        h.run()
        cached = {key: kind.num_cached_tokens for key, kind in h.notices}
        assert cached == {"a": 0, "b": 48, "salted": 0}  # the last token is always computed
        assert h.engine.stats().cached_tokens == 48

    def test_resume_forces_and_does_not_repeat(self, harness: Any) -> None:
        h = harness()
        resume = (resumed(0, 7, 8, 9), resumed(1, 5, finished=True), resumed(3))
        request = h.request("a", 20, n=4, max_tokens=10, resume=resume)
        h.tokens[request.request_id, 0] = [7, 8, 9]
        h.engine.add(request)
        h.run()
        for choice in (0, 2, 3):
            h.check_output(request, choice)
        assert [d.index for d in h.deltas if d.choice == 0] == list(range(3, 10))
        assert not h.output("a", 1)

    def test_a_resumed_choice_with_nothing_left_ends(self, harness: Any) -> None:
        h = harness()
        request = h.request("a", 20, max_tokens=2, resume=(resumed(0, 7, 8),))
        h.tokens[request.request_id, 0] = [7, 8]
        h.engine.add(request)
        h.run()
        (delta,) = h.deltas
        assert (delta.index, delta.token_ids, delta.finish_reason) == (2, (), FinishReason.LENGTH)
        h.check_empty()

    def test_unusable_logits_fail_the_request_alone(self, harness: Any) -> None:
        h = harness()
        bad, good = h.request("bad", 5, n=2), h.request("good", 6)
        h.runner.spoilt.add(bad.request_id)
        h.engine.add(bad)
        h.engine.add(good)
        h.run()
        assert h.kinds("bad") == ["RequestFailed"]
        h.check_output(good)
        h.check_empty()


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "options", "param"),
        [
            (0, {}, "prompt"),
            (512, {}, "prompt"),
            (5, {"resume": (resumed(1, 4),)}, "resume"),
            (5, {"resume": (resumed(0, 4), resumed(0, 5))}, "resume"),
            (5, {"resume": (resumed(0, 4, finished=True),)}, "resume"),
            (500, {"resume": (resumed(0, *range(20)),)}, "resume"),
        ],
    )
    def test_what_can_never_be_served(self, harness: Any, prompt: int, options: dict[str, Any], param: str) -> None:
        h = harness()
        request = h.request("a", prompt, **options)
        for enter in (h.engine.add, h.engine.prefill, lambda r: h.engine.reserve(r, 0)):
            with pytest.raises(InvalidRequest) as caught:
                enter(request)
            assert caught.value.param == param
        h.check_empty()

    def test_a_prompt_beyond_the_pool(self, harness: Any) -> None:
        h = harness(num_blocks=4)
        with pytest.raises(InvalidRequest):
            h.engine.add(h.request("a", 64))
        longest = h.request("b", 63, max_tokens=None)
        h.engine.add(longest)
        h.run()
        h.check_output(longest)

    def test_one_id_twice(self, harness: Any) -> None:
        h = harness()
        h.engine.add(h.request("a", 5))
        with pytest.raises(InvalidRequest):
            h.engine.add(h.request("a", 5))
        with pytest.raises(InvalidRequest):
            h.engine.reserve(h.request("a", 5), 1)


class TestPrefillSide:
    def test_first_tokens_then_the_blocks_wait_for_the_push(self, harness: Any) -> None:
        h = harness(max_num_batched_tokens=20)
        request = h.request("a", 50, n=3, prompt_logprobs=0)
        seq = h.engine.prefill(request)
        blocks = seq.blocks
        h.run()
        assert [(d.choice, d.index, len(d.token_ids)) for d in h.deltas] == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
        assert [d.token_ids[0] for d in h.deltas] == [h.expected(request, c)[0][0] for c in range(3)]
        assert h.kinds("a") == ["PrefillStarted", "PromptComputed"]
        assert blocks is seq.blocks
        h.runner.verify(blocks, request.prompt_token_ids)
        assert h.engine.inspect().num_pushes == 1
        h.engine.push_done(request.request_id)
        h.check_empty()

    def test_started_is_said_at_schedule(self, harness: Any) -> None:
        h = harness()
        h.engine.prefill(h.request("a", 20))
        h.engine.schedule()
        (notice,) = h.engine.drain().notices
        assert notice.kind == PrefillStarted(num_cached_tokens=0)

    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_an_abort_frees_only_when_the_push_is_done(self, harness: Any, steps: int) -> None:
        h = harness(max_num_batched_tokens=20)
        request = h.request("a", 50)
        h.engine.prefill(request)
        for _ in range(steps):
            h.step()
        held = h.engine.manager.pool.num_blocks - h.engine.manager.num_free
        h.engine.abort([request.request_id])
        assert h.port.aborted == ["a"]
        assert h.engine.manager.pool.num_blocks - h.engine.manager.num_free == held
        with pytest.raises(NoCapacity):
            h.engine.prefill(request)
        h.engine.push_done(request.request_id)
        h.step()
        h.check_empty()
        h.engine.prefill(request)

    def test_a_push_that_fails_during_a_step(self, harness: Any) -> None:
        h = harness(max_num_batched_tokens=20)
        request = h.request("a", 50)
        h.engine.prefill(request)
        batch = h.engine.schedule()
        h.engine.push_done(request.request_id)
        h.check()
        h.engine.push_done(request.request_id)
        assert h.engine.manager.num_free < 64
        h.take(h.engine.update(batch, h.engine.launch(batch).result()))
        h.check_empty()
        assert not h.deltas

    def test_resumed_choices_repeat_their_first_token(self, harness: Any) -> None:
        h = harness()
        request = h.request("a", 20, n=3, resume=(resumed(0, 7, 8), resumed(1, finished=True)))
        h.engine.prefill(request)
        h.run()
        assert [(d.choice, d.index, d.token_ids) for d in h.deltas] == [
            (0, 0, (7,)),
            (2, 0, (h.expected(request, 2)[0][0],)),
        ]

    def test_is_never_preempted(self, harness: Any) -> None:
        """Though it has the worst rank of those that run, and they need blocks while it computes."""
        h = harness(num_blocks=8, max_num_batched_tokens=20, watermark=0.0)
        requests = [h.request(f"d{i}", [i, 4, 5], max_tokens=30) for i in range(3)]
        for request in requests:
            h.engine.add(request)
        for _ in range(12):
            h.step()
        prefill = h.request("p", 64, priority=5)
        seq = h.engine.prefill(prefill)
        while not h.output("p"):
            h.step()
            h.runner.verify(seq.blocks, seq.tokens[: seq.num_computed])
            assert len(seq.blocks) == 4
        assert h.engine.stats().num_preemptions > 0
        for _ in range(20):
            h.step()
            h.runner.verify(seq.blocks, prefill.prompt_token_ids)
        h.engine.push_done(prefill.request_id)
        h.run()
        for request in requests:
            h.check_output(request)


class TestEnds:
    @pytest.mark.parametrize("in_flight", [False, True])
    def test_abort_while_running(self, harness: Any, in_flight: bool) -> None:
        h = harness()
        h.engine.add(h.request("a", 20, n=2, max_tokens=100))
        h.engine.add(h.request("b", 20))
        h.step()
        h.step()
        batch = h.engine.schedule() if in_flight else None
        free = h.engine.manager.num_free
        h.engine.abort([RequestId("a"), RequestId("unknown")])
        assert (h.engine.manager.num_free == free) is in_flight, "a step in flight keeps its blocks"
        h.check()
        h.engine.add(h.request("a", 25))
        if batch is not None:
            h.engine.update(batch, h.engine.launch(batch).result())
            h.check()
            assert len(h.runner.free_rows) >= 2
        h.tokens.clear()
        h.engine.abort([RequestId("b")])
        h.run()
        h.check_output(h.request("a", 25))
        h.check_empty()

    def test_deadlines(self, harness: Any) -> None:
        h = harness(num_blocks=16, max_num_seqs=1)
        assert h.engine.next_deadline() is None
        h.engine.add(h.request("running", 20, max_tokens=100, timeout_ms=1000))
        h.engine.add(h.request("waiting", 20, timeout_ms=2000))
        h.engine.reserve(h.request("reserved", 20, timeout_ms=3000), 0)
        pushing = h.request("pushing", 20, timeout_ms=4000, priority=-1)
        h.engine.prefill(pushing)
        h.step()
        h.step()
        first = h.engine.next_deadline()
        assert first is not None
        h.engine.expire(first - 0.1)
        assert h.engine.inspect().num_requests == 4
        h.engine.expire(first + 3.5)
        h.take(h.engine.drain())
        failed = [key for key, kind in h.notices if isinstance(kind, RequestFailed)]
        assert sorted(failed) == ["pushing", "reserved", "running", "waiting"]
        assert h.port.over == ["reserved"]
        assert h.port.aborted == ["pushing"]
        h.engine.push_done(pushing.request_id)
        h.step()
        h.check_empty()

    def test_stats(self, harness: Any) -> None:
        h = harness(max_num_batched_tokens=20, num_blocks=32)
        assert h.engine.stats().credits == 4
        h.engine.add(h.request("a", 200))
        h.step()
        stats = h.engine.stats()
        assert (stats.num_running, stats.num_steps, stats.prompt_tokens, stats.computed_tokens) == (1, 1, 200, 20)
        assert stats.waiting_tokens == 180
        assert stats.credits == 0
