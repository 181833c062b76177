"""Where a decode step of the offline engine spends its time, by part: what is worth making faster on this machine.

    python -m benchmarks.step --sequences 8 --prompt-tokens 200 --steps 60 --out step.json

Parts are timed from outside, by wrapping them; the parts of attention are in `attention`, the rest of a layer is in `layers`.
Only steps in which every sequence decodes count.
"""

import argparse
import functools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch.nn.functional as functional
from rich.console import Console
from rich.table import Table

from benchmarks.report import commit, machine
from kvrelay.cli.model import DEFAULT_DIR
from kvrelay.common.request import SamplingParams
from kvrelay.engine.attention import cpu as attention
from kvrelay.engine.attention import gathered
from kvrelay.engine.batch import Batch, LayerHook, Running, no_hook
from kvrelay.engine.llm import LLM
from kvrelay.engine.models import layers
from kvrelay.engine.runner import ModelRunner
from kvrelay.kernels.cpu.ops import CompiledOps
from kvrelay.kernels.reference import ReferenceOps


class Clock:
    """Seconds by part, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Replaces a function of a class or module by one that is timed."""
        plain: Callable[..., object] = getattr(owner, name)

        @functools.wraps(plain)
        def timed(*args: object, **options: object) -> object:
            started = time.perf_counter()
            try:
                return plain(*args, **options)
            finally:
                if self.on:
                    self.seconds[part] += time.perf_counter() - started

        setattr(owner, name, timed)


OPS = (ReferenceOps, CompiledOps)
PARTS: list[tuple[Any, str, str]] = [
    (ModelRunner, "_prepare", "input buffers"),
    (attention.CpuAttention, "prepare", "attention metadata"),
    *((ops, "add_norm", "norms") for ops in OPS),
    *((ops, "rotate", "rotary embedding") for ops in OPS),
    *((ops, "silu_gate", "gate") for ops in OPS),
    (layers.Linear, "__call__", "linear, plain"),
    (layers.PackedLinear, "__call__", "linear, packed"),
    (attention.CpuStep, "attend", "attention"),
    (gathered.Gathering, "__call__", "attention: gather"),
    (functional, "scaled_dot_product_attention", "attention: attend"),
    (ModelRunner, "_sample", "output layer and sampling"),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.step", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="[%(default)s]")
    parser.add_argument("--dtype", default="bfloat16", help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--sequences", type=int, default=8, help="decoding at once [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="of each [%(default)s]")
    parser.add_argument("--steps", type=int, default=60, help="tokens after the last prompt [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    return parser.parse_args()


def measure(args: argparse.Namespace) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and of the parts in all of them."""
    most = args.prompt_tokens + args.steps + 64
    llm = LLM(args.model, dtype=args.dtype, threads=args.threads, max_num_seqs=args.sequences, max_model_len=most)
    rng = random.Random(1)

    def prompts() -> list[tuple[int, ...]]:
        return [tuple(rng.randrange(3, 1000) for _ in range(args.prompt_tokens)) for _ in range(args.sequences)]

    sampling = SamplingParams(temperature=0.0, max_tokens=args.steps + 60, min_tokens=args.steps + 60, ignore_eos=True)
    llm.generate(prompts(), sampling)
    clock = Clock()
    steps: list[float] = []
    for owner, name, part in PARTS:
        clock.wrap(owner, name, part)
    engine = llm.engine
    plain = engine.launch

    def launch(batch: Batch, on_layer: LayerHook = no_hook) -> Running:
        clock.on = batch.num_tokens == len(batch.parts) == args.sequences
        started = time.perf_counter()
        running = plain(batch, on_layer)
        if clock.on:
            steps.append(time.perf_counter() - started)
        return running

    engine.launch = launch  # type: ignore[method-assign]
    llm.generate(prompts(), sampling)
    return steps, clock.seconds


def main() -> None:
    args = arguments()
    steps, parts = measure(args)
    if not steps:
        raise SystemExit("no step had all sequences decoding: more --steps")
    shown = Table(title=f"{len(steps)} steps of {args.sequences} sequences, milliseconds a step")
    shown.add_column("part")
    shown.add_column("ms", justify="right")
    each = {part: 1000 * seconds / len(steps) for part, seconds in parts.items()}
    for part, ms in each.items():
        shown.add_row(part, f"{ms:.2f}")
    mean, middle = 1000 * statistics.mean(steps), 1000 * statistics.median(steps)
    shown.add_row("whole step, mean", f"{mean:.2f}")
    shown.add_row("whole step, median", f"{middle:.2f}")
    Console().print(shown)
    if args.out:
        options = {name: str(value) for name, value in vars(args).items() if name != "out"}
        result = {"machine": machine(), "commit": commit(), "options": options, "mean_ms": mean, "median_ms": middle}
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode({**result, "parts_ms": each}), indent=2) + b"\n")


if __name__ == "__main__":
    main()
