"""A request's way through two pods, by gRPC, as a router drives it."""

import asyncio

import grpc.aio
import pytest

from kvrelay.common.errors import (
    Cancelled,
    IncompatibleLayout,
    InvalidRequest,
    KvrelayError,
    NoCapacity,
    StaleEpoch,
    Unavailable,
    Unsupported,
)
from kvrelay.common.ids import Fingerprint
from kvrelay.common.request import EngineRequest, FinishReason, ResumedChoice
from kvrelay.common.rpc import called, from_rpc_error
from kvrelay.common.wire import request_to_proto
from kvrelay.engine.pod import routes
from kvrelay.v1 import decode_pb2, pod_pb2, prefill_pb2
from tests.pods.harness import ROUTER, expected, request, running

pytestmark = pytest.mark.integration


def _kinds(events: list[prefill_pb2.PrefillEvent]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


async def test_reserve_prefill_stream() -> None:
    wanted = request("a", length=100, n=2, temperature=1.0, logprobs=2, prompt_logprobs=1, seed=7)
    async with running("prefill") as p, running("decode") as d, d.caller.stream() as reader:
        ticket = await d.caller.reserve(wanted)
        assert ticket is not None
        assert (ticket.pod_id, ticket.epoch) == (d.engine.info.pod_id, d.engine.info.epoch)
        events = await p.caller.prefill_all(wanted, ticket)
        assert _kinds(events) == ["started", "first_tokens", "push_completed"]
        first = events[1].first_tokens
        assert len(first.prompt_logprobs) == 99
        await reader.until_finished("a", choices=2)
        for choice in (0, 1):
            assert reader.tokens("a", choice) == expected(wanted, choice)
            assert first.deltas[choice].token_ids == [expected(wanted, choice)[0]]
        assert expected(wanted, 0) != expected(wanted, 1)
        assert all(len(delta.logprobs) == 1 and len(delta.logprobs[0].top) == 2 for delta in reader.deltas)
        await p.caller.until_free()
        await d.caller.until_free()
        sent, received = (await p.caller.inspect()).transfer, (await d.caller.inspect()).transfer
        assert sent.payload_bytes_sent == received.payload_bytes_received == 100 * ticket.layout.token_bytes
        assert events[2].push_completed.payload_bytes == sent.payload_bytes_sent


async def test_what_decode_has_is_not_pushed_again() -> None:
    async with running("prefill") as p, running("decode") as d, d.caller.stream() as reader:
        for number in (0, 1):
            wanted = request(f"r{number}", length=100)
            ticket = await d.caller.reserve(wanted)
            assert ticket is not None
            events = await p.caller.prefill_all(wanted, ticket)
            await reader.until_finished(f"r{number}")
        assert (ticket.targets[0].first_token, ticket.targets[0].end_token) == (96, 100)
        assert events[0].started.num_cached_tokens == 96
        assert events[2].push_completed.payload_bytes == 4 * ticket.layout.token_bytes


async def test_a_step_is_one_message_for_all_requests() -> None:
    async with running("both", {"step_ms": 20.0}) as pod, pod.caller.stream() as reader:
        wanted = [request(f"r{number}", length=20 + number, max_tokens=6) for number in range(8)]
        await asyncio.gather(*(pod.caller.reserve(one, local=True) for one in wanted))
        sizes = []
        while sum(delta.finish_reason is not None for delta in reader.deltas) < len(wanted):
            sizes.append(len((await reader.step()).deltas))
        assert max(sizes) == len(wanted)
        for one in wanted:
            assert reader.tokens(one.request_id) == expected(one)
        prompts = [notice for notice in reader.notices if notice.WhichOneof("notice") == "prompt"]
        assert sorted(notice.request_id for notice in prompts) == sorted(one.request_id for one in wanted)


async def test_delivered_tokens_are_not_drawn_again() -> None:
    whole = request("a", n=2, temperature=1.0, max_tokens=10)
    delivered = ResumedChoice(choice=0, token_ids=expected(whole, 0)[:4])
    ended = ResumedChoice(choice=1, token_ids=expected(whole, 1), finished=True)
    again = request("a", n=2, temperature=1.0, max_tokens=10, resume=(delivered, ended))
    async with running("prefill") as p, running("decode") as d, d.caller.stream() as reader:
        ticket = await d.caller.reserve(again, attempt=2)
        assert ticket is not None
        await p.caller.prefill_all(again, ticket)
        await reader.until_finished("a")
        assert reader.deltas[0].index == 4
        assert reader.tokens("a") == expected(whole, 0)[4:]
        assert {delta.choice for delta in reader.deltas} == {0}


async def test_choices_end_for_their_reasons() -> None:
    cases = [
        (request("length", max_tokens=3), FinishReason.LENGTH, None),
        (request("eos", max_tokens=None), FinishReason.STOP, 2),
        (request("stop", stop_token_ids=(9,), logit_bias={9: 100.0}, min_tokens=2), FinishReason.STOP, 9),
        (request("on", max_tokens=70, ignore_eos=True), FinishReason.LENGTH, None),
    ]
    async with running("both") as pod, pod.caller.stream() as reader:
        for wanted, _, _ in cases:
            await pod.caller.reserve(wanted, local=True)
        await reader.until_finished(*(wanted.request_id for wanted, _, _ in cases))
        lengths = [len(reader.tokens(wanted.request_id)) for wanted, _, _ in cases]
        ends = {delta.request_id: delta for delta in reader.deltas if delta.finish_reason}
    assert lengths == [3, 64, 3, 70]
    for wanted, reason, stop_token in cases:
        assert (ends[wanted.request_id].finish_reason, ends[wanted.request_id].stop_token_id) == (reason, stop_token)


async def test_a_cancelled_prefill_frees_both() -> None:
    async with running("prefill") as p, running("decode") as d, d.caller.stream():
        await p.caller.hold("push")
        wanted = request("a", length=300)
        ticket = await d.caller.reserve(wanted)
        assert ticket is not None
        call = p.caller.call_prefill(wanted, ticket)
        await p.caller.until(lambda seen: seen.num_pushes == 1)
        call.cancel()
        await p.caller.until_free()
        assert (await d.caller.inspect()).num_reservations == 1
        await d.caller.decode.Abort(decode_pb2.AbortRequest(request_ids=["a", "unknown"]))
        await d.caller.until_free()


async def test_a_router_that_leaves_frees_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ROUTER_GRACE_SECONDS", 0.2)
    async with running("both") as pod:
        async with pod.caller.stream() as reader, pod.caller.stream("router-2") as other:
            await pod.caller.hold("decode")
            await pod.caller.reserve(request("mine"), local=True)
            await reader.step()
        await pod.caller.until_free()
        assert other.deltas == []


async def test_a_router_without_a_stream_holds_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "ROUTER_GRACE_SECONDS", 0.2)
    async with running("decode") as pod:
        await pod.caller.reserve(request("a"))
        await pod.caller.until_free()


