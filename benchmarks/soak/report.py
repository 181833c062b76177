"""The report: one JSON file, rewritten after each case, so that a run that breaks off has not been for nothing."""

import datetime
import subprocess
from pathlib import Path

import msgspec

from benchmarks.report import machine


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Of one case. It says itself which commit it is of: a report may be made in several runs."""

    passed: bool
    seconds: float
    at: str
    commit: str
    options: dict[str, int]
    """The counts that the case was run with."""
    figures: dict[str, object] = {}
    error: str = ""


class Report(msgspec.Struct, kw_only=True):
    machine: dict[str, object]
    cases: dict[str, Result] = {}


def load(path: Path) -> Report:
    """What the file holds; an empty report where there is none, or one of another machine."""
    here = machine()
    if path.exists():
        report = msgspec.json.decode(path.read_bytes(), type=Report)
        if report.machine == here:
            return report
    return Report(machine=here)


def save(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    partial.rename(path)


def default_path() -> Path:
    return Path("benchmarks/results") / f"soak-{datetime.date.today().isoformat()}.json"


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def commit() -> str:
    """Of the working tree, with a mark where tracked files (reports aside) differ from it."""
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{head} with changes" if changes else head


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
