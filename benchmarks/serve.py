"""Serving, measured: closed-loop clients against stacks, the offline engine and peers, in turn, in one run.

    python -m benchmarks.serve --clients 8 --prompt-tokens 200 --output-tokens 64 --dtype bfloat16

A round runs every subject once, and rounds follow each other (A B A B): a machine that slows down slows all of them. Figures
from different runs do not compare; ratios within one do.
"""

import argparse
import os
import signal
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from benchmarks.report import Figures, commit, figures, machine, median, table
from benchmarks.subjects import STACKS, Subject, local, stack, vllm_cpu
from benchmarks.workload import Shape, make_workload
from kvrelay.cli.model import DEFAULT_DIR

DEFAULT_SUBJECTS = "both,1p1d,llm,transformers"


def arguments() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="[%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="[%(default)s]")
    parser.add_argument(
        "--subjects", default=DEFAULT_SUBJECTS, help=f"of {', '.join(STACKS)}, llm, transformers [%(default)s]"
    )
    parser.add_argument("--clients", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--requests", type=int, help="[4 a client]")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="[%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=64, help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=cores, help="of each subject as a whole [%(default)s]")
    parser.add_argument("--prefill-threads", type=int, help="of each prefill pod [half the threads / pods]")
    parser.add_argument("--decode-threads", type=int, help="of each decode pod [threads / pods]")
    parser.add_argument("--rounds", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--peer", choices=["vllm-cpu"], action="append", default=[], help="a peer beside transformers")
    parser.add_argument("--peer-python", type=Path, help="of the environment that has the peer")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    if args.peer and args.peer_python is None:
        parser.error("--peer needs --peer-python")
    return args


def subjects(args: argparse.Namespace) -> dict[str, Subject]:
    """Raises ValueError for an unknown name."""
    given = {"prefill": args.prefill_threads, "decode": args.decode_threads}
    threads = {kind: count for kind, count in given.items() if count is not None}
    chosen: dict[str, Subject] = {}
    for name in args.subjects.split(","):
        if name in STACKS:
            chosen[name] = stack(STACKS[name], threads)
        elif name in ("llm", "transformers"):
            chosen[name] = local(name)
        else:
            raise ValueError(f"subject {name} is unknown")
    if "vllm-cpu" in args.peer:
        chosen["vllm-cpu"] = vllm_cpu(args.peer_python)
    return chosen


def _terminate(number: int, frame: FrameType | None) -> None:
    """As an exception, so that what was started is stopped."""
    raise SystemExit(143)


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, _terminate)
    console = Console()
    chosen = subjects(args)
    shape = Shape(args.prompt_tokens, args.output_tokens, args.clients, args.requests or 4 * args.clients)
    runs: dict[str, list[Figures]] = {name: [] for name in chosen}
    for number in range(args.rounds):
        workload = make_workload(args.model.resolve(), args.dtype, args.threads, shape, args.seed + number)
        for name, subject in chosen.items():
            with console.status(f"round {number + 1} of {args.rounds}: {name}"):
                runs[name].append(figures(subject(workload)))
            console.print(
                f"round {number + 1}: {name} {runs[name][-1].output_tokens_per_second:.1f} tok/s", highlight=False
            )
    base = "transformers" if "transformers" in chosen else next(iter(chosen))
    console.print(table(runs, base))
    if args.out:
        _save(args, runs)
        console.print(f"results in {args.out}")


def _save(args: argparse.Namespace, runs: dict[str, list[Figures]]) -> None:
    names = ["dtype", "clients", "requests", "prompt_tokens", "output_tokens", "threads", "rounds", "seed"]
    names += ["prefill_threads", "decode_threads"]
    result = {
        "machine": machine(),
        "commit": commit(),
        "options": {name: getattr(args, name) for name in names},
        "subjects": {name: {"median": median(each), "rounds": each} for name, each in runs.items()},
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
