"""Times of the small Triton kernels beside what their memory traffic alone would take.

python -m benchmarks.gpu.ops            all of them at an 8B model's shapes
python -m benchmarks.gpu.ops --sweep    sampling by other sizes of chunk
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator

import torch

from kvrelay.kernels.ops import Norm, SampleParams
from kvrelay.kernels.triton.gate import silu_gate
from kvrelay.kernels.triton.norm import add_norm
from kvrelay.kernels.triton.rotary import rotate_and_store
from kvrelay.kernels.triton.sample import TokenSampler

FLOOR_TB_S = 4.3
"""What one H200 reads, measured with copies of gigabytes."""
CACHE_BYTES = 120 << 20
"""Twice the second-level cache: inputs are used in turn, until they no longer fit."""
MAX_SETS = 64
"""Those of a single token fit all the same; so they do where the operation before has just written them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    name: str
    shape: str
    us: float
    """Of a call in a CUDA graph of many, median of some replays."""
    moved_bytes: int
    """What must be read and written at least."""

    @property
    def gb_s(self) -> float:
        return self.moved_bytes / self.us / 1e3

    @property
    def floor_us(self) -> float:
        return self.moved_bytes / FLOOR_TB_S / 1e6

    def __str__(self) -> str:
        return (
            f"{self.name:24} {self.shape:34} {self.us:9.2f} us {self.gb_s:8.0f} GB/s"
            f"  floor {self.floor_us:8.2f} us  x {self.us / self.floor_us:7.2f}"
        )


