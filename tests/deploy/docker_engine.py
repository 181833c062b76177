"""A Docker engine of a test's own: its data, sockets and processes are apart from any other on this machine, and it leaves the
machine's firewall and forwarding as they are. What it has built stays in its data folder, for the next time."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

START_SECONDS = 60.0
STOP_SECONDS = 60.0
TOOLS = (
    "run `make compose-tools` as root on Debian 12, or install docker.io (20.10 or newer) and mmdebstrap by other means"
)


class NoEngine(Exception):
    """Why no Docker engine can run here."""


def tool(name: str) -> str:
    """Its path. Raises NoEngine."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise NoEngine(f"{name} is not there: {TOOLS}")
    return path


class DockerEngine:
    """Runs within `with`. `environ` is for clients that are to speak with it."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        # The classic builder: Debian's engine comes without BuildKit's client.
        return {**os.environ, "DOCKER_HOST": f"unix://{self._socket}", "DOCKER_BUILDKIT": "0"}

    def docker(self, *words: str | Path, stdin: IO[bytes] | None = None, seconds: float = 120.0) -> str:
        """What the command printed. Raises RuntimeError with its last words where it fails."""
        return run([tool("docker"), *map(str, words)], self.environ, stdin=stdin, seconds=seconds)

    def __enter__(self) -> Self:
        """Raises NoEngine."""
        if os.geteuid() != 0:
            raise NoEngine("a Docker engine needs root")
        dockerd = tool("dockerd")
        self._data.mkdir(parents=True, exist_ok=True)
        # dockerd holds it too, so that what outlives a killed test keeps others away.
        self._lock = (self._data.parent / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise NoEngine(f"another engine uses {self._data}") from error
        # A socket's path has about a hundred characters at most.
        self._run_dir = Path(tempfile.mkdtemp(prefix="kvrelay-docker-"))
        self._socket = self._run_dir / "docker.sock"
        self._log = self._run_dir / "dockerd.log"
        (self._run_dir / "daemon.json").write_text("{}")
        options = {
            "config-file": self._run_dir / "daemon.json",
            "data-root": self._data,
            "exec-root": self._run_dir / "exec",
            "pidfile": self._run_dir / "dockerd.pid",
            "host": f"unix://{self._socket}",
            "bridge": "none",
            "iptables": "false",
            "ip6tables": "false",
            "ip-forward": "false",
            "ip-masq": "false",
        }
        with self._log.open("wb") as log:
            command = [dockerd, *(f"--{name}={value}" for name, value in options.items())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[self._lock.fileno()]
            )
        try:
            self._await_start()
        except NoEngine:
            self.__exit__(None, None, None)
            raise
        return self

    def _await_start(self) -> None:
        assert self._process is not None
        end = time.monotonic() + START_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > end:
                words = self._log.read_text(errors="replace")[-2000:]
                raise NoEngine(f"dockerd does not start on this machine; its last words:\n{words}")
            try:
                self.docker("info", seconds=10)
                return
            except RuntimeError:
                time.sleep(0.2)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends containers that are left as well."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None
        for mount in reversed(self._all_mounts()):
            run(["umount", "--lazy", mount], dict(os.environ))
        shutil.rmtree(self._run_dir)
        self._lock.close()

    def mounts(self) -> list[str]:
        """Of containers and volumes."""
        # What dockerd keeps for itself as long as it runs: its data folder, and the host's network for builds.
        own = {str(self._data), str(self._run_dir / "exec" / "netns" / "default")}
        return [mount for mount in self._all_mounts() if mount not in own]

    def _all_mounts(self) -> list[str]:
        """In the order in which they were made."""
        places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        return [place for place in places if f"{place}/".startswith((f"{self._data}/", f"{self._run_dir}/"))]

    def processes(self) -> list[str]:
        """Command lines of what runs for this engine, dockerd and containerd apart: shims of containers, proxies of ports."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended
                continue
            name = Path(words[0]).name
            shim = name.startswith("containerd-shim") and any(str(self._run_dir) in word for word in words)
            if shim or (name == "docker-proxy" and self._parent(path) == self._pid):
                found.append(" ".join(words))
        return found

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @staticmethod
    def _parent(cmdline: Path) -> int:
        try:
            return int((cmdline.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            return 0


def run(command: list[str], environ: dict[str, str], *, stdin: IO[bytes] | None = None, seconds: float = 120.0) -> str:
    """What it printed. Raises RuntimeError with its last words where it fails or takes longer."""
    try:
        done = subprocess.run(
            command, env=environ, stdin=stdin or subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = b"".join(part or b"" for part in (late.stdout, late.stderr)).decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)}: not done after {seconds:.0f} s\n{said[-4000:]}") from late
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{said[-4000:]}")
    return done.stdout.decode(errors="replace")
