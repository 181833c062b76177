"""The engine on a GPU, end to end through `LLM`: times beside what the memory or the tensor cores allow at best.

    python -m benchmarks.gpu.run                          # all cases, results under benchmarks/results/
    python -m benchmarks.gpu.run --only '*/decode-*' --out results

First whether what is computed is right (`correctness`): a shape's logits, and the bundled model's texts.

Decode: (time of 257 tokens - time of 1) / 256, random token ids, no prefix cache. Prefill: time to the first token.
"""

import argparse
import fnmatch
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu import correctness
from benchmarks.gpu.profile import profile_prefill, profile_steps
from benchmarks.gpu.shapes import SHAPES, flops, kv_bytes, weight_bytes, write_model
from kvrelay.cli.model import DEFAULT_DIR
from kvrelay.common.request import SamplingParams
from kvrelay.engine.llm import LLM

READ_BYTES_PER_S = 4.38e12
"""What a kernel that only reads reaches on an H200."""
MATMUL_FLOPS = 799e12
"""What a product of 8,192 by 8,192 matrices in bfloat16 reaches."""

Figures = dict[str, Any]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {"llama-3.1-8b-fp8": ("llama-3.1-8b", {"quantization": "fp8"})}
"""Shapes with options of the engine."""


class Model:
    """A model of one shape or variant, loaded once for the cases that use it."""

    def __init__(self, name: str, folder: Path, **options: Any) -> None:
        shape, own = VARIANTS.get(name, (name, {}))
        self.shape = shape
        self.in_8_bits = own.get("quantization") == "fp8"
        self._vocab = SHAPES[shape]["vocab_size"]
        self._random = random.Random(0)
        started = time.perf_counter()
        self.llm = LLM(
            write_model(folder / shape, shape),
            device="cuda",
            load_format="dummy",
            prefix_caching=False,
            max_model_len=8448,
            max_num_batched_tokens=8192,
            max_step_ms=10_000.0,
            **{**own, **options},
        )
        gc.collect()
        gc.freeze()  # as the engine's own process does
        print(f"{name}: loaded in {time.perf_counter() - started:.1f} s; attention {self.llm.attention}", flush=True)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(self._vocab) for _ in range(length)] for _ in range(count)]

    def seconds(self, count: int, length: int, num_output: int, **sampling: Any) -> float:
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": num_output, "ignore_eos": True} | sampling))
        prompts = self.prompts(count, length)
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - started
        assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
        return seconds


def decode(model: Model, batch: int, context: int, *, steps: int = 256, repeats: int = 3) -> Figures:
    """Milliseconds a step."""
    model.seconds(batch, context, 2)
    times = []
    for _ in range(repeats):
        one, many = (model.seconds(batch, context, num_output) for num_output in (1, steps + 1))
        times.append((many - one) / steps * 1e3)
    weights = weight_bytes(model.shape, itemsize=1 if model.in_8_bits else 2)
    read = weights + kv_bytes(model.shape) * batch * (context + steps / 2)
    floor = read / READ_BYTES_PER_S * 1e3
    ms = statistics.median(times)
    return {
        "ms_a_step": ms, "floor_ms": floor, "of_floor": floor / ms, "tokens_per_s": batch / ms * 1e3, "runs_ms": times,
    }  # fmt: skip


def prefill(model: Model, count: int, length: int, *, repeats: int = 3) -> Figures:
    """Milliseconds to the first token of all prompts. No floor in 8 bits: what the tensor cores reach there was not measured."""
    model.seconds(count, length, 1)
    times = [model.seconds(count, length, 1) * 1e3 for _ in range(repeats)]
    floor = count * flops(model.shape, length) / MATMUL_FLOPS * 1e3
    ms = statistics.median(times)
    if model.in_8_bits:
        return {"ms": ms, "runs_ms": times}
    return {"ms": ms, "floor_ms": floor, "of_floor": floor / ms, "runs_ms": times}


def idle(model: Model, batch: int, context: int) -> Figures:
    """The host's time of a step, how much of the time the GPU computes nothing, and which kernels take its time."""
    return profile_steps(model.llm, model.prompts(batch, context))


def throughput(model: Model, batch: int, num_prompt: int, num_output: int) -> Figures:
    model.seconds(batch, num_prompt, 8)
    before = model.llm.engine.counts.host_seconds
    seconds = model.seconds(batch, num_prompt, num_output)
    host = model.llm.engine.counts.host_seconds - before
    return {"tokens_per_s": batch * num_output / seconds, "seconds": seconds, "host_share": host / seconds}


