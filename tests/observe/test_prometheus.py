"""A real Prometheus scrapes a stack by the committed configuration: each panel shows something, and alerts fire when they should."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # JSON

import httpx
import pytest

from kvrelay.cli.ports import free_ports
from kvrelay.cli.stack import Stack
from tests.observe.deployed import ALERTS, CONFIG, config_for, panel_queries, serve_a_little
from tests.waiting import eventually

pytestmark = pytest.mark.e2e

WINDOW = "10s"
"""What Grafana would put in place of $__rate_interval."""


def tool(name: str) -> str:
    """Of Debian's package prometheus, which CI brings along where it can."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}: it is in Debian's package prometheus")
    return found


class Prometheus:
    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=10)

    def get(self, path: str, **params: str) -> Any:
        """None: it does not answer yet. A query that is wrong fails the test."""
        try:
            answer = self._client.get(path, params=params)
        except httpx.TransportError:
            return None
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["data"] if answer.status_code == 200 else None

    def rules(self) -> list[dict[str, Any]]:
        found = self.get("/api/v1/rules")
        return [rule for group in found["groups"] for rule in group["rules"]] if found else []

    def close(self) -> None:
        self._client.close()


@pytest.fixture(scope="module")
def prometheus(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    binary = tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    nodes = {"router": [stack.router], "prefill": stack.prefill, "decode": stack.decode, "kvstore": stack.kvstores}
    targets = {f"kvrelay-{kind}": [f"127.0.0.1:{node.http_port}" for node in found] for kind, found in nodes.items()}
    (folder / "prometheus.yaml").write_text(config_for(targets))
    [port] = free_ports(1)
    line = [binary, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data"]
    line += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        eventually(lambda: bool(server.rules()), lambda: f"it evaluates rules: {(folder / 'log').read_text()}")
        yield server
    finally:
        server.close()
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize(("kind", "file"), [("config", CONFIG), ("rules", ALERTS)])
def test_promtool_finds_no_fault(kind: str, file: Path) -> None:
    done = subprocess.run([tool("promtool"), "check", kind, file.name], cwd=file.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_panel_shows_something(prometheus: Prometheus, stack: Stack) -> None:
    left = {name: query.replace("$__rate_interval", WINDOW) for name, query in panel_queries().items()}
    assert left

    def all_shown() -> bool:
        serve_a_little(stack)
        for name, query in list(left.items()):
            found = prometheus.get("/api/v1/query", query=query)
            if found and any(sample["value"][1] != "NaN" for sample in found["result"]):
                del left[name]
        return not left

    eventually(all_shown, lambda: f"shown are not {sorted(left)}", seconds=40)


def test_alerts_are_silent_until_something_is_wrong(prometheus: Prometheus, stack: Stack) -> None:
    def evaluated() -> bool:
        return all(rule["health"] == "ok" for rule in prometheus.rules())

    def raised() -> set[str]:
        return {rule["name"] for rule in prometheus.rules() if rule["state"] != "inactive"}

    eventually(evaluated, lambda: f"all rules are evaluated: {prometheus.rules()}")
    assert raised() == set()
    stack.decode[0].kill()
    expected = {"KvrelayProcessDown", "KvrelayNoDecodePod"}
    eventually(lambda: raised() >= expected, lambda: f"{expected} are raised, and not {raised()}")
