"""The full counts of what the tests sample, on real pods, and a report.

    python -m benchmarks.soak --list
    python -m benchmarks.soak --only 'faults-*' --only memory
    python -m benchmarks.soak --resume

One line a case; exit status 1 where one fails. Cases that are not run keep what the report has of them.
"""

import argparse
import fnmatch
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType

from benchmarks.report import commit, machine
from benchmarks.soak import exactness, faults, idle, kvstore, memory, payload, report, seeded
from benchmarks.soak.case import Case, Plan
from benchmarks.soak.report import Report, Result
from kvrelay.cli.model import DEFAULT_DIR

CASES = [*idle.CASES, *memory.CASES, *payload.CASES, *seeded.CASES, *faults.CASES, *kvstore.CASES, *exactness.CASES]
"""What measures memory comes first: a library that this process has loaded as well would be shared with it."""
ERROR_CHARS = 2000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the cases, run none")
    parser.add_argument(
        "--only", action="append", default=[], metavar="CASE", help="a name or pattern; more than once: any"
    )
    parser.add_argument("--resume", action="store_true", help="leave out what the report says has passed")
    parser.add_argument("--out", type=Path, default=report.DEFAULT_PATH, help="the report [%(default)s]")
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=0, help="of each engine [the cores, split between the pods]")
    parser.add_argument("--requests", type=int, default=Plan.requests, help="of the memory case [%(default)s]")
    parser.add_argument("--repeats", type=int, default=Plan.repeats, help="of each fault [%(default)s]")
    parser.add_argument("--kills", type=int, default=Plan.kills, help="of a KV store [%(default)s]")
    parser.add_argument("--prompts", type=int, default=Plan.prompts, help="of each exactness case, at most [all]")
    args = parser.parse_args()
    unknown = [only for only in args.only if not fnmatch.filter([case.name for case in CASES], only)]
    if unknown:
        parser.error(f"no case is named {', '.join(unknown)}: --list names them")
    return args


def chosen(args: argparse.Namespace, found: Report) -> list[Case]:
    cases = [case for case in CASES if not args.only or any(fnmatch.fnmatchcase(case.name, only) for only in args.only)]
    if not args.resume:
        return cases
    done = {name for name, result in found.cases.items() if result.passed}
    return [case for case in cases if case.name not in done]


def run(case: Case, plan: Plan) -> Result:
    options = {name: getattr(plan, name) for name in ("threads", "requests", "repeats", "kills", "prompts")}
    figures: dict[str, object] = {}
    error = ""
    at, head, started = report.now(), commit(), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
            figures = dict(case.run(replace(plan, scratch=Path(scratch))))
    except Exception as failure:  # noqa: BLE001 - a case that fails is a result
        traceback.print_exception(failure)
        error = f"{type(failure).__name__}: {failure}"[:ERROR_CHARS]
    return Result(
        passed=not error,
        seconds=round(time.monotonic() - started, 1),
        at=at,
        commit=head,
        machine=machine(),
        options=options,
        figures=figures,
        error=error,
    )


def _terminate(number: int, frame: FrameType | None) -> None:
    """As an exception, so that what was started is stopped."""
    print("ended by SIGTERM", file=sys.stderr)
    raise SystemExit(143)


def main() -> None:
    args = arguments()
    if args.list:
        for case in CASES:
            print(f"{case.name:<34}{case.what}")
        return
    signal.signal(signal.SIGTERM, _terminate)
    found = report.load(args.out)
    plan = Plan(
        model=args.model.resolve(),
        scratch=Path(),
        threads=args.threads,
        requests=args.requests,
        repeats=args.repeats,
        kills=args.kills,
        prompts=args.prompts,
    )
    cases = chosen(args, found)
    failed = 0
    for case in cases:
        result = found.cases[case.name] = run(case, plan)
        report.save(args.out, found)
        failed += not result.passed
        first_line = result.error.partition("\n")[0]
        print(
            f"{case.name:<34}{'passed' if result.passed else 'FAILED'}{result.seconds:>9.1f} s  {first_line}",
            flush=True,
        )
    print(f"{len(cases) - failed} passed, {failed} failed; the report is {args.out}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
