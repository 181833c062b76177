"""A whole stack on this machine: Redis, KV stores, prefill pods, decode pods, router, as detached processes with logs and state.

with Stack(StackOptions(model=directory, free_ports=True), run_dir) as stack:
    httpx.post(f"{stack.url}/v1/completions", ...)
    stack.prefill[0].kill()
"""

import fcntl
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrelay.cli import state as states
from kvrelay.cli.commands import Command, plan
from kvrelay.cli.node import Node, Readiness
from kvrelay.cli.options import StackOptions
from kvrelay.cli.probe import answers
from kvrelay.cli.process import launch
from kvrelay.cli.state import Entry, State
from kvrelay.common.access import read_token

READY_SECONDS = 180.0
STOP_SECONDS = 40.0
"""For each kind of process: the drain of a router, 30 s unless told otherwise, and some for its close."""
POLL_SECONDS = 0.1
LOG_LINES = 20

Watcher = Callable[[Mapping[str, str]], None]
"""Is told, again and again during the start, what each process is doing, by its name."""


class StackFailed(Exception):
    """The stack did not start; the message ends with the failing process's last log lines."""


def reason_in(tail: str) -> str:
    """The last error of a log, without its time; the last line where there is none."""
    lines = tail.splitlines() or ["it has written nothing"]
    errors = [line.split(": ", 1)[-1] for line in lines if " ERROR " in line]
    return errors[-1] if errors else lines[-1]


def _unwatched(doing: Mapping[str, str]) -> None:
    """Nobody looks."""


