"""Stacks of real processes around fake engines: they start, answer, lose pods, and leave nothing."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvrelay.cli.client import Client, Timing
from kvrelay.cli.inspection import inspect
from kvrelay.cli.main import main
from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack, StackFailed

pytestmark = pytest.mark.e2e

BODY = {"model": "smollm2", "prompt": "one two three " * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def fake(model_dir: Path, **changes: object) -> StackOptions:
    options = StackOptions(
        model=model_dir, engine="fake", free_ports=True, router_options={"local-prefill-tokens": "0"}
    )
    return replace(options, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(fake(model_dir, prefill=2, decode=2), tmp_path_factory.mktemp("run")) as running:
        yield running


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)


def ask(stack: Stack) -> Timing:
    timing = Timing()
    with Client(stack.url) as client:
        assert "".join(client.stream("/v1/completions", BODY, timing))
    return timing


def test_a_started_stack_is_ready_and_answers(stack: Stack) -> None:
    assert stack.ready
    assert [node.name for node in stack.pods] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    for node in (*stack.pods, stack.router):
        assert httpx.get(f"{node.http_address}/readyz").status_code == 200
    timing = ask(stack)
    assert timing.usage.completion_tokens == 8
    assert timing.finish_reason == "length"
    assert timing.first is not None
    assert 0 < timing.first <= timing.last


def test_pods_report_what_they_moved(stack: Stack) -> None:
    ask(stack)
    reports = [report for node in stack.pods if (report := inspect(node.grpc_address)) is not None]
    assert [report.role for report in reports] == ["prefill", "prefill", "decode", "decode"]
    assert sum(report.payload_bytes_sent for report in reports) > 0
    assert all(report.violations == () for report in reports)


def test_a_killed_pod_is_dead_and_comes_back(stack: Stack) -> None:
    node = stack.prefill[0]
    former = node.pid
    node.kill()
    assert not node.alive
    assert not stack.ready
    assert inspect(node.grpc_address) is None
    assert ask(stack).usage.completion_tokens == 8
    node.restart()
    stack.wait_ready(30)
    assert node.pid != former
    assert node.process.members()


def test_a_paused_pod_resumes(stack: Stack) -> None:
    node = stack.decode[1]
    node.pause()
    end = time.monotonic() + 5
    # A process that runs at this moment on another core stops a little after the signal was sent.
    while Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end, "the pod was not paused"
    node.resume()
    stack.wait_ready(30)


def test_another_process_finds_and_ends_the_stack(model_dir: Path, tmp_path: Path) -> None:
    started = Stack(fake(model_dir, prefill=0, decode=0, both=1), tmp_path)
    started.start()
    pids = started.pids()
    assert len(pids) == 3
    found = Stack.attach(tmp_path)
    assert found is not None
    assert found.url == started.url
    assert found.options == started.options
    found.stop()
    assert gone(pids)
    assert Stack.attach(tmp_path) is None
    started.stop()


def test_a_pod_that_cannot_start_ends_all_and_says_why(model_dir: Path, tmp_path: Path) -> None:
    options = fake(model_dir, pod_options={"decode-0": {"block-size": "17"}})
    stack = Stack(options, tmp_path)
    with pytest.raises(StackFailed) as failed:
        stack.start(30)
    why = "kvrelay-decode: bad options: block_size must be a multiple of 16, not 17"
    assert str(failed.value) == f"decode-0 ended while the stack started: {why}"
    assert stack.pids() == []
    assert Stack.attach(tmp_path) is None


def test_environment_and_options_reach_one_pod(model_dir: Path, tmp_path: Path) -> None:
    options = fake(
        model_dir, pod_options={"decode-0": {"fake-num-blocks": "77"}}, pod_env={"decode-0": {"MARK": "here"}}
    )
    with Stack(options, tmp_path) as stack:
        report = inspect(stack.decode[0].grpc_address)
        assert report is not None
        assert report.num_blocks == 77
        environ = Path(f"/proc/{stack.decode[0].pid}/environ").read_bytes().split(b"\0")
        assert b"MARK=here" in environ
        assert b"MARK=here" not in Path(f"/proc/{stack.prefill[0].pid}/environ").read_bytes().split(b"\0")


def test_up_twice_and_down_twice(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = ["--run-dir", str(tmp_path)]
    up = ["up", "--model", str(model_dir), "--engine", "fake", "--free-ports", *run_dir]
    assert main(up) == 0
    assert "ready" in capfd.readouterr().err
    running = Stack.attach(tmp_path)
    assert running is not None
    pids = running.pids()
    try:
        assert main(up) == 0
        assert "up already" in capfd.readouterr().err
        assert running.pids() == pids
        assert main([*up, "--decode", "2"]) == 1
        assert "other options" in capfd.readouterr().err
        assert main(["status", *run_dir]) == 0
        assert "decode-0" in capfd.readouterr().out
        assert main(["status", "--json", *run_dir]) == 0
        told = json.loads(capfd.readouterr().out)
        assert (told["ready"], told["url"]) == (True, running.url)
        by_name = {process["name"]: process for process in told["processes"]}
        assert {name: process["pid"] for name, process in by_name.items()} == {
            node.name: node.pid for node in running.nodes
        }
        assert by_name["decode-0"]["state"] == "ready"
        assert by_name["decode-0"]["pod"]["role"] == "decode"
        assert by_name["router"]["pod"] is None
        assert [store["store"] for store in told["kvstores"]] == ["kvstore-0"]
        running.router.process.signal(signal.SIGKILL)
        assert running.router.process.wait(10)
        assert main(["status", "--json", *run_dir]) == 1
        told = json.loads(capfd.readouterr().out)
        assert not told["ready"]
        assert {process["name"]: process["state"] for process in told["processes"]}["router"] == "dead"
        assert main(up) == 1
        assert "not ready" in capfd.readouterr().err
    finally:
        assert main(["down", *run_dir]) == 0
    assert gone(pids)
    assert main(["down", *run_dir]) == 0
    assert "nothing is up" in capfd.readouterr().err
    assert main(["status", "--json", *run_dir]) == 1
    assert json.loads(capfd.readouterr().out) == {"ready": False, "url": "", "processes": [], "kvstores": []}


def test_kv_stores_beside_the_pods(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiers = f"[{{tier: cpu, bytes: 1MiB}}, {{tier: file, bytes: 1MiB, directory: {tmp_path}/{{name}}}}]"
    run_dir = ["--run-dir", str(tmp_path)]
    with Stack(fake(model_dir, kvstore=2, kvstore_tiers=tiers), tmp_path) as stack:
        assert [node.name for node in stack.kvstores] == ["kvstore-0", "kvstore-1"]
        assert ask(stack).usage.completion_tokens == 8
        assert main(["status", *run_dir]) == 0
        shown = capfd.readouterr().out
        assert all(text in shown for text in ("kvstore-0", "kvstore-1", "1.0 MiB", "healthy"))
        assert main(["kv", "stat", "--json", *run_dir]) == 0
        assert [report["store"] for report in json.loads(capfd.readouterr().out)] == ["kvstore-0", "kvstore-1"]
        stack.kvstores[0].kill()
        assert main(["status", *run_dir]) == 1
        shown = capfd.readouterr()
        assert "dead" in shown.out
        assert "the KV store at" in shown.err
        pids = stack.pids()
    assert gone(pids)


def test_terminal_commands(stack: Stack, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "hello", "--url", stack.url, "--max-tokens", "5"]) == 0
    chat = capfd.readouterr()
    assert chat.out.strip()
    assert "5 out" in chat.err
    assert main(["complete", "hello there", "--url", stack.url, "--max-tokens", "5"]) == 0
    assert capfd.readouterr().out.strip()
    assert main(["complete", "hello", "--url", stack.url, "--model", "other"]) == 1
    assert "other" in capfd.readouterr().err
    assert main(["complete", "hello", "--url", "127.0.0.1:1"]) == 1
    shown = capfd.readouterr()
    assert "http://127.0.0.1:1 does not answer" in shown.err
    assert shown.out == ""


def test_demo(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model", str(model_dir), "--engine", "fake", "--run-dir", str(tmp_path)]
    assert main([*arguments, "--prompt", "Why?\n[bold]$x"]) == 0
    shown = capfd.readouterr().out
    assert "Why?\n[bold]$x" in shown
    assert "prefill-0" in shown
    assert "KV store" in shown
    assert "bytes" in shown
    assert "time to first token" in shown
    assert Stack.attach(tmp_path) is None
