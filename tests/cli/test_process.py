"""Detached processes: theirs end, and only theirs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cli.process import Process, launch
from kvrelay.cli.stack import reason_in

pytestmark = pytest.mark.integration

SLEEPER = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
DEAF = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()",
]
PARENT = [
    sys.executable,
    "-c",
    "import signal, subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import signal; print(\"child\", flush=True); signal.pause()'],"
    " start_new_session=True)\n"
    "signal.pause()",
]


def wait_for(process: Process, text: str) -> None:
    """Blocks until `text` stands in the log, by following it as `tail` does."""
    follower = subprocess.Popen(["tail", "-n", "+1", "-F", str(process.log)], stdout=subprocess.PIPE, text=True)
    with follower:
        assert follower.stdout is not None
        for line in follower.stdout:
            if text in line:
                break
        follower.kill()


def test_a_process_is_detached_and_logs(tmp_path: Path) -> None:
    process = launch("one", SLEEPER, {}, tmp_path / "one.log")
    wait_for(process, "up")
    assert process.alive
    assert os.getsid(process.pid) == process.pid
    process.stop(5)
    assert not process.alive
    assert process.tail() == "up"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("", "it has written nothing"),
        ("starting\nkvrelay-decode: option --model is required", "kvrelay-decode: option --model is required"),
        (
            "2026-12-01T15:42:54.300 ERROR kvrelay-engine __main__: cannot start\nTraceback (most recent call last):\n  File\n"
            "2026-12-01T15:42:54.393 ERROR kvrelay-decode kvrelay.engine.pod.server: the pod cannot go on: no memory: 12\n"
            "2026-12-01T15:42:55.648 INFO kvrelay-decode uvicorn.error: Shutting down",
            "the pod cannot go on: no memory: 12",
        ),
    ],
)
def test_the_reason_in_a_log(log: str, reason: str) -> None:
    assert reason_in(log) == reason


def test_stop_is_bounded_for_one_that_ignores_sigterm(tmp_path: Path) -> None:
    process = launch("deaf", DEAF, {}, tmp_path / "deaf.log")
    wait_for(process, "up")
    process.stop(0.2)
    assert not process.alive


def test_children_of_a_killed_process_end_with_it(tmp_path: Path) -> None:
    process = launch("parent", PARENT, {}, tmp_path / "parent.log")
    wait_for(process, "child")
    members = process.members()
    assert len(members) == 2
    process.signal(signal.SIGKILL)
    process.kill()
    assert process.members() == []
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in members)


def test_a_stranger_of_the_same_pid_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as stranger:
        claimed = Process(name="x", pid=stranger.pid, start_time=1, launch_id="none", log=tmp_path / "x.log")
        claimed.stop(0.1)
        assert not claimed.alive
        assert stranger.poll() is None
        stranger.kill()


def test_variables_of_services_are_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_BLOCK_SIZE", "16")
    monkeypatch.setenv("OTHER", "kept")
    show = [sys.executable, "-c", "import os; print(os.environ.get('KVRELAY_BLOCK_SIZE'), os.environ['OTHER'])"]
    process = launch("env", show, {}, tmp_path / "env.log")
    assert process.wait(10)
    assert process.tail() == "None kept"


def test_tail_of_a_long_log_is_its_end(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    process = Process(name="x", pid=1, start_time=1, launch_id="none", log=log)
    assert process.tail(2) == "line 9998\nline 9999"
