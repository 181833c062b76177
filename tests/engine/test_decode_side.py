"""The engine's decode side against the plain loop: reservations, attaching what a transfer brought, recomputation."""

from typing import Any

import pytest

from kvrelay.common.errors import NoCapacity, StaleEpoch, TransferFailed
from kvrelay.common.ids import RequestId
from kvrelay.common.request import ResumedChoice

pytestmark = pytest.mark.unit


def resumed(choice: int, *tokens: int, finished: bool = False) -> ResumedChoice:
    return ResumedChoice(choice=choice, token_ids=tokens, finished=finished)


class TestDecodeSide:
    @pytest.mark.parametrize("block_size", [16, 32])
    @pytest.mark.parametrize("n", [1, 4])
    @pytest.mark.parametrize("prompt", [5, 32, 50])
    def test_reserve_and_attach(self, harness: Any, block_size: int, n: int, prompt: int) -> None:
        h = harness(block_size=block_size)
        request = h.request("a", prompt, n=n)
        reservation = h.engine.reserve(request, 0)
        assert (reservation.first_token, reservation.end_token, reservation.num_cached) == (0, prompt, 0)
        assert h.engine.reserve(request, 0) == reservation
        assert not h.engine.has_work
        h.deliver(reservation, request)
        h.run()
        for choice in range(n):
            h.check_output(request, choice)
        assert h.engine.stats().computed_tokens == n * 7
        h.check_empty()

    def test_a_whole_prompt_is_found(self, harness: Any) -> None:
        h = harness()
        h.engine.add(h.request("before", 48))
        h.run()
        request = h.request("a", 48)
        reservation = h.engine.reserve(request, 0)
        assert (reservation.num_cached, reservation.first_token, reservation.end_token) == (48, 48, 48)
        other = h.request("b", 48)
        h.engine.reserve(other, 0)
        h.engine.attach(reservation.request_id, reservation.generation, h.first_tokens(request))
        h.engine.recompute(other.request_id)
        h.run()
        h.check_output(request)
        h.check_output(other)

    def test_finished_first_tokens_start_nothing(self, harness: Any) -> None:
        h = harness()
        request = h.request("a", 20, n=2, max_tokens=1)
        h.deliver(h.engine.reserve(request, 0), request)
        h.take(h.engine.drain())
        h.check_output(request, 0)
        h.check_output(request, 1)
        h.check_empty()

    def test_attach_refuses_what_is_stale_or_incomplete(self, harness: Any) -> None:
        h = harness()
        request = h.request("a", 20, n=2)
        reservation = h.engine.reserve(request, 0)
        with pytest.raises(StaleEpoch):
            h.engine.attach(request.request_id, reservation.generation + 1, h.first_tokens(request))
        with pytest.raises(TransferFailed):
            h.engine.attach(request.request_id, reservation.generation, h.first_tokens(request)[:1])
        with pytest.raises(StaleEpoch):
            h.engine.attach(RequestId("b"), reservation.generation, [])
        h.deliver(reservation, request)
        with pytest.raises(StaleEpoch):
            h.deliver(reservation, request)

    def test_a_higher_attempt_takes_over(self, harness: Any) -> None:
        h = harness()
        first = h.engine.reserve(h.request("a", 40, n=2), 1)
        again = h.request("a", 40, n=2, resume=(resumed(1, 3, 4),))
        h.tokens[again.request_id, 1] = [3, 4]
        second = h.engine.reserve(again, 2)
        assert second.blocks == first.blocks
        assert second.generation != first.generation
        assert h.port.over == ["a"]
        with pytest.raises(StaleEpoch):
            h.deliver(first, again)
        with pytest.raises(StaleEpoch):
            h.engine.reserve(again, 1)
        h.deliver(second, again)
        h.run()
        h.check_output(again, 0)
        h.check_output(again, 1)
        with pytest.raises(StaleEpoch):
            h.engine.reserve(again, 2)

    def test_a_higher_attempt_ends_what_runs(self, harness: Any) -> None:
        h = harness()
        request = h.request("a", 40, max_tokens=20)
        h.deliver(h.engine.reserve(request, 1), request)
        h.step()
        batch = h.engine.schedule()
        again = h.request("a", 40, max_tokens=20, resume=(resumed(0, *h.output("a")),))
        second = h.engine.reserve(again, 2)
        assert second.num_cached == 32
        h.take(h.engine.update(batch, h.engine.launch(batch).result()))
        h.deliver(second, again)
        h.run()
        h.check_output(again)
        h.check_empty()

    def test_recompute_keeps_the_prefix(self, harness: Any) -> None:
        h = harness()
        h.engine.add(h.request("before", 32))
        h.run()
        request = h.request("a", 50, n=2)
        reservation = h.engine.reserve(request, 0)
        assert reservation.num_cached == 32
        h.engine.recompute(request.request_id)
        with pytest.raises(StaleEpoch):
            h.deliver(reservation, request)
        h.run()
        h.check_output(request, 0)
        h.check_output(request, 1)
        assert h.kinds("a") == ["RecomputeStarted", "PromptComputed"]
        assert h.notices[-1][1].num_cached_tokens == 32

    def test_recompute_with_prompt_logprobs_computes_all(self, harness: Any) -> None:
        h = harness()
        h.engine.add(h.request("before", 32))
        h.run()
        request = h.request("a", 50, prompt_logprobs=0)
        h.engine.reserve(request, 0)
        h.engine.recompute(request.request_id)
        h.run()
        h.check_output(request)
        assert len(h.notices[-1][1].prompt_logprobs) == 49
        assert h.notices[-1][1].num_cached_tokens == 0

    def test_expiry_may_fail_instead(self, harness: Any) -> None:
        h = harness(on_ticket_expiry="fail")
        request = h.request("a", 50)
        h.engine.reserve(request, 0)
        h.engine.expire_reservation(request.request_id)
        h.take(h.engine.drain())
        assert h.notices[0][1].code == TransferFailed.code
        h.check_empty()

    def test_no_capacity_and_revocation(self, harness: Any) -> None:
        h = harness(num_blocks=8, watermark=0.0)
        running = h.request("r", 30, max_tokens=60)
        h.engine.add(running)
        h.step()
        h.engine.reserve(h.request("a", 30, cache_salt="a"), 0)
        h.engine.reserve(h.request("b", 30, cache_salt="b"), 3)
        with pytest.raises(NoCapacity):
            h.engine.reserve(h.request("c", 60, cache_salt="c"), 0)
        for _ in range(36):
            h.step()
        assert h.kinds("b") == ["TicketRevoked"]
        assert h.port.over == ["b"]
        h.engine.revoke(RequestId("a"))
        h.engine.reserve(h.request("a", 16, cache_salt="a"), 0)  # the same attempt may come again after a revocation
        h.engine.abort([RequestId("a")])
        h.run()
        h.check_output(running)
        h.check_empty()

    def test_local_prefill_is_refused_when_it_would_wait(self, harness: Any) -> None:
        h = harness(num_blocks=8, max_num_seqs=3, watermark=0.0)
        request = h.request("a", 60, max_tokens=4)
        assert h.engine.reserve_local(request, 0) == 0
        assert h.engine.reserve_local(request, 0) == 0
        with pytest.raises(NoCapacity):
            h.engine.reserve_local(h.request("b", 80), 0)
        h.engine.reserve_local(h.request("c", 16, cache_salt="c"), 0)
        h.engine.reserve_local(h.request("d", 16, cache_salt="d"), 0)
        with pytest.raises(NoCapacity):
            h.engine.reserve_local(h.request("e", 1), 0)
        h.run()
        h.check_output(request)
        assert h.engine.reserve_local(h.request("f", 60), 0) == 48
