"""One process of a stack, as the stack's user handles it."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from kvrelay.cli.commands import HOST
from kvrelay.cli.process import Process, launch
from kvrelay.cli.state import Entry

PROBE_SECONDS = 2.0


@dataclass(frozen=True)
class Readiness:
    ready: bool
    text: str
    """What the process says of itself: why it is not ready, how far its start is."""
    num_prefill: int = 0
    num_decode: int = 0
    """The pods that it can use, where it is a router."""


class Node:
    """Restarting one changes its pid and leaves its name and ports."""

    def __init__(self, entry: Entry, on_change: Callable[[Entry], None]) -> None:
        self._entry = entry
        self._on_change = on_change

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def kind(self) -> str:
        return self._entry.kind

    @property
    def process(self) -> Process:
        return self._entry.process

    @property
    def pid(self) -> int:
        """Of the front process."""
        return self.process.pid

    def pids(self) -> list[int]:
        """Of the front and the engine."""
        return self.process.members()

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def grpc_address(self) -> str:
        return f"{HOST}:{self._entry.grpc_port}"

    @property
    def http_address(self) -> str:
        return f"http://{HOST}:{self._entry.http_port}"

    @property
    def http_port(self) -> int:
        return self._entry.http_port

    @property
    def grpc_port(self) -> int:
        return self._entry.grpc_port

    def readiness(self) -> Readiness:
        """What its /readyz says; not ready where it does not answer."""
        try:
            # Over HTTP no certificate is verified; to read the trusted ones costs more processor time than all else here.
            answer = httpx.get(f"{self.http_address}/readyz", timeout=PROBE_SECONDS, verify=False)
        except httpx.TransportError:
            return Readiness(False, "starting")
        return _read(answer)

    def kill(self) -> None:
        """kill -9 of the whole pod, and its end."""
        self.process.signal(signal.SIGKILL)
        self.process.kill()

    def terminate(self, timeout: float = 30.0) -> None:
        """SIGTERM, and the bounded end of its drain."""
        self.process.stop(timeout)

    def pause(self) -> None:
        self.process.signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.signal_all(signal.SIGCONT)

    def restart(self) -> None:
        """The same command again, after the end of what is left of the former process. Does not wait for readiness."""
        self.process.kill()
        entry = self._entry
        process = launch(entry.name, entry.command, entry.env, entry.process.log)
        self._entry = Entry(
            process=process,
            kind=entry.kind,
            command=entry.command,
            env=entry.env,
            http_port=entry.http_port,
            grpc_port=entry.grpc_port,
        )
        self._on_change(self._entry)


def _read(answer: httpx.Response) -> Readiness:
    """The reason is bounded; the router gives one also when it is ready."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    said = body if isinstance(body, dict) else {}
    text = str(said.get("reason") or f"status {answer.status_code}")[:120]
    counts = (count if isinstance(count := said.get(name), int) else 0 for name in ("num_prefill", "num_decode"))
    return Readiness(answer.status_code == 200, text, *counts)