async def test_a_router_that_comes_back_in_time_goes_on() -> None:
    wanted = request("a", max_tokens=30)
    async with running("both", {"step_ms": 10.0}) as pod:
        async with pod.caller.stream() as before:
            await pod.caller.hold("decode")
            await pod.caller.reserve(wanted, local=True)
            while not before.deltas:
                await before.step()
        async with pod.caller.stream() as after:
            await pod.caller.hold("")
            await after.until_finished("a")
        assert before.tokens("a") + after.tokens("a") == expected(wanted)


async def test_a_second_stream_takes_over() -> None:
    async with running("both") as pod, pod.caller.stream() as first, pod.caller.stream() as second:
        with pytest.raises(Cancelled):
            await first.step()
        await pod.caller.reserve(request("a"), local=True)
        await second.until_finished("a")
        assert second.tokens("a") == expected(request("a"))


async def test_reserve_is_idempotent_and_attempts_only_grow() -> None:
    async with running("prefill") as p, running("decode") as d, d.caller.stream() as reader:
        wanted = request("a")
        first, same = await d.caller.reserve(wanted, 1), await d.caller.reserve(wanted, 1)
        assert first == same
        second = await d.caller.reserve(wanted, 2)
        assert first is not None
        assert second is not None
        assert second.generation > first.generation
        with pytest.raises(StaleEpoch):
            await d.caller.reserve(wanted, 1)
        with pytest.raises(StaleEpoch):
            await p.caller.prefill_all(wanted, first)
        await p.caller.prefill_all(wanted, second)
        await reader.until_finished("a")
        assert reader.tokens("a") == expected(wanted)
        await d.caller.until_free()


async def test_no_room_says_so() -> None:
    async with running("decode", fake_num_blocks=10) as pod, pod.caller.stream():
        await pod.caller.reserve(request("a", length=100))
        with pytest.raises(NoCapacity) as caught:
            await pod.caller.reserve(request("b", length=100))
        assert caught.value.retry_after_seconds > 0
        await called(pod.caller.decode.Abort(decode_pb2.AbortRequest(request_ids=["a"])))
        assert await pod.caller.reserve(request("b", length=100)) is not None


