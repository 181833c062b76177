"""Pods without an engine, in one process: they speak as real ones do, are registered by real leases, and answer at once.

    python -m benchmarks.router.pods --redis-url URL --model DIR --pods split --step-ms 1.5

`split`: a prefill and a decode pod; a push takes no time. `both`: one pod that plays both parts.
"""

import argparse
import asyncio
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import uvloop

from kvrelay.common.discovery import PodRecord, PodRole, Registration
from kvrelay.common.ids import PodId, RequestId, new_epoch
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from kvrelay.common.modelfiles import tokenizer_digest
from kvrelay.common.request import Ticket, TicketTarget
from kvrelay.common.rpc import SERVER_OPTIONS
from kvrelay.common.settings import ServiceSettings
from kvrelay.common.tokenizer import Tokenizer
from kvrelay.common.wire import ticket_to_proto
from kvrelay.engine.fake.config import FakeConfig, from_model
from kvrelay.engine.pod.decode import MAX_STEPS_TOGETHER
from kvrelay.engine.pod.outbox import Outbox
from kvrelay.engine.pod.steps import joined
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, pod_pb2, pod_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2

SPEECH = (
    " The relay passes the baton from hand to hand, and none of the runners sees more than the part that is theirs."
)
CLUSTER = str(ServiceSettings.model_fields["cluster"].default)
MANY = 1 << 20
"""Credits, and blocks: the router never waits for room."""
STATUS_SECONDS = 1.0
STOP_SECONDS = 0.5


@dataclass(slots=True)
class Running:
    request_id: str
    attempt: int
    length: int
    index: int = 0


class Decoder(decode_pb2_grpc.DecodeServicer):
    """One router's requests, a token of each in a step. As of a real pod, steps that the router has not taken yet go out in one
    message."""

    def __init__(self, tokens: list[int], ticket: Ticket, step_seconds: float) -> None:
        self._tokens = tokens
        self._ticket = ticket_to_proto(ticket)
        self._step_seconds = step_seconds
        self._reserved: dict[str, Running] = {}
        self._running: dict[str, Running] = {}
        self._prompts: list[Running] = []
        self._work = asyncio.Event()
        self._steps: Outbox[decode_pb2.StepTokens] = Outbox(MANY)

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: object) -> decode_pb2.ReserveResponse:
        wanted = request.request
        running = Running(wanted.request_id, request.attempt, wanted.sampling.max_tokens)
        answer = decode_pb2.ReserveResponse()
        if request.local_prefill:
            self._prompts.append(running)
            self._begin(running)
        else:
            self._reserved[running.request_id] = running
            answer.ticket.CopyFrom(self._ticket)
            answer.ticket.request_id = running.request_id
            answer.ticket.attempt = running.attempt
        return answer

    def pushed(self, request_id: str) -> None:
        """The request's KV has arrived."""
        if (running := self._reserved.pop(request_id, None)) is not None:
            self._begin(running)

    def _begin(self, running: Running) -> None:
        self._running[running.request_id] = running
        self._work.set()

    async def Stream(  # type: ignore[override]
        self,
        request: decode_pb2.StreamRequest,
        context: "grpc.aio.ServicerContext[decode_pb2.StreamRequest, decode_pb2.StepTokens]",
    ) -> None:
        await context.send_initial_metadata(())
        stepping = asyncio.create_task(self._run())
        try:
            while waiting := await self._steps.get_all(MAX_STEPS_TOGETHER):
                await context.write(joined(waiting))
        finally:
            stepping.cancel()

    async def _run(self) -> None:
        begin = time.monotonic()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            begin = max(begin + self._step_seconds, time.monotonic())
            await asyncio.sleep(begin - time.monotonic())
            self._steps.put(self._step())

    def _step(self) -> decode_pb2.StepTokens:
        prompts, self._prompts = self._prompts, []
        step = decode_pb2.StepTokens(notices=[_computed(running) for running in prompts])
        for running in list(self._running.values()):
            index = running.index
            running.index += 1
            last = running.index == running.length
            if last:
                del self._running[running.request_id]
            step.deltas.add(
                request_id=running.request_id,
                index=index,
                token_ids=(self._tokens[index % len(self._tokens)],),
                finish_reason=types_pb2.FINISH_REASON_LENGTH if last else types_pb2.FINISH_REASON_UNSPECIFIED,
                attempt=running.attempt,
            )
        return step

    async def Abort(self, request: decode_pb2.AbortRequest, context: object) -> decode_pb2.AbortResponse:
        for request_id in request.request_ids:
            self._reserved.pop(request_id, None)
            self._running.pop(request_id, None)
        return decode_pb2.AbortResponse()


def _computed(running: Running) -> decode_pb2.RequestNotice:
    prompt = decode_pb2.PromptComputed()
    return decode_pb2.RequestNotice(request_id=running.request_id, attempt=running.attempt, prompt=prompt)


