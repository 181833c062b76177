"""What can be said of images and compose file without an engine: their parts do what they say, and name what the code has."""

import http.server
import json
import re
import shlex
import stat
import string
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.docker.needs import needs
from deploy.docker.setup import make_keys
from kvrelay.common.settings import ServiceSettings, parse
from kvrelay.decode.main import DecodeSettings
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.prefill.main import PrefillSettings
from kvrelay.router.settings import RouterSettings
from tests.deploy.docker_engine import DockerEngine, NoEngine

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
HEALTHCHECK = ROOT / "deploy/docker/healthcheck.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "prefill-gpu": PrefillSettings,
    "decode-gpu": DecodeSettings,
    "kvstore": KvStoreSettings,
    "router": RouterSettings,
}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """With the defaults of `.env` in place."""
    folder = ROOT / "deploy/compose"
    lines = (folder / ".env").read_text().splitlines()
    values = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    text = (folder / "compose.yaml").read_text()
    text = re.sub(r"\$\{(\w+):-\}", "", text)
    found: dict[str, Any] = yaml.safe_load(string.Template(text).substitute(values))["services"]
    return found


# The parts.


def test_keys_are_made_once_and_for_their_user_alone(tmp_path: Path) -> None:
    for folder in ("api", "pod", "s3"):
        (tmp_path / folder).mkdir()
    make_keys(tmp_path)
    made = {file: file.read_text() for file in tmp_path.glob("*/*")}
    assert sorted(str(file.relative_to(tmp_path)) for file in made) == [
        "api/keys",
        "pod/token",
        "s3/id",
        "s3/secret",
        "s3/users.json",
    ]
    assert {stat.S_IMODE(file.stat().st_mode) for file in made} == {0o400}
    [user] = json.loads(made[tmp_path / "s3/users.json"])["identities"]
    pair = {"accessKey": made[tmp_path / "s3/id"], "secretKey": made[tmp_path / "s3/secret"]}
    assert user["credentials"] == [pair]
    assert len(set(made.values())) == 5
    assert min(map(len, made.values())) >= 20

    (tmp_path / "pod/token").unlink()
    make_keys(tmp_path)
    again = {file: file.read_text() for file in tmp_path.glob("*/*")}
    assert [file for file in made if again[file] != made[file]] == [tmp_path / "pod/token"]


class _Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def _health(port: int, path: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-SE", str(HEALTHCHECK), str(port), path],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.returncode, done.stderr


def test_the_health_check_says_what_the_page_says(port: int) -> None:
    assert _health(port, "/healthz") == (0, "")
    assert _health(port, "/readyz") == (1, "/readyz: 503\n")


def test_the_health_check_fails_where_nothing_listens(port: int) -> None:
    code, said = _health(1, "/healthz")
    assert code == 1
    assert "refused" in said


def test_an_image_installs_what_the_project_declares() -> None:
    extras = {word for line in re.findall(r"install\.sh ([a-z\" $-]+)", DOCKERFILE) for word in shlex.split(line)} - {
        "$ucx"
    }
    assert {"router", "kvstore", "engine", "ucx"} <= extras
    found = needs(ROOT / "pyproject.toml", sorted(extras))
    assert set(PROJECT["dependencies"]) < set(found)
    with pytest.raises(KeyError):
        needs(ROOT / "pyproject.toml", ["no-such-extra"])


def test_what_the_dockerfile_runs_is_shell() -> None:
    joined = DOCKERFILE.replace("\\\n", " ")
    commands = [line.removeprefix("RUN ") for line in joined.splitlines() if line.startswith("RUN ")]
    assert len(commands) > 10
    for command in commands:
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


# Where there is no engine.


def test_without_docker_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with (
        pytest.raises(NoEngine, match=r"dockerd is not there: run `make compose-tools`"),
        DockerEngine(tmp_path / "data"),
    ):
        pass


def test_where_docker_does_not_start_its_last_words_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "dockerd"
    fake.write_text("#!/bin/sh\necho 'no cgroups on this machine' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name, path=None: str(fake))
    with pytest.raises(NoEngine, match="no cgroups on this machine"), DockerEngine(tmp_path / "data"):
        pass


# The names.


def test_entrypoints_are_commands_of_the_project() -> None:
    found = re.findall(r'^ENTRYPOINT \["([^"]+)"\]', DOCKERFILE, re.MULTILINE)
    assert set(found) == set(PROJECT["scripts"])


def test_the_compose_file_builds_targets_that_there_are(services: dict[str, Any]) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", DOCKERFILE, re.MULTILINE))
    built = {service["build"]["target"]: service["image"] for service in services.values() if "build" in service}
    assert {"router", "kvstore", "prefill", "decode", "tools", "prefill-gpu", "decode-gpu"} == set(built)
    assert set(built) <= targets
    assert all(image == f"kvrelay/{target}:latest" for target, image in built.items())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_service_starts_with_the_options_of_the_compose_file(
    services: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """Its own code reads them: an unknown variable, a bad tier or a port that is another's would be refused, or seen here."""
    (tmp_path / "tokenizer.json").write_text("{}")
    for file in ("token", "id", "secret"):
        (tmp_path / file).write_text(f"some-{file}")
    environ = {key: str(value) for key, value in services[name]["environment"].items() if key.startswith("KVRELAY_")}
    in_container = {"/models/smollm2": tmp_path}
    for folder, file in (("pod", "token"), ("s3", "id"), ("s3", "secret")):
        in_container[f"/run/kvrelay/{folder}/{file}"] = tmp_path / file
    for path, here in in_container.items():
        environ = {key: value.replace(path, str(here)) for key, value in environ.items()}
    settings = parse(SETTINGS[name], [], {**environ, "KVRELAY_HOST": "0.0.0.0"}, f"kvrelay-{name}")

    http_port = getattr(settings, "listen_http", None) or getattr(settings, "http_port", None)
    assert services[name]["labels"]["prometheus.io/port"] == str(http_port)
    assert services[name]["healthcheck"]["test"][-2:] == [str(http_port), "/readyz"]
    target = DOCKERFILE.split(f" AS {services[name]['build']['target']}\n")[1].split("\nFROM ")[0]
    assert f'"{http_port}", "/healthz"' in target
    exposed = re.search(r"^EXPOSE (.+)$", target, re.MULTILINE)
    assert exposed is not None
    assert str(http_port) in exposed[1].split()


def test_a_service_has_longer_to_stop_than_it_takes_to_drain(services: dict[str, Any]) -> None:
    def seconds(name: str) -> float:
        return float(services[name]["stop_grace_period"].removesuffix("s"))

    for name in ("prefill", "decode", "prefill-gpu", "decode-gpu", "kvstore"):
        assert float(services[name]["environment"]["KVRELAY_GRACE_SECONDS"]) + 5 <= seconds(name)
    assert int(services["router"]["environment"]["KVRELAY_DRAIN_MS"]) / 1000 + 5 <= seconds("router")