def time_us(call: Callable[[int], object], sets: int) -> float:
    """Of `call(i)` on the i-th of `sets` sets of inputs, microseconds: captured in turn into one graph, which is replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(min(sets, 3)):
            call(i)
    side.synchronize()
    calls = max(sets, 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def sets_for(moved_bytes: int) -> int:
    return max(1, min(MAX_SETS, CACHE_BYTES // moved_bytes + 1))


def time_add_norm(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Timing:
    moved = tokens * hidden * dtype.itemsize * 4 + hidden * 4
    sets = sets_for(moved)
    streams, deltas, outs = (
        [torch.randn(tokens, hidden, device="cuda").to(dtype) for _ in range(sets)] for _ in range(3)
    )
    norm = _norm(hidden)
    us = time_us(lambda i: add_norm(streams[i], deltas[i], norm.weight, norm.eps, outs[i]), sets)
    return Timing("add_norm", f"T {tokens} H {hidden}", us, moved)


def time_silu_gate(tokens: int, inner: int, dtype: torch.dtype = torch.bfloat16) -> Timing:
    moved = tokens * inner * dtype.itemsize * 3
    sets = sets_for(moved)
    inputs = [torch.randn(tokens, 2 * inner, device="cuda").to(dtype) for _ in range(sets)]
    outs = [each.new_empty(tokens, inner) for each in inputs]
    us = time_us(lambda i: silu_gate(inputs[i], outs[i]), sets)
    return Timing("silu_gate", f"T {tokens} I {inner}", us, moved)


def time_rotate_and_store(
    tokens: int, num_q: int, num_kv: int, dim: int, normed: bool, dtype: torch.dtype = torch.bfloat16
) -> Timing:
    moved = tokens * (num_q + 2 * num_kv) * dim * dtype.itemsize * 2 + tokens * (dim * 4 + 16)
    sets = sets_for(moved)
    inputs = [torch.randn(tokens, num_q + 2 * num_kv, dim, device="cuda").to(dtype) for _ in range(sets)]
    outs = [each.new_empty(tokens, num_q, dim) for each in inputs]
    slots = torch.randperm(max(4 * tokens, 1 << 14), device="cuda")[:tokens]
    keys, values = (torch.zeros(max(4 * tokens, 1 << 14), num_kv, dim, device="cuda", dtype=dtype) for _ in range(2))
    angles = torch.rand(8192, dim // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(8192, (tokens,), device="cuda")
    norm = _norm(num_q + num_kv, dim) if normed else None

    def call(i: int) -> None:
        rotate_and_store(inputs[i], cos, sin, positions, slots, keys, values, norm, outs[i])

    shape = f"T {tokens} Hq {num_q} Hkv {num_kv} D {dim}{' normed' if normed else ''}"
    return Timing("rotate_and_store", shape, time_us(call, sets), moved)


SAMPLED = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "top-k": {"temperature": 0.6, "top_k": 50},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k and top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


def time_sample(
    rows: int,
    vocab: int,
    kind: str,
    spread: float = 3.0,
    dtype: torch.dtype = torch.float32,
    chunk: int = 4096,
) -> Timing:
    """Normal logits of this `spread`: 3 leaves a nucleus of thousands of tokens, 1 of most."""
    moved = rows * vocab * dtype.itemsize
    sets = sets_for(moved)
    logits = [(torch.randn(rows, vocab, device="cuda") * spread).to(dtype) for _ in range(sets)]
    values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **SAMPLED[kind]}
    params = SampleParams(
        temperature=torch.full((rows,), values["temperature"], device="cuda"),
        top_k=torch.full((rows,), int(values["top_k"]), device="cuda", dtype=torch.int32),
        top_p=torch.full((rows,), values["top_p"], device="cuda"),
        min_p=torch.full((rows,), values["min_p"], device="cuda"),
        seed=torch.arange(rows, device="cuda"),
        choice=torch.zeros(rows, device="cuda", dtype=torch.int32),
        position=torch.arange(rows, device="cuda") * 17,
    )
    sampler = TokenSampler(rows, vocab, "cuda", chunk)
    tokens = torch.empty(rows, dtype=torch.int64, device="cuda")
    finite = torch.empty(rows, dtype=torch.bool, device="cuda")
    asked = {"draws": kind != "greedy", "cuts": "top_k" in SAMPLED[kind] or "top_p" in SAMPLED[kind]}
    us = time_us(lambda i: sampler(logits[i], params, tokens, finite, **asked), sets)
    return Timing(f"sample: {kind}", f"R {rows} V {vocab} spread {spread:g} {str(dtype)[6:]}", us, moved)


def _norm(*shape: int) -> Norm:
    return Norm(torch.ones(shape, device="cuda"), torch.tensor(1e-5, device="cuda"))


def timings() -> Iterator[Timing]:
    for tokens in (1, 64, 256, 8192):
        yield time_add_norm(tokens, 4096)
    for tokens in (1, 256):
        yield time_add_norm(tokens, 1024)
    for tokens in (1, 64, 256, 8192):
        yield time_silu_gate(tokens, 14336)
    for tokens in (1, 64, 256, 8192):
        yield time_rotate_and_store(tokens, 32, 8, 128, normed=False)
    for tokens in (1, 256):
        yield time_rotate_and_store(tokens, 16, 8, 128, normed=True)
    for rows, kind in itertools.product((1, 64, 256), SAMPLED):
        yield time_sample(rows, 128256, kind)
    for rows, spread in itertools.product((1, 256), (0.01, 1.0)):
        yield time_sample(rows, 128256, "top-p", spread)
    for rows, kind in itertools.product((1, 256), ("greedy", "top-p")):
        yield time_sample(rows, 151936, kind, dtype=torch.bfloat16)


def sweep() -> None:
    for chunk in (1024, 2048, 4096, 8192):
        print(f"chunk {chunk}")
        for rows, kind in itertools.product((1, 64, 256), ("greedy", "drawn", "top-k", "top-p")):
            print(" ", time_sample(rows, 128256, kind, chunk=chunk), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    if parser.parse_args().sweep:
        sweep()
    else:
        for timing in timings():
            print(timing, flush=True)


if __name__ == "__main__":
    main()
