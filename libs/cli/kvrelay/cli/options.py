"""What a local stack is started with. Frozen and validated; written into the stack's state, so that it can be compared."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROUTER_HTTP_PORT = 8000
ROUTER_GRPC_PORT = 9000
PREFILL_PORT = 9100
DECODE_PORT = 9200
KVSTORE_PORT = 9300
PORT_STEP = 10
MAX_PODS_OF_A_KIND = 10
"""What fits between the fixed ports; more need free ports."""


@dataclass(frozen=True, kw_only=True)
class StackOptions:
    """`engine_options`, `kvstore_options` and `router_options` are flags by name, without the dashes; True stands for a bare flag.

    `pod_options` and `pod_env` add to one process, by its name: prefill-0, decode-1, both-0, kvstore-0, router.
    """

    model: Path
    served_model_name: str = "smollm2"
    prefill: int = 1
    decode: int = 1
    both: int = 0
    kvstore: int = 0
    """KV stores, as of so many nodes: pods are spread over them in turn."""
    kvstore_tiers: str = ""
    """Of each store, in YAML; `{name}` stands for the store's name. Empty: memory, and files in the run directory."""
    engine: str = "process"
    threads: int = 0
    """Of each pod's engine; 0: see `threads_of`."""
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """That the engines share."""
    free_ports: bool = False
    """Any free ports in place of the documented ones."""
    http_port: int = ROUTER_HTTP_PORT
    grpc_port: int = ROUTER_GRPC_PORT
    redis_url: str = ""
    """Empty: the stack starts a server of its own."""
    cluster: str = "default"
    pod_auth_token_file: str = ""
    """A file with the token that pods want to see; empty: they want none."""
    engine_options: Mapping[str, str | bool] = field(default_factory=dict)
    kvstore_options: Mapping[str, str | bool] = field(default_factory=dict)
    router_options: Mapping[str, str | bool] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    pod_options: Mapping[str, Mapping[str, str | bool]] = field(default_factory=dict)
    pod_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "both", "kvstore"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.decode + self.both == 0:
            raise ValueError("a stack needs a decode pod: decode or both must be positive")
        if not self.free_ports and max(self.prefill, self.decode + self.both, self.kvstore) > MAX_PODS_OF_A_KIND:
            raise ValueError(f"over {MAX_PODS_OF_A_KIND} pods of a kind do not fit the fixed ports: use free ports")
        if self.engine not in ("process", "fake"):
            raise ValueError(f"engine must be process or fake, not {self.engine}")
        for name, port in (("http_port", self.http_port), ("grpc_port", self.grpc_port)):
            if not 0 < port < 65536:
                raise ValueError(f"{name} must be between 1 and 65535, not {port}")
        if self.http_port == self.grpc_port and not self.free_ports:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}")
        if self.threads < 0:
            raise ValueError("threads must not be negative")

    def threads_of(self, kind: str) -> int:
        """Of the engine of a pod of this kind.

        Pods that decode share all cores, since they nearly always have work; pods that prefill share half of them. What
        is too much together is lent by the idle to the busy: one thread alone does not get all of the memory's speed, which
        bounds decoding (compare by `benchmarks.serve --prefill-threads --decode-threads`).
        """
        share = self.cores // 2 // self.prefill if kind == "prefill" else self.cores // (self.decode + self.both)
        return self.threads or max(1, share)

    @property
    def shares_cores(self) -> bool:
        """The engines have more threads together than there are cores."""
        pods = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return sum(count * self.threads_of(kind) for kind, count in pods.items() if count) > self.cores


def flags(options: Mapping[str, str | bool]) -> list[str]:
    """`{"block-size": "16", "test-hooks": True}` as a command line."""
    line: list[str] = []
    for name, value in options.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not False:
            line += [f"--{name}", value]
    return line


def pair(text: str) -> tuple[str, str | bool]:
    """`name=value` or a bare `name`. Raises ValueError."""
    name, found, value = text.partition("=")
    if not name:
        raise ValueError(f"{text!r} is not name=value")
    return name, (value if found else True)


def pairs(texts: Sequence[str]) -> dict[str, str | bool]:
    return dict(pair(text) for text in texts)