class Prefiller(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, tokens: list[int], decoder: Decoder) -> None:
        self._token = tokens[0]
        self._decoder = decoder
        self._started = prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted())
        self._pushed = prefill_pb2.PrefillEvent(push_completed=prefill_pb2.PushCompleted())

    async def Prefill(  # type: ignore[override]
        self,
        request: prefill_pb2.PrefillRequest,
        context: "grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent]",
    ) -> None:
        wanted = request.request
        await context.write(self._started)
        first = prefill_pb2.PrefillEvent()
        first.first_tokens.deltas.add(
            request_id=wanted.request_id,
            token_ids=(self._token,),
            finish_reason=types_pb2.FINISH_REASON_LENGTH
            if wanted.sampling.max_tokens == 1
            else types_pb2.FINISH_REASON_UNSPECIFIED,
            attempt=request.ticket.attempt,
        )
        await context.write(first)
        self._decoder.pushed(wanted.request_id)
        await context.write(self._pushed)


class Health(pod_pb2_grpc.PodServicer):
    def __init__(self, record: PodRecord) -> None:
        self._status = pod_pb2.PodStatus(
            pod_id=record.pod_id,
            epoch=record.epoch,
            ready=True,
            credits=MANY,
            free_blocks=MANY,
            num_blocks=MANY,
        )

    async def Watch(  # type: ignore[override]
        self,
        request: pod_pb2.WatchRequest,
        context: "grpc.aio.ServicerContext[pod_pb2.WatchRequest, pod_pb2.PodStatus]",
    ) -> None:
        while True:
            await context.write(self._status)
            await asyncio.sleep(STATUS_SECONDS)


def _record(role: PodRole, config: FakeConfig, port: int, digest: str) -> PodRecord:
    group = KvGroup(
        kind=KvGroupKind.FULL,
        layers=tuple(range(30)),
        block_size=16,
        dtype=KvDtype.BFLOAT16,
        num_kv_heads=3,
        head_dim=64,
        shard_heads=3,
    )
    return PodRecord(
        pod_id=PodId(f"stub-{role}"),
        epoch=new_epoch(),
        role=role,
        model=config.model,
        fingerprint=config.fingerprint,
        grpc_address=f"127.0.0.1:{port}",
        http_address="",
        layout=KvLayout(fingerprint=config.fingerprint, groups=(group,)),
        max_model_len=config.max_model_len,
        num_blocks=MANY,
        transport="none",
        version="stub",
        tokenizer=digest,
    )


async def serve(redis_url: str, model: Path, roles: tuple[PodRole, ...], step_seconds: float) -> None:
    """Until it is cancelled."""
    config, digest = from_model(model), tokenizer_digest(model)
    tokens = Tokenizer(model).encode(SPEECH, add_special_tokens=False)
    servers = {role: grpc.aio.server(options=SERVER_OPTIONS) for role in roles}
    records = {
        role: _record(role, config, server.add_insecure_port("127.0.0.1:0"), digest) for role, server in servers.items()
    }
    decoder = Decoder(tokens, _ticket(records[roles[-1]]), step_seconds)
    for role, server in servers.items():
        pod_pb2_grpc.add_PodServicer_to_server(Health(records[role]), server)
        if role == "prefill":
            prefill_pb2_grpc.add_PrefillServicer_to_server(Prefiller(tokens, decoder), server)
        else:
            decode_pb2_grpc.add_DecodeServicer_to_server(decoder, server)
        await server.start()
    leases = [Registration(redis_url, CLUSTER, record) for record in records.values()]
    for lease in leases:
        lease.start()
    try:
        await asyncio.gather(*(server.wait_for_termination() for server in servers.values()))
    finally:
        await asyncio.gather(
            *(lease.stop() for lease in leases), *(each.stop(STOP_SECONDS) for each in servers.values())
        )


def _ticket(decode: PodRecord) -> Ticket:
    """As a real one has it: of one rank, with an address of some length."""
    target = TicketTarget(
        rank=0,
        group=0,
        address=secrets.token_bytes(300),
        ticket_bits=secrets.randbits(40),
        first_token=0,
        end_token=200,
    )
    return Ticket(
        request_id=RequestId(""),
        attempt=0,
        pod_id=decode.pod_id,
        epoch=decode.epoch,
        generation=1,
        timeout_ms=30_000,
        targets=(target,),
        layout=decode.layout,
    )


ROLES: dict[str, tuple[PodRole, ...]] = {"split": ("prefill", "decode"), "both": ("both",)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.router.pods", description=__doc__.partition("\n")[0])
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pods", choices=ROLES, default="split")
    parser.add_argument("--step-ms", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(serve(args.redis_url, args.model, ROLES[args.pods], args.step_ms / 1000))


if __name__ == "__main__":
    main()
