"""Each command of README and docs/*.md is run as it is printed, or else what can be known of it is checked: see `checks`."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml
from google.protobuf import json_format

from kvrelay.common.settings import BadOption
from kvrelay.v1 import inference_pb2, inference_pb2_grpc
from tests.docs import checks
from tests.docs.conftest import Bench
from tests.docs.documents import PAGES, ROOT, Block, Documented, blocks, documented, simple

COMMANDS = documented()
RUN_PROGRAMS = ("curl", "grpcurl", "grep", "openssl")
DEBIANS = ("curl", "openssl")
RUN_SUBCOMMANDS = ("status", "kv", "chat", "complete", "plan")


def is_run(words: list[str]) -> bool:
    return words[0] in RUN_PROGRAMS or (words[0] == "kvrelay" and words[1] in RUN_SUBCOMMANDS)


def parts(command: Documented) -> list[str]:
    """As the shell would take them one after the other."""
    return command.text.split(" && ")


def place(value: object) -> str:
    return value.place if isinstance(value, Documented) else str(value)


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
    assert sum(len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) for page in PAGES) == 2 * len(found), (
        "a fence that is not closed"
    )
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
    if words[0] in DEBIANS and shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}: Debian's package of the name has it")
    done = bench.run(["bash", "-euo", "pipefail", "-c", bench.here(part)])
    # It may find nothing.
    assert done.returncode in ((0, 1) if words[0] == "grep" else (0,)), done.stdout + done.stderr
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
