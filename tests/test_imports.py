"""Imports point down only; protobuf stays at the edge; what has to run without torch does."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for part in ("services", "libs", "kernels") for path in (ROOT / part).glob("**/kvrelay/**/*.py")]
FILES = [path for path in SOURCES if "/kvrelay/v1/" not in path.as_posix()]
SERVICES = {"router", "prefill", "decode", "kvstore"}
# What each part may import of the others. The engine's models and attention are folders of the engine.
BELOW = {
    "common": {"v1"},
    "kernels": {"common"},
    "transfer": {"common", "kernels"},
    "engine": {"common", "kernels", "transfer", "v1"},
    "prefill": {"common", "engine", "transfer"},
    "decode": {"common", "engine", "transfer"},
    "kvstore": {"common", "engine", "transfer", "v1"},
    "router": {"common", "engine", "transfer", "v1"},
    "cli": {"common", "engine", "transfer", "v1", *SERVICES},
}
# Where bytes meet core types, and nowhere else.
EDGE = {
    "common/wire.py",
    "common/rpc.py",
    "engine/connector/kvstore.py",
    "engine/connector/session.py",
    "engine/pod/control.py",
    "engine/pod/decode.py",
    "engine/pod/prefill.py",
    "engine/pod/routes.py",
    "engine/pod/server.py",
    "engine/pod/steps.py",
    "router/pods.py",
    "router/news.py",
    "router/snapshots.py",
    "router/console/stores.py",
    "router/grpcfront/events.py",
    "router/grpcfront/health.py",
    "router/grpcfront/inference.py",
    "cli/inspection.py",
    "cli/store.py",
    "kvstore/peers/link.py",
    "kvstore/server.py",
    "kvstore/servicer.py",
    "kvstore/wire.py",
}
TORCH_FREE = [
    "kvrelay.common",
    "kvrelay.transfer",
    "kvrelay.router",
    "kvrelay.kvstore",
    "kvrelay.engine.fake",
    "kvrelay.engine.pod",
    "kvrelay.engine.client",
    "kvrelay.prefill",
    "kvrelay.decode",
]


def _name(path: Path) -> str:
    """`common/wire.py` of `libs/common/kvrelay/common/wire.py`."""
    return path.as_posix().split("/kvrelay/", 1)[1]


def _imports(path: Path) -> Iterator[str]:
    """Full names of modules that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_there_are_files() -> None:
    assert {_name(path).split("/")[0] for path in FILES} >= {"common", "engine", "router", "prefill", "decode"}


def test_no_package_file_directly_under_the_namespace() -> None:
    assert [path for path in SOURCES if path.parent.name == "kvrelay"] == []


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_down(path: Path) -> None:
    part = _name(path).split("/")[0]
    used = {name.split(".")[1] for name in _imports(path) if name.startswith("kvrelay.")}
    assert used - {part} <= BELOW[part], f"{part} imports {used - {part} - BELOW[part]}"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_models_and_attention_know_nothing_of_the_engine_above_them(path: Path) -> None:
    name = _name(path)
    if not name.startswith(("engine/models/", "engine/attention/")):
        return
    above = {"core", "scheduler", "process", "driver", "client", "pod", "fake", "llm", "push", "receive"}
    used = {module.split(".")[2] for module in _imports(path) if module.startswith("kvrelay.engine.")}
    assert used & above == set()


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_protobuf_only_at_the_edge(path: Path) -> None:
    if any("_pb2" in name for name in _imports(path)):
        assert _name(path) in EDGE


def _modules(package: str) -> list[str]:
    """All modules of a package; one that is a test's or a program's own start is imported like any other."""
    folder = package.replace("kvrelay.", "").replace(".", "/")
    names = [_name(path) for path in FILES]
    inside = [name for name in names if name.startswith(f"{folder}/") or name == f"{folder}.py"]
    modules = (name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in inside)
    return sorted(f"kvrelay.{module}" for module in modules if not module.endswith("__main__"))


@pytest.mark.parametrize("package", TORCH_FREE)
def test_no_torch(package: str) -> None:
    modules = _modules(package)
    if not modules:
        pytest.skip(f"{package} has no modules yet")
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules, 'torch is imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