async def test_an_attempt_without_room_ends_the_former_one() -> None:
    async with running("decode", fake_num_blocks=10) as pod, pod.caller.stream():
        await pod.caller.reserve(request("a"))
        await pod.caller.reserve(request("b"))
        with pytest.raises(NoCapacity):
            await pod.caller.reserve(request("a", length=300), 2)
        await called(pod.caller.decode.Abort(decode_pb2.AbortRequest(request_ids=["b"])))
        await pod.caller.until_free()
        assert not pod.pod._routes.busy


async def test_what_an_engine_grants_too_late_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running("decode") as pod, pod.caller.stream():
        reserve = pod.engine.reserve

        async def late(*args: object, **options: object) -> None:
            await reserve(*args, **options)  # type: ignore[arg-type]
            raise Unavailable("the engine has not answered")

        monkeypatch.setattr(pod.engine, "reserve", late)
        with pytest.raises(Unavailable):
            await pod.caller.reserve(request("a"))
        await pod.caller.until_free()
        assert not pod.pod._routes.busy


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_ticket_that_no_one_uses(policy: str) -> None:
    wanted = request("a", n=2)
    options: dict[str, object] = {"ticket_timeout_ms": 50, "on_ticket_expiry": policy}
    async with running("decode", options) as pod, pod.caller.stream() as reader:
        await pod.caller.reserve(wanted)
        await reader.until_finished("a", choices=2)
        if policy == "recompute":
            assert [notice.WhichOneof("notice") for notice in reader.notices] == ["recompute", "prompt"]
            assert reader.tokens("a", 1) == expected(wanted, 1)
        else:
            assert [delta.finish_reason for delta in reader.deltas] == [FinishReason.ERROR] * 2
            assert reader.deltas[0].error.startswith("transfer_failed: ")
        await pod.caller.until_free()


async def test_a_deadline_ends_a_request_on_both() -> None:
    async with running("prefill") as p, running("decode") as d, d.caller.stream() as reader:
        await p.caller.hold("prefill")
        message = request_to_proto(request("a"))
        message.timeout_ms = 200
        reserved = await d.caller.decode.Reserve(
            decode_pb2.ReserveRequest(request=message, attempt=1, router_id=ROUTER)
        )
        events = p.caller.prefill.Prefill(prefill_pb2.PrefillRequest(request=message, ticket=reserved.ticket))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events.read()
        assert from_rpc_error(caught.value).code == "deadline_exceeded"
        while not any(delta.error for delta in reader.deltas):
            await reader.step()
        await p.caller.until_free()
        await d.caller.until_free()


async def test_a_dead_decode_pod_fails_the_push() -> None:
    async with running("prefill") as p:
        async with running("decode") as d:
            ticket = await d.caller.reserve(request("a"))
        assert ticket is not None
        with pytest.raises(KvrelayError) as caught:
            await p.caller.prefill_all(request("a"), ticket)
        assert caught.value.code == "transfer_failed"
        await p.caller.until_free()


async def test_another_model_is_refused() -> None:
    async with running("prefill") as p, running("decode", {"fingerprint": Fingerprint("x")}) as d, d.caller.stream():
        ticket = await d.caller.reserve(request("a"))
        assert ticket is not None
        with pytest.raises(IncompatibleLayout, match="another model"):
            await p.caller.prefill_all(request("a"), ticket)


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (request("a", length=0), "prompt_token_ids"),
        (request("a", length=997 + 1), "prompt_token_ids"),
        (request("a", temperature=-1.0), "temperature"),
        (request("a", n=0), "n"),
        (request("a", stop_token_ids=(1000,)), "stop_token_ids"),
        (request("a", temperature=1.0, seed=None), "seed"),
        (request("x" * 300), "request_id"),
        (request("a", resume=(ResumedChoice(choice=1, token_ids=(1,)),)), "resume"),
        (request("a", resume=(ResumedChoice(choice=0, token_ids=(5000,)),)), "resume"),
    ],
)
async def test_bad_requests_are_named(wanted: EngineRequest, param: str) -> None:
    async with running("decode") as pod:
        with pytest.raises(InvalidRequest) as caught:
            await pod.caller.reserve(wanted)
        assert caught.value.param == param
        assert (await pod.caller.inspect()).num_requests == 0


