"""From records to figures, a table, and JSON."""

import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.workload import Measured

PACKAGES = ("torch", "transformers", "ucxx-cu12", "numpy")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. Milliseconds; None for what a subject cannot show."""

    output_tokens_per_second: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    serving_cpu_ms: float | None
    """Of the processor for each output token, beside the engines."""
    seconds: float
    requests: int


def figures(measured: Measured) -> Figures:
    gaps = [1000 * gap for record in measured.records for gap in record.gaps]
    ttfts = [1000 * record.ttft for record in measured.records] if gaps else []
    tokens = sum(record.tokens for record in measured.records)
    cpu = measured.serving_cpu_seconds
    return Figures(
        output_tokens_per_second=tokens / measured.seconds,
        ttft_p50_ms=percentile(ttfts, 0.5),
        ttft_p99_ms=percentile(ttfts, 0.99),
        itl_p50_ms=percentile(gaps, 0.5),
        itl_p99_ms=percentile(gaps, 0.99),
        serving_cpu_ms=None if cpu is None else 1000 * cpu / tokens,
        seconds=measured.seconds,
        requests=len(measured.records),
    )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest rank; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median(runs: Sequence[Figures]) -> Figures:
    """Each figure's median over the runs."""
    merged = {
        name: _median([value for run in runs if (value := getattr(run, name)) is not None])
        for name in Figures.__struct_fields__
        if name != "requests"
    }
    return msgspec.convert({**merged, "requests": runs[0].requests}, Figures)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def table(runs: Mapping[str, Sequence[Figures]], base: str) -> Table:
    """One row a subject; throughput as a ratio to `base`'s, the medians of the rounds. CPU: see `serving_cpu_ms`."""
    shown = Table(title=f"medians of the rounds, milliseconds; ratio to {base}", box=SIMPLE_HEAD)
    for heading in ("subject", "tok/s", "ratio", "TTFT p50", "p99", "ITL p50", "p99", "CPU", "rounds"):
        shown.add_column(heading, no_wrap=True)
    reference = median(runs[base]).output_tokens_per_second
    for name, each in runs.items():
        m = median(each)
        rounds = " ".join(f"{run.output_tokens_per_second:.0f}" for run in each)
        speed = m.output_tokens_per_second
        times = (m.ttft_p50_ms, m.ttft_p99_ms, m.itl_p50_ms, m.itl_p99_ms, m.serving_cpu_ms)
        shown.add_row(name, f"{speed:.1f}", f"{speed / reference:.2f}", *map(_ms, times), rounds)
    return shown


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def machine() -> dict[str, object]:
    return {
        "cpu": _cpu(Path("/proc/cpuinfo").read_text().splitlines()),
        "instructions": _instructions(Path("/proc/cpuinfo").read_text()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions(PACKAGES),
    }


def _cpu(lines: Iterable[str]) -> str:
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _instructions(cpuinfo: str) -> str:
    """The widest set for matrices: what a figure depends on more than on the name."""
    known = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")
    return next((name for name in known if f" {name} " in cpuinfo.replace("\n", " ")), "")


def versions(packages: Iterable[str]) -> dict[str, str]:
    return {name: _version(name) for name in packages}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


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
