"""What is certain of a documented command that is not run here, and why it is not.

Each check takes the command's words; it fails where the program, an option, a file, a target or a service is not there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from kvrelay.cli import commands
from kvrelay.cli.main import parser
from kvrelay.cli.up import stack_options
from kvrelay.common.settings import ServiceSettings, parse
from kvrelay.decode.main import DecodeSettings
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.prefill.main import PrefillSettings
from kvrelay.router.settings import RouterSettings
from tests.docs.documents import ROOT

BIN = Path(sys.executable).parent
SERVICES: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "both": DecodeSettings,
    "kvstore": KvStoreSettings,
}
MODULES = "benchmarks."
"""What `python -m` may name: `test_modules_take_their_options` parses those, all in one process."""
Words = Sequence[str]


def make(words: Words) -> None:
    """Sets up, takes minutes, or is what runs this test: the targets are there, and what they would start takes its options."""
    for line in dry_run(words):
        check(shlex.split(line, comments=True))


def dry_run(words: Words) -> list[str]:
    """The lines that a make would run of our own programs."""
    shown = _output(["make", "-n", "--no-print-directory", *words[1:]], ROOT)
    ours = re.findall(rf"^\.venv/bin/((?:kvrelay .*|python -m {re.escape(MODULES)}.*))$", shown, re.MULTILINE)
    return [line for line in ours if line != "kvrelay model"]


def kvrelay(words: Words) -> None:
    """Starts or ends a stack, which tests/cli does: it parses, and each process that it would start takes its options."""
    args = parser().parse_args(list(words[1:]))
    if words[1] != "up":
        return
    options = stack_options(args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "is_free", lambda port: True)
        planned = commands.plan(options, Path("var/run"))
    for command in planned:
        if command.kind != "redis":
            parse(SERVICES[command.kind], command.line[3:], {}, command.name)


def service(words: Words) -> None:
    """Runs until it is ended: its options are those of its settings. Dots stand for the others."""
    given = [word for word in words[1:] if word != "..."]
    model = [] if "--model" in given or words[0] == "kvrelay-kvstore" else ["--model", "var/models/smollm2"]
    parse(SERVICES[words[0].removeprefix("kvrelay-")], [*given, *model], {}, words[0])


def python(words: Words) -> None:
    """Measures for minutes or wants a GPU: its options are parsed by `test_modules_take_their_options`."""
    assert words[1] == "-m"
    assert words[2].startswith(MODULES)


def docker(words: Words) -> None:
    """Needs an engine, and minutes: `make compose-test` runs this one; here the files and names are looked at."""
    if words[1] == "build":
        dockerfile = Path(ROOT, words[words.index("-f") + 1]).read_text()
        assert re.search(rf"^FROM .* AS {words[words.index('--target') + 1]}$", dockerfile, re.MULTILINE)
        return
    assert words[1] == "compose"
    at = next(i for i, word in enumerate(words) if word in ("up", "down", "exec", "run", "logs", "stop"))
    compose = ["docker-compose", *words[2:at]]
    known = _output([*compose, "config", "--services"], ROOT).split()
    _options_are_known(words[at + 1 :], _output([*compose, words[at], "--help"], ROOT))
    if words[at] in ("exec", "run"):
        assert next(word for word in words[at + 1 :] if not word.startswith("-")) in known


def kubectl(words: Words) -> None:
    """Needs a cluster: manifests are built or read, secrets made without one, and the options are kubectl's."""
    if "-k" in words:
        assert "kind: " in _output(["kubectl", "kustomize", words[words.index("-k") + 1]], ROOT)
    elif "-f" in words:
        assert list(yaml.safe_load_all(Path(ROOT, words[words.index("-f") + 1]).read_text()))
    elif "secret" in words:
        for name in (word.partition("=")[2] for word in words if word.startswith("--from-file=")):
            Path(name).touch()
        assert "secret/" in _output(["kubectl", *words[1:], "--dry-run=client", "-o", "name"], Path.cwd())
    else:
        rest = [word for word in words[1:] if word not in ("-n", "kvrelay")]
        verb = rest[:2] if rest[0] == "rollout" else rest[:1]
        _options_are_known(rest, _output(["kubectl", *verb, "--help"], ROOT))


def prometheus(words: Words) -> None:
    """Debian's, and not everywhere: tests/observe runs it where it is; the configuration is there."""
    [name] = [word.removeprefix("--config.file=") for word in words if word.endswith(".yaml")]
    assert yaml.safe_load(Path(ROOT, name).read_text())["scrape_configs"]


def hub(words: Words) -> None:
    """Downloads: its options are those of the program, which transformers brings along."""
    _options_are_known(words[2:], _output(["hf", words[1], "--help"], ROOT))


CHECKS: dict[str, Callable[[Words], None]] = {
    "make": make,
    "kvrelay": kvrelay,
    "kvrelay-router": service,
    "kvrelay-prefill": service,
    "kvrelay-decode": service,
    "kvrelay-kvstore": service,
    "python": python,
    "docker": docker,
    "kubectl": kubectl,
    "promtool": prometheus,
    "prometheus": prometheus,
    "hf": hub,
}


def check(words: Words) -> None:
    assert words[0] in CHECKS, f"{words[0]}: no test knows this program"
    CHECKS[words[0]](words)


def _options_are_known(words: Words, shown: str) -> None:
    for word in words:
        if word.startswith("-"):
            name = word.partition("=")[0]
            assert re.search(rf"(^|[\s,]){re.escape(name)}\b", shown), f"there is no {name}"


def _output(line: Sequence[str], folder: Path) -> str:
    program = shutil.which(line[0], path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    assert program is not None, f"there is no {line[0]}"
    done = subprocess.run([program, *line[1:]], cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