class Stack:
    """Started by `start`, or by entering it; ended by `stop`, or by leaving it. `attach` finds one that runs already.

    All state that ending needs is in `run_dir`, so that another process can end what this one started.
    """

    def __init__(self, options: StackOptions, run_dir: Path | str, *, watch: Watcher = _unwatched) -> None:
        self.options = options
        self.run_dir = Path(run_dir)
        self._watch = watch
        self._state = State(options=options)
        self._nodes: list[Node] = []

    @classmethod
    def attach(cls, run_dir: Path) -> "Stack | None":
        """The stack whose state lies in `run_dir`, running or not; None where there is none."""
        state = states.load(run_dir)
        if state is None:
            return None
        stack = cls(state.options, run_dir)
        stack._state = state
        stack._nodes = [Node(entry, stack._changed) for entry in state.entries]
        return stack

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    # Life.

    def start(self, timeout: float = READY_SECONDS) -> None:
        """Returns when the router and all pods are ready; on any failure ends what was started.

        Raises StackFailed, also where a stack of this run directory is up already.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with self._exclusively():
            former = Stack.attach(self.run_dir)
            if former is not None:
                if any(node.alive for node in former.nodes):
                    raise StackFailed(f"a stack is up already in {self.run_dir}: kvrelay down ends it")
                former._end()
            try:
                self._launch()
                self._await_ready(timeout)
            except BaseException:  # Ctrl-C as well: no process that was started is left behind
                self._end()
                raise

    def stop(self) -> None:
        """SIGTERM to all, router first, a bounded wait, SIGKILL to what is left. Again is harmless."""
        with self._exclusively():
            self._end()

    def _launch(self) -> None:
        try:
            if self.options.redis_url:
                answers(self.options.redis_url)
            commands = plan(self.options, self.run_dir)
        except OSError as error:
            raise StackFailed(str(error)) from error
        for command in commands:
            self._run(command)

    def _run(self, command: Command) -> None:
        log = self.run_dir / f"{command.name}.log"
        log.unlink(missing_ok=True)
        try:
            process = launch(command.name, command.line, command.env, log)
        except OSError as error:
            raise StackFailed(f"{command.name} cannot be started: {error}") from error
        entry = Entry(
            process=process,
            kind=command.kind,
            command=command.line,
            env=command.env,
            http_port=command.http_port,
            grpc_port=command.grpc_port,
        )
        (self.run_dir / f"{command.name}.pid").write_text(f"{process.pid}\n")
        self._nodes.append(Node(entry, self._changed))
        self._changed(entry)

    def _changed(self, entry: Entry) -> None:
        self._state = self._state.with_entry(entry)
        states.save(self.run_dir, self._state)

    def _end(self) -> None:
        # The router first: it ends its requests while pods can still hear of it. KV stores when no pod holds any of their
        # memory. Redis last: all sign off there.
        waves = (["router"], ["prefill", "decode", "both"], ["kvstore"], ["redis"])
        for kinds in waves:
            nodes = [node for node in self._nodes if node.kind in kinds]
            for node in nodes:
                node.resume()
                node.process.signal(signal.SIGTERM)
            end = time.monotonic() + STOP_SECONDS
            for node in nodes:
                if not node.process.wait(max(0.0, end - time.monotonic())):
                    node.process.kill()
        for node in self._nodes:
            (self.run_dir / f"{node.name}.pid").unlink(missing_ok=True)
        if self._nodes:
            states.discard(self.run_dir)
        self._nodes = []

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """One `start` or `stop` of a run directory at a time, whoever asks."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # Readiness.

    def wait_ready(self, timeout: float = READY_SECONDS) -> None:
        """For instance after a restart. Raises StackFailed."""
        self._await_ready(timeout)

    @property
    def ready(self) -> bool:
        return bool(self._nodes) and all(node.alive for node in self._nodes) and not self._pending()

    def _await_ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            for node in self._nodes:
                if not node.alive:
                    raise StackFailed(self._report(node, "ended while the stack started"))
            pending = self._pending()
            self._watch({node.name: pending.get(node.name, "ready") for node in self._nodes})
            if not pending:
                return
            if time.monotonic() > end:
                late = next(node for node in self._nodes if node.name in pending)
                raise StackFailed(self._report(late, f"is not ready after {timeout:.0f} s ({pending[late.name]})"))
            time.sleep(POLL_SECONDS)

    def _pending(self) -> dict[str, str]:
        """By name, what those that are not ready are doing."""
        pending: dict[str, str] = {}
        for node in self._nodes:
            if not node.http_port:
                continue
            seen = node.readiness()
            if not seen.ready or (node.kind == "router" and not self._knows_all(seen)):
                pending[node.name] = seen.text
        return pending

    def _knows_all(self, router: Readiness) -> bool:
        """The router serves with the first decode pod that it finds; a stack is whole when it has found them all."""
        options = self.options
        return router.num_prefill >= options.prefill and router.num_decode >= options.decode + options.both

    def _report(self, node: Node, what: str) -> str:
        """The reason first: a traceback and the lines of an orderly end come after it."""
        tail = node.process.tail(LOG_LINES)
        reason = reason_in(tail)
        rest = f"\nthe end of {node.process.log}:\n{tail}" if tail != reason else ""
        return f"{node.name} {what}: {reason}{rest}"

    # Parts.

    @property
    def nodes(self) -> list[Node]:
        return list(self._nodes)

    def node(self, name: str) -> Node:
        """Raises KeyError."""
        for node in self._nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def prefill(self) -> list[Node]:
        return [node for node in self._nodes if node.kind == "prefill"]

    @property
    def decode(self) -> list[Node]:
        return [node for node in self._nodes if node.kind == "decode"]

    @property
    def both(self) -> list[Node]:
        return [node for node in self._nodes if node.kind == "both"]

    @property
    def pods(self) -> list[Node]:
        return [*self.prefill, *self.decode, *self.both]

    @property
    def kvstores(self) -> list[Node]:
        return [node for node in self._nodes if node.kind == "kvstore"]

    @property
    def router(self) -> Node:
        return self.node("router")

    @property
    def redis(self) -> Node:
        """Raises KeyError where the stack uses somebody else's."""
        return self.node("redis")

    @property
    def url(self) -> str:
        """Of the router's HTTP front."""
        return self.router.http_address

    @property
    def pod_token(self) -> str:
        """What the pods want to see; empty: nothing. Raises ValueError where its file cannot be read."""
        return read_token(Path(self.options.pod_auth_token_file)) if self.options.pod_auth_token_file else ""

    def pids(self) -> list[int]:
        return [pid for node in self._nodes for pid in node.pids()]

    def logs(self) -> str:
        """The end of every log: what a failed test shows."""
        return "\n".join(f"--- {node.name}\n{node.process.tail(LOG_LINES)}" for node in self._nodes)
