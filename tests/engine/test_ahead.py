"""Steps that are scheduled and launched while the one before them computes yet."""

from typing import Any

import pytest

from kvrelay.common.request import FinishReason

pytestmark = pytest.mark.unit


def starts(h: Any, request_id: str) -> list[int]:
    """Where the parts of a request's steps begin."""
    return [start for batch in h.runner.batches for key, _, start, _ in batch if key == request_id]


def test_a_stream_is_continued_before_its_token_is_known(harness: Any) -> None:
    h = harness(depth=2)
    request = h.request("a", 20, max_tokens=5)
    h.engine.add(request)
    updates = [h.step() for _ in range(3)]
    assert [len(update.deltas) for update in updates] == [0, 1, 1]
    assert starts(h, "a") == [0, 20, 21]
    h.run()
    h.check_output(request)
    assert starts(h, "a") == [0, 20, 21, 22, 23], "nothing is computed after the last token"
    h.check_empty()


def test_chunks_of_a_prompt_follow_each_other(harness: Any) -> None:
    h = harness(depth=2, max_num_batched_tokens=16)
    request = h.request("a", 40, max_tokens=2)
    h.engine.add(request)
    h.run()
    h.check_output(request)
    assert starts(h, "a") == [0, 16, 32, 40]


def test_what_a_stop_token_ends_has_computed_one_token_too_many(harness: Any) -> None:
    h = harness(depth=2)
    tokens, _ = h.expected(h.request("a", 20, max_tokens=10))
    request = h.request("a", 20, max_tokens=10, stop_token_ids=(tokens[2],))
    h.engine.add(request)
    while not h.finished:
        h.step()
    assert starts(h, "a") == [0, 20, 21, 22]
    assert h.engine.has_work
    assert h.engine.inspect().free_blocks < 64, "the step in flight writes into its blocks yet"
    h.run()
    h.check_output(request)
    assert h.finished["a", 0] is FinishReason.STOP
    h.check_empty()


def test_penalties_wait_for_the_token(harness: Any) -> None:
    h = harness(depth=2)
    penalized, plain = h.request("a", 20, max_tokens=4, presence_penalty=0.5), h.request("b", 20, max_tokens=9)
    h.engine.add(penalized)
    h.engine.add(plain)
    h.run()
    h.check_output(penalized)
    h.check_output(plain)
    batches = [{key for key, *_ in batch} for batch in h.runner.batches]
    assert batches[:5] == [{"a", "b"}, {"b"}, {"a", "b"}, {"b"}, {"a", "b"}]


def test_choices_part_when_their_first_tokens_are_known(harness: Any) -> None:
    h = harness(depth=2)
    request = h.request("a", 20, n=3, max_tokens=3)
    h.engine.add(request)
    h.run()
    for choice in range(3):
        h.check_output(request, choice)
    h.check_empty()


def test_nothing_is_preempted_while_a_step_is_in_flight(harness: Any) -> None:
    h = harness(depth=2, num_blocks=4, prefix_caching=False, watermark=0.0)
    first, second = h.request("a", 30, max_tokens=20), h.request("b", 30, max_tokens=20)
    h.engine.add(first)
    h.engine.add(second)
    while not h.engine.scheduler.starved:
        h.step()
        assert h.engine.has_work
        assert h.engine.scheduler.num_preemptions == 0
    h.run()
    assert h.engine.scheduler.num_preemptions == 1
    h.check_output(first)
    h.check_output(second)
    h.check_empty()


def test_a_failed_launch_fails_what_is_in_flight(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    h = harness(depth=2)
    h.engine.add(h.request("a", 20))
    h.step()

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(h.runner, "launch", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            h.engine.step()
    h.take(h.engine.drain())
    assert h.kinds("a")[-1] == "RequestFailed"
    h.check_empty()
