"""A stack whose pods want a token."""

from pathlib import Path

import httpx
import pytest

from kvrelay.cli.inspection import inspect
from kvrelay.cli.main import main
from kvrelay.cli.stack import Stack

pytestmark = pytest.mark.e2e


def test_up_and_status_with_a_token(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, run_dir = tmp_path / "token", ["--run-dir", str(tmp_path / "run")]
    file.write_text("open sesame\n")
    up = ["up", "--model", str(model_dir), "--engine", "fake", "--engine-option", "fake-num-blocks=77", "--free-ports"]
    try:
        assert main([*up, "--pod-auth-token-file", str(file), *run_dir]) == 0
        stack = Stack.attach(tmp_path / "run")
        assert stack is not None
        body = {"model": "smollm2", "prompt": "one two three " * 20, "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=20)
        assert answer.json()["usage"]["completion_tokens"] == 4
        capfd.readouterr()
        assert main(["status", *run_dir]) == 0
        assert capfd.readouterr().out.count(" 77 ") >= 2  # blocks, which only a caller with the token is told
        for node in stack.pods:
            assert inspect(node.grpc_address) is None
            assert inspect(node.grpc_address, stack.pod_token) is not None
            assert b"sesame" not in Path(f"/proc/{node.pid}/cmdline").read_bytes()
    finally:
        main(["down", *run_dir])
