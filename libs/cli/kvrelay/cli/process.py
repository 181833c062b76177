"""One detached process: started in a session of its own, known by pid and start time, with its output in a file."""

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCH_VARIABLE = "STACK_LAUNCH_ID"
POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Process:
    """A pid alone may come to name a stranger; with the start time it cannot. Its children, in whatever session, are those
    that carry the launch's random id in their environment.
    """

    name: str
    pid: int
    start_time: int
    """In clock ticks since boot, as in /proc/PID/stat."""
    launch_id: str
    log: Path

    @property
    def alive(self) -> bool:
        _reap(self.pid)
        stat = _stat(self.pid)
        return stat is not None and stat.start_time == self.start_time and stat.state != "Z"

    def members(self) -> list[int]:
        """The pids of the process and of the children that it started, living ones."""
        found = {pid for pid in _all_pids() if _carries(pid, self.launch_id)}
        # Some servers overwrite their environment with a title: the process itself is known without it.
        return sorted(found | {self.pid}) if self.alive else sorted(found)

    def signal(self, number: int) -> None:
        """To the process itself; nothing where it is gone."""
        if self.alive:
            _kill(self.pid, number)

    def signal_all(self, number: int) -> None:
        """To the process and its children."""
        for pid in self.members():
            _kill(pid, number)

    def wait(self, timeout: float) -> bool:
        """Whether the process ended in time, with all its children."""
        end = time.monotonic() + timeout
        while self.alive or self.members():
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def kill(self, timeout: float = 10.0) -> None:
        """SIGKILL to the process and its children, and their end. Raises TimeoutError."""
        end = time.monotonic() + timeout
        while not self.wait(0):
            if time.monotonic() >= end:
                raise TimeoutError(f"{self.name} (pid {self.pid}) outlived SIGKILL")
            self.signal_all(signal.SIGKILL)
            self.wait(0.1)

    def stop(self, timeout: float) -> None:
        """SIGTERM, a bounded wait, then SIGKILL to what is left."""
        self.signal(signal.SIGTERM)
        if not self.wait(timeout):
            self.kill()

    def tail(self, lines: int = 15) -> str:
        """The last lines of the output."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def launch(name: str, command: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Starts `command`, detached, its output appended to `log`. Raises OSError.

    KVRELAY_* variables of this process are not inherited: services refuse each other's, and the command line says it all.
    """
    launch_id = secrets.token_hex(16)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            env={**inherited, **env, LAUNCH_VARIABLE: launch_id},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stat = _stat(child.pid)
    assert stat is not None, "an unreaped child has an entry in /proc"
    # The object would warn that its child still runs when it is collected: the pid and start time stand for it from here.
    child.returncode = 0
    return Process(name=name, pid=child.pid, start_time=stat.start_time, launch_id=launch_id, log=log)


@dataclass(frozen=True)
class _Stat:
    state: str
    start_time: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may hold anything; fields count from behind it.
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(state=fields[0], start_time=int(fields[19]))


def _all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _carries(pid: int, launch_id: str) -> bool:
    stat = _stat(pid)
    if stat is None or stat.state == "Z":
        return False
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return f"{LAUNCH_VARIABLE}={launch_id}".encode() in environ.split(b"\0")


def _reap(pid: int) -> None:
    """A child of this very process stays a zombie until somebody waits for it."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
