"""A stack of real processes around fake engines, and a folder with what the documentation takes for granted."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from tests.docs.checks import BIN

TRACE = [{"timestamp": 100 * i, "input_length": 600, "output_length": 20, "hash_ids": [1, i + 2]} for i in range(50)]


@dataclass(frozen=True)
class Bench:
    stack: Stack
    folder: Path

    def run(self, line: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "CURL_HOME": str(self.folder), "KEY": "key", "no_proxy": "*"}
        return subprocess.run(
            line,
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def here(self, text: str) -> str:
        """But for the ports, which others may hold."""
        text = re.sub(r"\bkvrelay (chat|complete)\b", rf"kvrelay \1 --url {self.stack.url}", text)
        nodes = {"8000": self.stack.router, "9101": self.stack.prefill[0], "9201": self.stack.decode[0]}
        nodes["9301"] = self.stack.kvstores[0]
        for port, node in nodes.items():
            text = text.replace(f"localhost:{port}", f"127.0.0.1:{node.http_port}")
        return text


@pytest.fixture(scope="module")
def bench(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("reader")
    furnish(folder, model_dir)
    options = StackOptions(model=model_dir, engine="fake", kvstore=1, free_ports=True)
    with Stack(options, folder / "var" / "run") as stack:
        yield Bench(stack, folder)


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path, model_dir)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def furnish(folder: Path, model_dir: Path) -> None:
    """With what stands in the documentation for files of the reader's."""
    (folder / "var" / "models").mkdir(parents=True)
    for name in ("DIR", "var/models/smollm2", "var/models/Qwen3-0.6B"):
        (folder / name).symlink_to(model_dir)
    (folder / "TRACE").write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    for name in ("id", "key"):
        (folder / name).write_text("secret")
    (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")
