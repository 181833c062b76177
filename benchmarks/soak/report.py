"""The report: one JSON file, rewritten after each case, so that a run that breaks off has not been for nothing."""

import datetime
from pathlib import Path

import msgspec

DEFAULT_PATH = Path("benchmarks/results/soak.json")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Of one case. It says itself of which commit and machine it is: a report may be made in several runs."""

    passed: bool
    seconds: float
    at: str
    commit: str
    machine: dict[str, object]
    options: dict[str, int]
    """The counts that the case was run with."""
    figures: dict[str, object] = {}
    error: str = ""


class Report(msgspec.Struct, kw_only=True):
    cases: dict[str, Result] = {}


def load(path: Path) -> Report:
    """What the file holds; an empty report where there is none."""
    return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else Report()


def save(path: Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    partial.rename(path)


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
