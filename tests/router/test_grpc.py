"""The gRPC front beyond the common table: rich errors, deadlines, cancellation, abort, keys, health, reflection."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from kvrelay.common.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestTooLarge
from kvrelay.common.rpc import from_rpc_error
from kvrelay.router.grpcfront import start_grpc
from kvrelay.router.job import Readiness
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, types_pb2
from tests.router.stack import MAX_BODY, Fronts, Settings, fronts_of
from tests.router.stub import EOS, MAX_LEN, MODEL, SPEECH, VOCAB, StubRouter

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
GENERATE = "/kvrelay.v1.Inference/Generate"


def request(max_tokens: int = 8, **fields: object) -> pb.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, seed=0)
    return pb.GenerateRequest(**{"model": MODEL, "prompt": "Hello", "sampling": sampling, **fields})  # type: ignore[arg-type]


def stub_of(fronts: Fronts) -> "inference_pb2_grpc.InferenceAsyncStub":
    return inference_pb2_grpc.InferenceStub(fronts.channel)


async def failed(call: AsyncIterator[object], messages: int = 0) -> grpc.aio.AioRpcError:
    """How a call ends that first brings so many messages."""
    for _ in range(messages):
        await anext(aiter(call))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(aiter(call))
    return raised.value


def details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    found = dict(error.trailing_metadata())["grpc-status-details-bin"]
    return status_pb2.Status.FromString(found)


async def test_the_order_of_messages(fronts: Fronts) -> None:
    messages = [message async for message in stub_of(fronts).Generate(request(request_id="mine"))]
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["prompt", *["choice"] * 8, "usage"]
    assert {message.request_id for message in messages} == {"mine"}
    assert "".join(message.choice.text for message in messages) == SPEECH[:8]


async def test_a_field_violation_names_the_field(fronts: Fronts) -> None:
    error = await failed(stub_of(fronts).Generate(request(sampling=types_pb2.SamplingParams(top_p=7))))
    status = details(error)
    assert (error.code(), status.code) == (grpc.StatusCode.INVALID_ARGUMENT, 3)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("invalid_request", "kvrelay")
    assert bad.field_violations[0].field == "top_p"


async def test_no_room_says_when_to_come_back(fronts: Fronts, stub: StubRouter) -> None:
    stub.failure = Overloaded("the queue is full", 2.5)
    error = await failed(stub_of(fronts).Generate(request()))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert details(error).details[1].Unpack(retry)
    assert retry.retry_delay == duration_pb2.Duration(seconds=2, nanos=500_000_000)


async def test_an_error_after_tokens(fronts: Fronts, stub: StubRouter) -> None:
    stub.failure, stub.fail_at = DeadlineExceeded("too late"), 3
    error = await failed(stub_of(fronts).Generate(request()), messages=4)
    assert isinstance(from_rpc_error(error), DeadlineExceeded)


@pytest.mark.parametrize(
    ("timeout_ms", "deadline", "low", "high"),
    [(0, 30.0, 25_000, 31_000), (500, 30.0, 500, 500), (60_000, 20.0, 15_000, 21_000)],
)
async def test_the_earlier_deadline_counts(
    fronts: Fronts, stub: StubRouter, timeout_ms: int, deadline: float, low: int, high: int
) -> None:
    """On its way gRPC rounds a deadline up, to a tenth of a second."""
    async for _ in stub_of(fronts).Generate(request(timeout_ms=timeout_ms), timeout=deadline):
        pass
    assert low <= (stub.prepared[-1].timeout_ms or 0) <= high


async def test_a_session_is_named_in_the_metadata(fronts: Fronts, stub: StubRouter) -> None:
    async for _ in stub_of(fronts).Generate(request(), metadata=(("x-session-id", "s-1"),)):
        pass
    assert stub.prepared[-1].session == "s-1"
    async for _ in stub_of(fronts).Generate(request()):
        pass
    assert stub.prepared[-1].session == ""


async def test_without_a_deadline_the_routers_own_counts(fronts: Fronts, stub: StubRouter) -> None:
    async for _ in stub_of(fronts).Generate(request()):
        pass
    assert stub.prepared[-1].timeout_ms is None


@pytest.mark.parametrize("stall_at", [0, 3])
async def test_cancelling_the_call_ends_the_request(fronts: Fronts, stub: StubRouter, stall_at: int) -> None:
    stub.stall_at = stall_at
    call = stub_of(fronts).Generate(request())
    reading = asyncio.ensure_future(call.read())
    await asyncio.wait_for(stub.stalled.wait(), 5)
    call.cancel()
    await asyncio.wait_for(stub.closed.get(), 5)
    assert not stub.running
    await asyncio.gather(reading, return_exceptions=True)
    assert call.cancelled()


async def test_the_calls_deadline_ends_the_request(fronts: Fronts, stub: StubRouter) -> None:
    stub.stall_at = 2
    error = await failed(stub_of(fronts).Generate(request(), timeout=0.3), messages=3)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(stub.closed.get(), 5)
    assert not stub.running


async def test_abort(fronts: Fronts, stub: StubRouter) -> None:
    stub.stall_at = 2
    running = asyncio.ensure_future(failed(stub_of(fronts).Generate(request(request_id="mine")), messages=3))
    await asyncio.wait_for(stub.stalled.wait(), 5)
    await stub_of(fronts).Abort(pb.AbortGenerationRequest(request_id="mine"))
    assert (await running).code() is grpc.StatusCode.CANCELLED
    await stub_of(fronts).Abort(pb.AbortGenerationRequest(request_id="of nobody"))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub_of(fronts).Abort(pb.AbortGenerationRequest())
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokenize_detokenize_and_model_info(fronts: Fronts) -> None:
    service = stub_of(fronts)
    tokens = await service.Tokenize(pb.TokenizeRequest(prompt="Hé"))
    assert (list(tokens.token_ids), tokens.max_model_len) == ([72, 195, 169], MAX_LEN)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")], add_generation_prompt=False)
    tokens = await service.Tokenize(pb.TokenizeRequest(model=MODEL, chat=chat))
    text = await service.Detokenize(pb.DetokenizeRequest(model=MODEL, token_ids=tokens.token_ids))
    assert text.text == "<user>Hi\n"
    info = await service.GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model=MODEL,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        has_chat_template=True,
        fingerprint="0123456789abcdef",
    )


@pytest.mark.parametrize(
    ("method", "message", "param"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(prompt="x", model="other"), "model"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[10**9]), "tokens"),
    ],
)
async def test_bad_unary_requests(fronts: Fronts, method: str, message: object, param: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await getattr(stub_of(fronts), method)(message)
    error = from_rpc_error(raised.value)
    assert isinstance(error, InvalidRequest)
    assert error.param == param


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x0a\xff\xff\xff\xff\x0f"])
async def test_bytes_that_are_no_message(fronts: Fronts, data: bytes) -> None:
    error = await failed(fronts.channel.unary_stream(GENERATE)(data))
    assert isinstance(from_rpc_error(error), InvalidRequest)


async def test_a_message_over_the_limit(fronts: Fronts) -> None:
    error = await failed(stub_of(fronts).Generate(request(prompt="x" * MAX_BODY)))
    assert isinstance(from_rpc_error(error), RequestTooLarge)


async def test_no_input(fronts: Fronts) -> None:
    error = from_rpc_error(await failed(stub_of(fronts).Generate(pb.GenerateRequest(model=MODEL))))
    assert isinstance(error, InvalidRequest)
    assert error.param == "prompt"


async def test_keys(stub: StubRouter) -> None:
    async with fronts_of(stub, Settings(api_keys=("right",))) as fronts:
        service = stub_of(fronts)
        for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", "right"),)):
            error = await failed(service.Generate(request(), metadata=metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.prepared == []
        right = (("authorization", "Bearer right"),)
        assert [message async for message in service.Generate(request(), metadata=right)]
        await health_pb2_grpc.HealthStub(fronts.channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
async def test_an_address_of_ipv6(stub: StubRouter) -> None:
    server = await start_grpc(stub, Settings(host="::1"), CollectorRegistry())
    try:
        async with grpc.aio.insecure_channel(f"[::1]:{server.port}") as channel:
            info = await inference_pb2_grpc.InferenceStub(channel).GetModelInfo(pb.GetModelInfoRequest())
            assert info.model == MODEL
    finally:
        await server.stop(0)


async def test_health_follows_readiness(fronts: Fronts, stub: StubRouter) -> None:
    health = health_pb2_grpc.HealthStub(fronts.channel)
    for service in ("", "kvrelay.v1.Inference"):
        checked = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
    watching = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    stub.readiness = Readiness(ready=False, reason="no pod")
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_describes_the_service(fronts: Fronts) -> None:
    reflection = reflection_pb2_grpc.ServerReflectionStub(fronts.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvrelay.v1.Inference"),
    ]
    answers = [answer async for answer in reflection.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"kvrelay.v1.Inference", "grpc.health.v1.Health"} <= names
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(data)
        for data in answers[1].file_descriptor_response.file_descriptor_proto
    ]
    methods = {method.name for file in files for service in file.service for method in service.method}
    assert methods == {"Generate", "Tokenize", "Detokenize", "GetModelInfo", "Abort"}
