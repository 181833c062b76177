"""A Redis that a stack is given is looked for before anything starts; lines in a pipe stay whole."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvrelay.cli.main import main
from kvrelay.cli.options import StackOptions
from kvrelay.cli.probe import answers
from kvrelay.cli.stack import Stack, StackFailed
from tests.fixtures_redis import RedisServer

pytestmark = pytest.mark.integration


def test_a_redis_that_answers(redis_server: RedisServer) -> None:
    answers(redis_server.url)


def test_a_stack_without_its_redis_fails_at_once(tmp_path: Path) -> None:
    options = StackOptions(
        model=tmp_path, engine="fake", free_ports=True, redis_url="redis://user:secret@127.0.0.1:1/0"
    )
    started = time.monotonic()
    with pytest.raises(StackFailed, match=r"Redis at 127\.0\.0\.1:1 does not answer") as failed:
        Stack(options, tmp_path / "run").start()
    assert time.monotonic() - started < 10
    assert "secret" not in str(failed.value)
    assert not list((tmp_path / "run").glob("*.log"))


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "redis://127.0.0.1:port/0"])
def test_no_url_of_a_redis(url: str) -> None:
    with pytest.raises((ConnectionError, ValueError)):
        answers(url)


def test_a_message_in_a_pipe_is_one_line(tmp_path: Path) -> None:
    model = tmp_path / ("a-long-name-of-a-directory-" * 4)
    line = [sys.executable, "-m", "kvrelay.cli.main", "up", "--model", str(model), "--free-ports"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert f"kvrelay: {model} is no directory; `kvrelay model` makes the bundled one\n" in done.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_name_on_a_hub_is_not_taken_for_a_directory(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "--model", "meta-llama/Llama-3.2-1B"]) == 1
    said = capfd.readouterr().err
    assert "hf download meta-llama/Llama-3.2-1B --local-dir var/models/Llama-3.2-1B" in said
    (tmp_path / "meta-llama" / "Llama-3.2-1B").mkdir(parents=True)
    assert main([command, "--model", "meta-llama/Llama-3.2-1B"]) == 1
    assert "has no config.json" in capfd.readouterr().err