Case = tuple[str, Callable[[Model], Figures]]

CASES: dict[str, list[Case]] = {
    "llama-3.1-8b": [
        ("decode-1-1k", lambda m: decode(m, 1, 1024)),
        ("decode-64-1k", lambda m: decode(m, 64, 1024)),
        ("decode-64-4k", lambda m: decode(m, 64, 4096, repeats=2)),
        ("decode-256-1k", lambda m: decode(m, 256, 1024, repeats=2)),
        ("prefill-1-8k", lambda m: prefill(m, 1, 8192)),
        ("prefill-4-2k", lambda m: prefill(m, 4, 2048)),
        ("prefill-1-512", lambda m: prefill(m, 1, 512)),
        ("profile-prefill-1-8k", lambda m: profile_prefill(m.llm, m.prompts(1, 8192))),
        ("profile-prefill-1-512", lambda m: profile_prefill(m.llm, m.prompts(1, 512))),
        ("idle-64-1k", lambda m: idle(m, 64, 1024)),
        ("idle-1-1k", lambda m: idle(m, 1, 1024)),
        ("idle-256-1k", lambda m: idle(m, 256, 1024)),
    ],
    "llama-3.1-8b-fp8": [
        ("decode-1-1k", lambda m: decode(m, 1, 1024)),
        ("decode-64-1k", lambda m: decode(m, 64, 1024)),
        ("prefill-1-8k", lambda m: prefill(m, 1, 8192)),
        ("idle-1-1k", lambda m: idle(m, 1, 1024)),
    ],
    "qwen3-0.6b": [
        ("decode-1-128", lambda m: decode(m, 1, 128)),
        ("decode-256-128", lambda m: decode(m, 256, 128)),
        ("idle-256-128", lambda m: idle(m, 256, 128)),
        ("throughput-256-128-1024", lambda m: throughput(m, 256, 128, 1024)),
        ("idle-1-128", lambda m: idle(m, 1, 128)),
    ],
    "qwen3-32b": [("decode-1-1k", lambda m: decode(m, 1, 1024)), ("decode-64-1k", lambda m: decode(m, 64, 1024))],
}


CHECKED: dict[str, Callable[[Path, str], Figures]] = {
    "llama-3.1-8b": correctness.logits,
    "llama-3.1-8b-fp8": correctness.logits_in_8_bits,
    "qwen3-0.6b": correctness.logits,
}
"""Whose logits in float32 fit beside those in bfloat16."""


def run(patterns: list[str], bundled: Path, **options: Any) -> Iterator[tuple[str, Figures]]:
    def is_wanted(name: str) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    if is_wanted("smollm2/texts"):
        yield "smollm2/texts", correctness.texts(bundled)
        _free()
    with tempfile.TemporaryDirectory() as folder:
        for name, cases in CASES.items():
            if name in CHECKED and is_wanted(f"{name}/logits"):
                shape, _ = VARIANTS.get(name, (name, {}))
                yield f"{name}/logits", CHECKED[name](Path(folder) / f"{name}-logits", shape)
                _free()
            wanted = [(f"{name}/{kind}", case) for kind, case in cases if is_wanted(f"{name}/{kind}")]
            if wanted:
                model = Model(name, Path(folder), max_num_seqs=256, **options)
                yield f"{name}/attention", {"backend": model.llm.attention}
                for case_name, case in wanted:
                    yield case_name, case(model)
                del model
                _free()


def _free() -> None:
    gc.unfreeze()
    gc.collect()  # an engine's parts know each other
    torch.cuda.empty_cache()


def environment() -> Figures:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "cuda": torch.version.cuda, "python": sys.version.split()[0], "commit": commit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="patterns of shape/case, as llama*/decode-1-*; all by default")
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="the bundled one's directory [%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"gpu-{datetime.now(UTC):%Y-%m-%d}.json"
    found: dict[str, Figures] = {}
    for name, figures in run(arguments.only or ["*"], arguments.model):
        found[name] = figures
        print(name, {key: _short(value) for key, value in figures.items()}, flush=True)
        path.write_text(json.dumps({"environment": environment(), "cases": found}, indent=1) + "\n")
    print(path)


def _short(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
