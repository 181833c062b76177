"""What a router costs: one real router on one core, stub pods that answer at once, and a compiled load generator.

    python -m benchmarks.router --rounds 3 --out benchmarks/results/router.json

Pods and clients share the other cores. Of each case the best round counts, for other work on the machine can only slow it;
the processor time of the router for each request or token hardly depends on that.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.report import commit, machine, percentile, versions
from benchmarks.router import load, report
from benchmarks.router.floor import Floor
from benchmarks.router.report import Burst, Latency, Surroundings
from benchmarks.router.stack import Cores, Running, running
from kvrelay.cli.model import DEFAULT_DIR

PACKAGES = ("grpcio", "protobuf", "uvloop", "uvicorn", "httptools", "msgspec", "orjson", "tokenizers")
NUM_PROMPTS = 64
FLOOR = "floor"
WARMUP_SECONDS = 2.0
WIDTH = 120


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """`connections` closed-loop clients with prompts of a kind, against pods of a layout that take a step each `step_ms`."""

    name: str
    prompts: str
    pods: str
    connections: int
    output_tokens: int
    stream: bool = False
    step_ms: float = 1.0


CASES = [
    Case(name="requests, text", prompts="text", pods="split", connections=64, output_tokens=2),
    Case(name="requests, token ids", prompts="ids", pods="split", connections=64, output_tokens=2),
    Case(name="requests, text, one pod", prompts="text", pods="both", connections=64, output_tokens=2),
    Case(name="streams of 128", prompts="text", pods="split", connections=64, output_tokens=128, stream=True),
    Case(name="streams of 512", prompts="text", pods="split", connections=64, output_tokens=512, stream=True),
]
LATENCY_CASES = [
    Case(name="first token, text", prompts="text", pods="split", connections=1, output_tokens=2, stream=True),
    Case(
        name="first token, one pod", prompts="text", pods="both", connections=1, output_tokens=2, stream=True, step_ms=0
    ),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.router", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="its tokenizer alone is used [%(default)s]")
    parser.add_argument(
        "--only", default="", help="cases whose name has this; floor: what nothing of ours can save [all]"
    )
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each burst [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="[%(default)s]")
    parser.add_argument(
        "--rate", type=float, default=50.0, help="requests a second of the patient client [%(default)s]"
    )
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


def measure(case: Case, args: argparse.Namespace, cores: Cores) -> list[Burst]:
    with running(args.model, case.pods, case.step_ms, cores) as stack, tempfile.NamedTemporaryFile("wb") as file:
        file.write(b"\n".join(_bodies(case, args)))
        file.flush()
        path = Path(file.name)
        load.burst(stack.port, path, case.connections, WARMUP_SECONDS, cores.rest)
        return [_burst(stack, case, path, args.seconds, cores) for _ in range(args.rounds)]


def _burst(stack: Running, case: Case, file: Path, seconds: float, cores: Cores) -> Burst:
    surroundings = Surroundings.now(cores)
    used, tokens = stack.used(), stack.generated_tokens()
    told = load.burst(stack.port, file, case.connections, seconds, cores.rest)
    used_after, tokens_after = stack.used(), stack.generated_tokens()
    return report.burst(
        told,
        tokens=tokens_after - tokens,
        router_seconds=used_after.router - used.router,
        pods_seconds=used_after.pods - used.pods,
        surroundings=surroundings,
    )


def measure_latency(case: Case, args: argparse.Namespace, cores: Cores) -> list[Latency]:
    with running(args.model, case.pods, case.step_ms, cores) as stack:
        bodies = _bodies(case, args)
        load.first_tokens(stack.port, bodies, args.rate, count=int(WARMUP_SECONDS * args.rate))
        return [_latency(stack, bodies, args, cores) for _ in range(args.rounds)]


def _latency(stack: Running, bodies: Sequence[bytes], args: argparse.Namespace, cores: Cores) -> Latency:
    surroundings = Surroundings.now(cores)
    found = [1000 * each for each in load.first_tokens(stack.port, bodies, args.rate, int(args.seconds * args.rate))]
    p50, p99 = percentile(found, 0.5), percentile(found, 0.99)
    assert p50 is not None
    assert p99 is not None
    return Latency(requests=len(found), p50_ms=p50, p99_ms=p99, surroundings=surroundings)


def measure_floor(args: argparse.Namespace, cores: Cores) -> list[Floor]:
    with running(args.model, "split", 1.0, cores) as stack:
        line = ["taskset", "-c", str(cores.router), sys.executable, "-m", "benchmarks.router.floor"]
        line += ["--redis-url", stack.redis_url, "--model", str(args.model), "--prompt-tokens", str(args.prompt_tokens)]
        told = [subprocess.run(line, check=True, capture_output=True, timeout=120).stdout for _ in range(args.rounds)]
    return [msgspec.json.decode(each, type=Floor) for each in told]


def _bodies(case: Case, args: argparse.Namespace) -> list[bytes]:
    prompts = load.prompts(args.model, case.prompts, args.prompt_tokens, NUM_PROMPTS)
    return load.bodies(prompts, case.output_tokens, stream=case.stream)


def main() -> None:
    args = arguments()
    load.find_wrk()
    cores, console = Cores.of_machine(), Console(width=WIDTH)
    os.sched_setaffinity(0, cores.rest)
    bursts = {case.name: measure(case, args, cores) for case in CASES if args.only in case.name}
    latencies = {case.name: measure_latency(case, args, cores) for case in LATENCY_CASES if args.only in case.name}
    floor = measure_floor(args, cores) if args.only in FLOOR else []
    if bursts:
        console.print(report.burst_table(bursts))
    if latencies:
        console.print(report.latency_table(latencies, args.rate))
    if floor:
        console.print(report.floor_table(floor))
    if args.out:
        options = {"prompt_tokens": args.prompt_tokens, "seconds": args.seconds, "rate": args.rate, "cores": cores}
        result = {
            "machine": machine() | versions(PACKAGES),
            "commit": commit(),
            "options": options,
            "cases": {case.name: case for case in (*CASES, *LATENCY_CASES)},
            "full_load": {name: {"best": report.best(each), "rounds": each} for name, each in bursts.items()},
            "floor": {"best": report.lowest(floor), "rounds": floor} if floor else {},
            "low_load": {name: {"best": report.quickest(each), "rounds": each} for name, each in latencies.items()},
        }
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        console.print(f"results in {args.out}")


if __name__ == "__main__":
    main()
