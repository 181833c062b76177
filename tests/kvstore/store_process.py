"""A store as a process of its own, which a test may kill, stop and start again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from kvrelay.cli.ports import free_ports
from tests.server_process import ServerProcess

START_SECONDS = 30.0


class StoreProcess(ServerProcess):
    """On ports that it keeps over restarts. Its files, its arena and its log are in `folder`."""

    def __init__(self, folder: Path, *options: str, name: str = "store") -> None:
        self.folder = folder
        self.grpc_port, self.http_port = free_ports(2)
        self.address = f"127.0.0.1:{self.grpc_port}"
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.log = folder / f"{name}.log"
        ports = ("--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port))
        self._options = (*ports, "--node-id", name, "--arena-directory", str(folder), *options)

    def start(self) -> None:
        """Returns when it is ready."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "REDIS_URL"))}
        # Connections within this machine only.
        kept |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        command = [sys.executable, "-m", "kvrelay.kvstore.main", *self._options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=kept, stdin=subprocess.DEVNULL, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self.ready:
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"not ready: {self.log.read_text()[-2000:]}"
            time.sleep(0.02)

    @property
    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2, verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """The exit code."""
        assert self._process is not None
        self.send_signal(number)
        code = self._process.wait(20)
        self._process = None
        return code
