"""Pods as processes of their own, from the command line to the exit code."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc.aio
import psutil
import pytest

from kvrelay.common.discovery import PodDirectory, PodRecord
from kvrelay.common.errors import Draining
from kvrelay.common.rpc import CHANNEL_OPTIONS
from tests.fixtures_redis import RedisServer
from tests.pods.harness import Caller, expected, request

pytestmark = pytest.mark.integration

IDLE_SECONDS = 4.0
IDLE_SHARE = 0.03


class Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def exit_code(self) -> int:
        async with asyncio.timeout(20):
            return await self._process.wait()

    async def errors(self) -> str:
        assert self._process.stderr is not None
        return (await self._process.stderr.read()).decode()


@contextlib.asynccontextmanager
async def process(kind: str, *options: str, capture: bool = False) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", f"kvrelay.{kind}.main", *options)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "REDIS_URL"))}
    started = await asyncio.create_subprocess_exec(
        *command, env=kept, stderr=asyncio.subprocess.PIPE if capture else None
    )
    try:
        yield Process(started)
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def _options(server: RedisServer, *more: str) -> tuple[str, ...]:
    return ("--engine", "fake", "--grpc-port", "0", "--redis-url", server.url, "--test-hooks", *more)


@contextlib.asynccontextmanager
async def directory_of(server: RedisServer) -> AsyncIterator[PodDirectory]:
    directory = PodDirectory(server.url, "default")
    await directory.start()
    try:
        yield directory
    finally:
        await directory.stop()


async def until_roles(directory: PodDirectory, *roles: str, seconds: float = 30.0) -> dict[str, PodRecord]:
    async with asyncio.timeout(seconds):
        async for pods in directory.updates():
            if sorted(record.role for record in pods.values()) == sorted(roles):
                break
    return {record.role: record for record in directory.pods().values()}


@contextlib.asynccontextmanager
async def caller_of(record: PodRecord) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(record.grpc_address, options=CHANNEL_OPTIONS) as channel:
        yield Caller(channel)


async def test_from_registration_to_drain(redis_server: RedisServer) -> None:
    slow = _options(redis_server, "--fake-step-ms", "10")
    async with (
        process("prefill", *slow) as p_process,
        process("decode", *slow) as d_process,
        directory_of(redis_server) as directory,
    ):
        records = await until_roles(directory, "prefill", "decode")
        async with caller_of(records["prefill"]) as p, caller_of(records["decode"]) as d, d.stream() as reader:
            await d.hold("decode")
            wanted = request("a", max_tokens=40)
            ticket = await d.reserve(wanted)
            assert ticket is not None
            await p.prefill_all(wanted, ticket)
            os.kill(d_process.pid, signal.SIGTERM)
            await until_roles(directory, "prefill", seconds=2.5)  # told, not waited for: leases are longer
            with pytest.raises(Draining):
                await d.reserve(request("b"))
            await d.hold("")
            await reader.until_finished("a")
            assert reader.tokens("a") == expected(wanted)
        assert await d_process.exit_code() == 0
        os.kill(p_process.pid, signal.SIGTERM)
        assert await p_process.exit_code() == 0
        await until_roles(directory)


async def test_a_killed_pod_comes_back_with_another_epoch(redis_server: RedisServer) -> None:
    options = _options(redis_server, "--role", "both", "--pod-id", "pod")
    async with directory_of(redis_server) as directory:
        async with process("decode", *options) as first:
            before = (await until_roles(directory, "both"))["both"]
            os.kill(first.pid, signal.SIGKILL)
            assert await first.exit_code() == -signal.SIGKILL
            await until_roles(directory, seconds=9.0)
        async with process("decode", *options):
            after = (await until_roles(directory, "both"))["both"]
            assert after.pod_id == before.pod_id
            assert after.epoch != before.epoch


async def test_idle_pods_rest(redis_server: RedisServer) -> None:
    async with (
        process("prefill", *_options(redis_server)) as p_process,
        process("decode", *_options(redis_server)) as d_process,
        directory_of(redis_server) as directory,
    ):
        records = await until_roles(directory, "prefill", "decode")
        async with caller_of(records["decode"]) as d, d.stream():
            before = [_cpu_seconds(one.pid) for one in (p_process, d_process)]
            await asyncio.sleep(IDLE_SECONDS)  # the time over which it is measured
            used = [_cpu_seconds(one.pid) - start for one, start in zip((p_process, d_process), before, strict=True)]
        assert max(used) / IDLE_SECONDS < IDLE_SHARE


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize(
    ("kind", "options", "code", "named"),
    [
        ("prefill", ("--engine", "fake", "--role", "decode"), 2, "--role"),
        ("decode", ("--engine", "fake", "--block-size", "17"), 2, "block_size"),
        ("decode", ("--nonsense",), 2, "--nonsense"),
        ("decode", (), 2, "--model"),
        ("decode", ("--model", "/nowhere", "--block-size", "24"), 2, "block_size"),
        ("decode", ("--engine", "fake", "--model", "/nowhere"), 1, "/nowhere"),
        ("decode", ("--engine", "fake", "--kv-cache-bytes", "lots"), 2, "--kv-cache-bytes"),
    ],
)
async def test_what_cannot_start_says_why(kind: str, options: tuple[str, ...], code: int, named: str) -> None:
    async with process(kind, *options, capture=True) as started:
        errors = await started.errors()
        assert await started.exit_code() == code
    assert named in errors
    assert errors.count("\n") == 1


async def test_sigterm_twice(redis_server: RedisServer) -> None:
    async with process("decode", *_options(redis_server), capture=True) as started:
        async with directory_of(redis_server) as directory:
            await until_roles(directory, "decode")
        os.kill(started.pid, signal.SIGTERM)
        os.kill(started.pid, signal.SIGTERM)
        assert await started.exit_code() == 0
        assert "Traceback" not in await started.errors()
