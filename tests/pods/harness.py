"""Pods around fake engines, in the test's own event loop, and a caller that speaks as a router does."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable

import grpc.aio

from kvrelay.common import wire
from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta, EngineRequest, ResumedChoice, SamplingParams, Ticket
from kvrelay.common.rpc import CHANNEL_OPTIONS, called, from_rpc_error
from kvrelay.engine.fake import FakeConfig, FakeEngine
from kvrelay.engine.fake.tokens import Speaker
from kvrelay.engine.pod.engines import fake_config
from kvrelay.engine.pod.server import Pod
from kvrelay.engine.pod.settings import PodSettings
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, pod_pb2, pod_pb2_grpc, prefill_pb2, prefill_pb2_grpc

NO_REDIS = "redis://127.0.0.1:1/0"
ROUTER = "router-1"


def request(
    request_id: str, length: int = 40, resume: tuple[ResumedChoice, ...] = (), **sampling: object
) -> EngineRequest:
    """A prompt of `length` tokens; greedy unless told otherwise."""
    given = {"temperature": 0.0, "max_tokens": 8, "seed": 1, **sampling}
    return EngineRequest(
        request_id=RequestId(request_id),
        prompt_token_ids=tuple(range(3, length + 3)),
        sampling=SamplingParams(**given),  # type: ignore[arg-type]
        resume=resume,
    )


def expected(wanted: EngineRequest, choice: int = 0, config: FakeConfig | None = None) -> tuple[int, ...]:
    """What a fake says, all of it."""
    speaker = Speaker(wanted, config or FakeConfig())
    return tuple(speaker.token(choice, index) for index in range(speaker.expected))


@dataclasses.dataclass
class Caller:
    """One pod's stubs."""

    channel: grpc.aio.Channel

    def __post_init__(self) -> None:
        self.pod = pod_pb2_grpc.PodStub(self.channel)
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)

    async def reserve(self, wanted: EngineRequest, attempt: int = 1, *, local: bool = False) -> Ticket | None:
        message = decode_pb2.ReserveRequest(
            request=wire.request_to_proto(wanted), attempt=attempt, router_id=ROUTER, local_prefill=local
        )
        answer = await called(self.decode.Reserve(message))
        return wire.ticket_from_proto(answer.ticket) if answer.HasField("ticket") else None

    def call_prefill(
        self, wanted: EngineRequest, ticket: Ticket
    ) -> "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]":
        message = prefill_pb2.PrefillRequest(request=wire.request_to_proto(wanted), ticket=wire.ticket_to_proto(ticket))
        return self.prefill.Prefill(message)

    async def prefill_all(self, wanted: EngineRequest, ticket: Ticket) -> list[prefill_pb2.PrefillEvent]:
        try:
            return [event async for event in self.call_prefill(wanted, ticket)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    @contextlib.asynccontextmanager
    async def stream(self, router_id: str = ROUTER) -> AsyncIterator["Reader"]:
        call = self.decode.Stream(decode_pb2.StreamRequest(router_id=router_id))
        await call.initial_metadata()
        try:
            yield Reader(call)
        finally:
            call.cancel()

    async def inspect(self) -> pod_pb2.InspectResponse:
        return await called(self.pod.Inspect(pod_pb2.InspectRequest()))

    async def hold(self, point: str) -> None:
        await called(self.pod.SetHold(pod_pb2.SetHoldRequest(point=point)))

    async def until(self, wanted: Callable[[pod_pb2.InspectResponse], bool], seconds: float = 10.0) -> None:
        """Asks until the pod's inspection is as wanted, and whole."""
        async with asyncio.timeout(seconds):
            while not wanted(seen := await self.inspect()):
                await asyncio.sleep(0.01)
        assert list(seen.violations) == []

    async def until_free(self) -> None:
        await self.until(lambda seen: seen.num_requests == 0 and seen.free_blocks == seen.num_blocks)


@dataclasses.dataclass
class Reader:
    """A router's token stream."""

    call: "grpc.aio.UnaryStreamCall[decode_pb2.StreamRequest, decode_pb2.StepTokens]"
    deltas: list[ChoiceDelta] = dataclasses.field(default_factory=list)
    notices: list[decode_pb2.RequestNotice] = dataclasses.field(default_factory=list)

    async def step(self) -> decode_pb2.StepTokens:
        try:
            async with asyncio.timeout(10):
                step = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        assert isinstance(step, decode_pb2.StepTokens), "the stream has ended"
        self.deltas += (wire.delta_from_proto(delta) for delta in step.deltas)
        self.notices += step.notices
        return step

    async def until_finished(self, *request_ids: str, choices: int = 1) -> None:
        def finished() -> int:
            return sum(delta.request_id in request_ids and delta.finish_reason is not None for delta in self.deltas)

        while finished() < len(request_ids) * choices:
            await self.step()

    def tokens(self, request_id: str, choice: int = 0) -> tuple[int, ...]:
        """Checks that each index came once and in order."""
        mine = [delta for delta in self.deltas if delta.request_id == request_id and delta.choice == choice]
        following = mine[0].index if mine else 0
        for delta in mine:
            assert delta.index == following
            following += len(delta.token_ids)
        return tuple(token for delta in mine for token in delta.token_ids)


@dataclasses.dataclass
class Running:
    """A started pod."""

    pod: Pod
    engine: FakeEngine
    caller: Caller
    web: str


def settings(**options: object) -> PodSettings:
    given = {"engine": "fake", "grpc_port": 0, "http_port": 0, "redis_url": NO_REDIS, "test_hooks": True, **options}
    return PodSettings(**given)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(
    role: str, engine_options: dict[str, object] | None = None, **options: object
) -> AsyncIterator[Running]:
    chosen = settings(role=role, **options)
    config = dataclasses.replace(fake_config(chosen), **(engine_options or {}))  # type: ignore[arg-type]
    engine = FakeEngine(config, chosen.make_pod_id())
    pod = Pod(chosen, engine)
    try:
        assert await pod.start()
        address = f"127.0.0.1:{pod.grpc_port}"
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield Running(pod, engine, Caller(channel), f"http://127.0.0.1:{pod.http_port}")
    finally:
        await pod.stop()
