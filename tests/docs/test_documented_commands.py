"""Each command of README and docs/*.md is run as it is printed, or else what can be known of it is checked: see `checks`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import yaml
from google.protobuf import json_format

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from kvrelay.common.settings import BadOption
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from tests.docs import checks
from tests.docs.documents import PAGES, ROOT, Block, Documented, blocks, documented, simple

COMMANDS = documented()
RUN_PROGRAMS = ("curl", "grpcurl", "grep", "openssl")
RUN_SUBCOMMANDS = ("status", "kv", "chat", "complete", "plan")
TRACE = [{"timestamp": 100 * i, "input_length": 600, "output_length": 20, "hash_ids": [1, i + 2]} for i in range(50)]


def is_run(words: list[str]) -> bool:
    return words[0] in RUN_PROGRAMS or (words[0] == "kvrelay" and words[1] in RUN_SUBCOMMANDS)


def parts(command: Documented) -> list[str]:
    """As the shell would take them one after the other."""
    return command.text.split(" && ")


def place(value: object) -> str:
    return value.place if isinstance(value, Documented) else str(value)


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With what stands in the documentation for a file of the reader's."""
    furnish(tmp_path, model_dir)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def furnish(folder: Path, model_dir: Path) -> None:
    (folder / "var" / "models").mkdir(parents=True)
    (folder / "DIR").symlink_to(model_dir)
    for name in ("smollm2", "Qwen3-0.6B"):
        (folder / "var" / "models" / name).symlink_to(model_dir)
    (folder / "TRACE").write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    for name in ("id", "key"):
        (folder / name).write_text("secret")
    (folder / ".curlrc").write_text("silent\nshow-error\nfail-with-body\n")


# What is not run.


@pytest.mark.integration
@pytest.mark.parametrize("command", COMMANDS, ids=place)
def test_what_is_not_run_is_right_as_far_as_can_be_known(command: Documented, folder: Path) -> None:
    for part in parts(command):
        for words in simple(part):
            if not is_run(words):
                checks.check(words)


@pytest.mark.integration
def test_modules_take_their_options() -> None:
    words = [each for command in COMMANDS for part in parts(command) for each in simple(part)]
    lines = [" ".join(map(json.dumps, each[2:])) for each in words if each[0] == "python"]
    for each in words:
        if each[0] == "make":
            lines += [line.removeprefix("python -m ") for line in checks.dry_run(each) if line.startswith("python")]
    assert len(lines) > 20
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.parse_modules"],
        input="\n".join(lines),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.unit
def test_every_block_says_what_it_is_and_is_that() -> None:
    found = blocks()
    assert sum(page.read_text().count("\n```") for page in PAGES) == 2 * len(found), "a fence that is not closed"
    for block in found:
        where = f"{block.page}:{block.line}"
        assert block.language in ("sh", "python", "json", "yaml", "text"), f"{where}: name the block's language"
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            yaml.safe_load(block.text)


@pytest.mark.unit
def test_links_lead_somewhere() -> None:
    seen = 0
    for page in (*PAGES, *(ROOT / "docs" / "design").glob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text()):
            seen += 1
            assert ":" in target or (page.parent / target).exists(), f"{page.name}: {target}"
    assert seen > 30


@pytest.mark.integration
@pytest.mark.parametrize(
    "command",
    [
        "frobnicate",
        "make nothing",
        "make bench-router && make up ARGS='--modle DIR'",
        "make up ARGS='--router-option nonsense=1'",
        "kvrelay up --engine-option block-size=17",
        "kvrelay upp",
        "kvrelay-router --polcy session",
        "docker compose -f deploy/compose/compose.yaml up --buildd",
        "docker compose -f deploy/compose/compose.yaml exec nobody true",
        "docker build -f deploy/docker/Dockerfile --target nothing .",
        "kubectl apply -f deploy/k8s/nothing.yaml",
        "kubectl apply -k deploy/k8s/overlays/nothing",
        "kubectl -n kvrelay rollout status deployment/x --timeoutt=1s",
        "python -m http.server",
    ],
)
def test_what_is_wrong_is_found(command: str, folder: Path) -> None:
    with pytest.raises((AssertionError, BadOption, SystemExit, FileNotFoundError)):
        check_all(command)


def check_all(command: str) -> None:
    for words in simple(command):
        checks.check(words)


# What is run, on one stack.


@dataclass(frozen=True)
class Bench:
    stack: Stack
    folder: Path

    def run(self, line: list[str]) -> "subprocess.CompletedProcess[str]":
        path = f"{checks.BIN}{os.pathsep}{os.environ['PATH']}"
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


def ran() -> list[tuple[Documented, str]]:
    return [
        (command, part)
        for command in COMMANDS
        for part in parts(command)
        if (words := simple(part)) and is_run(words[0])
    ]


@pytest.mark.e2e
@pytest.mark.parametrize(("command", "part"), ran(), ids=place)
def test_runs_as_printed(command: Documented, part: str, bench: Bench) -> None:
    [words] = simple(part)
    if words[0] == "grpcurl":
        generate(bench, words)
        return
    done = bench.run(["bash", "-euo", "pipefail", "-c", bench.here(part)])
    # There is no request of the name that the documentation gives it.
    assert done.returncode == (1 if words[0] == "grep" else 0), done.stdout + done.stderr
    assert words[0] == "grep" or done.stdout or done.stderr or ">" in part


def generate(bench: Bench, words: list[str]) -> None:
    """What grpcurl would do, which no registry of ours has."""
    assert words[-1] == "kvrelay.v1.Inference/Generate"
    request = json_format.Parse(words[words.index("-d") + 1], inference_pb2.GenerateRequest())
    with grpc.insecure_channel(bench.stack.router.grpc_address) as channel:
        events = list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=20))
    assert events[-1].WhichOneof("event") == "usage"


PROGRAMS = [block for block in blocks() if block.language == "python"]


@pytest.mark.e2e
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda block: f"{block.page}:{block.line}")
def test_python_runs_as_printed(program: Block, bench: Bench) -> None:
    done = bench.run([sys.executable, "-c", bench.here(program.text)])
    assert done.returncode == 0, done.stderr
    assert done.stdout or "print(" not in program.text