async def test_too_long_prompts_and_loras_are_refused() -> None:
    async with running("decode", max_model_len=100) as pod:
        with pytest.raises(InvalidRequest, match="length of 100"):
            await pod.caller.reserve(request("a", length=100))
        message = request_to_proto(request("a"))
        message.lora = "style"
        with pytest.raises(Unsupported) as caught:
            await called(pod.caller.decode.Reserve(decode_pb2.ReserveRequest(request=message, router_id=ROUTER)))
        assert caught.value.param == "lora"
        with pytest.raises(InvalidRequest) as nameless:
            await called(pod.caller.decode.Reserve(decode_pb2.ReserveRequest(request=request_to_proto(request("a")))))
        assert nameless.value.param == "router_id"


async def test_a_ticket_of_another_request_is_refused() -> None:
    async with running("prefill") as p, running("decode") as d, d.caller.stream():
        ticket = await d.caller.reserve(request("a"))
        assert ticket is not None
        with pytest.raises(InvalidRequest) as caught:
            await p.caller.prefill_all(request("b"), ticket)
        assert caught.value.param == "ticket.request_id"


@pytest.mark.parametrize("wrong", [{"end_token": 41}, {"end_token": 39}, {"ticket_bits": 0}])
async def test_a_ticket_for_another_prompt_is_refused(wrong: dict[str, int]) -> None:
    """Before anything is computed: its KV would be too much, too little, or no one's."""
    async with running("prefill") as p, running("decode") as d, d.caller.stream():
        ticket = await d.caller.reserve(request("a", length=40))
        assert ticket is not None
        [target] = ticket.targets
        spoilt = ticket.__class__(**{**_fields(ticket), "targets": (target.__class__(**{**_fields(target), **wrong}),)})
        with pytest.raises(InvalidRequest) as caught:
            await p.caller.prefill_all(request("a", length=40), spoilt)
        assert caught.value.param == "ticket.targets"
        assert p.engine.stats.prompt_tokens == 0


async def test_holds_need_the_hooks() -> None:
    async with running("decode", test_hooks=False) as pod:
        with pytest.raises(Unsupported):
            await pod.caller.hold("decode")
    async with running("decode") as pod:
        with pytest.raises(InvalidRequest):
            await pod.caller.hold("lunch")


async def test_the_engines_death_ends_every_stream() -> None:
    async with running("both") as pod, pod.caller.stream() as reader:
        await pod.caller.hold("prefill")
        ticket = await pod.caller.reserve(request("a"))
        assert ticket is not None
        events = pod.caller.call_prefill(request("b"), ticket.__class__(**{**_fields(ticket), "request_id": "b"}))
        await pod.caller.until(lambda seen: seen.num_requests == 2)
        pod.engine.crash()
        with pytest.raises(Unavailable):
            await reader.step()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await events.read()
        assert isinstance(from_rpc_error(caught.value), Unavailable)
        with pytest.raises(Unavailable):
            await called(pod.caller.pod.Inspect(pod_pb2.InspectRequest()))


def _fields(ticket: object) -> dict[str, object]:
    return {name: getattr(ticket, name) for name in ticket.__struct_fields__}  # type: ignore[attr-defined]


async def test_one_choice_is_aborted_and_the_others_go_on() -> None:
    wanted = request("a", n=3, temperature=1.0, max_tokens=40, ignore_eos=True)
    async with running("both") as pod, pod.caller.stream() as reader:
        await pod.caller.hold("decode")
        await pod.caller.reserve(wanted, local=True)
        await pod.caller.until(lambda seen: seen.num_requests == 1)
        for choice in (1, 7):
            aborted = decode_pb2.AbortedChoice(request_id="a", choice=choice)
            await pod.caller.decode.Abort(decode_pb2.AbortRequest(choices=[aborted]))
        await pod.caller.hold("")
        await reader.until_finished("a", choices=2)
        assert [reader.tokens("a", choice) for choice in (0, 2)] == [expected(wanted, choice) for choice in (0, 2)]
        assert len(reader.tokens("a", 1)) <= 1
        await pod.caller.until_free()
        assert not pod.pod._routes.busy


async def test_with_its_last_choice_a_request_is_over() -> None:
    async with running("prefill") as p, running("decode") as d, d.caller.stream():
        ticket = await d.caller.reserve(request("a", n=2))
        assert ticket is not None
        choices = [decode_pb2.AbortedChoice(request_id="a", choice=choice) for choice in (0, 1)]
        await d.caller.decode.Abort(decode_pb2.AbortRequest(choices=choices))
        await d.caller.until_free()
        assert not d.pod._routes.busy
        with pytest.raises(StaleEpoch):
            await p.caller.prefill_all(request("a", n=2), ticket)
