"""Paged attention on a GPU: each shape is checked against its twin, then timed from a CUDA graph.

    export PYTHONPATH=kernels:libs/engine
    python -m benchmarks.gpu.attention                   # what the kernels' own tables choose, and whole prompts by cuDNN
    python -m benchmarks.gpu.attention --sweep decode    # other block sizes, warps and stages too

A graph calls the kernel on one set of inputs after the other, which together are several times the second-level cache.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn.attention import SDPBackend
from triton.runtime.errors import OutOfResources

from kvrelay.engine.attention.whole import WholePrompts, padded
from kvrelay.kernels.reference import paged_decode, paged_prefill
from kvrelay.kernels.triton import prefill_attention
from kvrelay.kernels.triton.decode_attention import DecodeConfig, PagedDecode, decode_config
from kvrelay.kernels.triton.prefill_attention import PrefillConfig, prefill_config

READ_BYTES_PER_S = 4.38e12
"""What a kernel that only reads reaches on an H200."""
BF16_FLOPS = 989e12
"""Of an H200's tensor cores by its datasheet, for dense bfloat16."""
CACHE_BYTES = 60e6
ROUGHLY = 1e-2
"""By how much of the whole a result may differ from the twin's: bfloat16 keeps 8 bits. Tests have the tight bounds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Of one model's attention."""

    name: str
    query: int
    kv: int
    dim: int


LLAMA_8B = Heads("Llama-3.1-8B", 32, 8, 128)
QWEN3_600M = Heads("Qwen3-0.6B", 16, 8, 128)
QWEN3_32B = Heads("Qwen3-32B", 64, 8, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Of one kernel for one layer."""

    kernel: str
    heads: str
    shape: str
    config: str
    us: float
    floor_us: float
    """To read the KV once at the memory's speed, or to multiply at the tensor cores'."""
    rate: float
    unit: str

    @property
    def of_floor(self) -> float:
        return self.floor_us / self.us

    def line(self) -> str:
        return (
            f"{self.kernel:8} {self.heads:13} {self.shape:22} {self.config:34} {self.us:9.2f} us "
            f"floor {self.floor_us:9.2f} us  {100 * self.of_floor:5.1f}%  {self.rate:7.1f} {self.unit}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """One cache, and of each set of inputs the queries and where in the cache its sequences lie."""

    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    queries: list[torch.Tensor]
    tables: list[torch.Tensor]
    lens: torch.Tensor


def draw(
    contexts: Sequence[int], num_tokens: int, heads: Heads, block_size: int, dtype: torch.dtype, device: str = "cuda"
) -> Inputs:
    """Normal inputs, blocks in no order."""
    widths = [-(-context // block_size) for context in contexts]
    row_bytes = 2 * heads.kv * heads.dim * dtype.itemsize
    set_bytes = sum(widths) * block_size * row_bytes
    sets = max(2, min(64, round(4 * CACHE_BYTES / set_bytes)))
    slots = sets * sum(widths) * block_size
    keys, values = (torch.empty(slots, heads.kv, heads.dim, dtype=dtype, device=device).normal_() for _ in "kv")
    order = iter(torch.randperm(sets * sum(widths), dtype=torch.int32).split(widths * sets))
    tables = []
    for _ in range(sets):
        table = torch.zeros(len(contexts), max(widths), dtype=torch.int32)
        for row, width in zip(table, widths, strict=True):
            row[:width] = next(order)
        tables.append(table.to(device))
    queries = [torch.randn(num_tokens, heads.query, heads.dim, device=device).to(dtype) for _ in range(sets)]
    return Inputs(keys, values, block_size, queries, tables, torch.tensor(contexts, dtype=torch.int32, device=device))


def measure(calls: Sequence[Callable[[], object]], budget_ms: float = 150) -> float:
    """Microseconds a call, the least of five: `calls` in turn, from a graph of which each replay is a few milliseconds long."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / times

    replay(2)
    times = max(1, int(budget_ms / 5 / replay(2)))
    return 1000 * min(replay(times) for _ in range(5)) / len(calls)


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises ArithmeticError where they differ by more than rounding; a NaN is such a difference."""
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    if not error < ROUGHLY:
        raise ArithmeticError(f"{name} differs from its twin by {error:.2e} of its size")


def time_decode(
    batch: int,
    context: int,
    heads: Heads = LLAMA_8B,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    config: DecodeConfig | None = None,
) -> Timing:
    """`batch` sequences of `context` tokens. Raises ArithmeticError where a result is wrong, OutOfResources where the
    configuration does not fit."""
    config = config or decode_config(heads.dim, heads.query // heads.kv, dtype)
    given = draw([context] * batch, batch, heads, block_size, dtype)
    kernel = PagedDecode(batch, heads.query, heads.kv, heads.dim, block_size, dtype, "cuda", config=config)
    out = torch.full_like(given.queries[0], float("nan"))
    kernel.plan(given.lens)

    def call(q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return kernel(q, given.keys, given.values, table, given.lens, out)

    first = slice(0, 4)
    keys, values = (side.unflatten(0, (-1, block_size)) for side in (given.keys, given.values))
    result = call(given.queries[0], given.tables[0])[first]
    rows = (given.queries[0][first].float(), keys, values, given.tables[0][first], given.lens[first])
    check("decode", result, paged_decode(*rows))
    us = measure([functools.partial(call, q, table) for q, table in zip(given.queries, given.tables, strict=True)])
    moved = (2 * batch * context * heads.kv + 2 * batch * heads.query) * heads.dim * dtype.itemsize
    return Timing(
        "decode",
        heads.name,
        f"{batch} x {context}",
        _words(config),
        us,
        1e6 * moved / READ_BYTES_PER_S,
        moved / us / 1e3,
        "GB/s",
    )


def time_plan(batch: int, context: int, heads: Heads = LLAMA_8B) -> float:
    """Microseconds of what decode does once a step."""
    kernel = PagedDecode(batch, heads.query, heads.kv, heads.dim, 16, torch.bfloat16, "cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return measure([functools.partial(kernel.plan, lens)] * 20, budget_ms=20)


def time_prefill(
    parts: Sequence[tuple[int, int]],
    heads: Heads = LLAMA_8B,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    config: PrefillConfig | None = None,
) -> Timing:
    """`parts`: tokens, and context with them, of each sequence. Raises as `time_decode` does."""
    config = config or prefill_config(heads.dim, dtype)
    starts = [0, *itertools.accumulate(tokens for tokens, _ in parts)]
    given = draw([context for _, context in parts], starts[-1], heads, block_size, dtype)
    query_starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
    out = torch.full_like(given.queries[0], float("nan"))

    def call(q: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return prefill_attention.paged_prefill(
            q, given.keys, given.values, table, query_starts, given.lens, block_size, out, config=config
        )

    # The twin holds all scores of one part: its last tokens are enough.
    last = slice(starts[-1] - min(256, parts[-1][0]), starts[-1])
    keys, values = (side.unflatten(0, (-1, block_size)) for side in (given.keys, given.values))
    result = call(given.queries[0], given.tables[0])[last]
    one = torch.tensor([0, last.stop - last.start])
    twin = paged_prefill(given.queries[0][last].float(), keys, values, given.tables[0][-1:], one, given.lens[-1:])
    check("prefill", result, twin)
    us = measure([functools.partial(call, q, table) for q, table in zip(given.queries, given.tables, strict=True)])
    seen = sum(tokens * (2 * context - tokens + 1) // 2 for tokens, context in parts)
    flops = 4 * seen * heads.query * heads.dim
    shape = " ".join(
        f"{len(list(same))} x {tokens} of {context}" for (tokens, context), same in itertools.groupby(parts)
    )
    return Timing(
        "prefill", heads.name, shape, _words(config), us, 1e6 * flops / BF16_FLOPS, flops / us / 1e6, "TFLOP/s"
    )


def time_whole(
    lengths: Sequence[int], heads: Heads = LLAMA_8B, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION
) -> Timing:
    """Prompts of these `lengths` as the engine computes them: on their own keys, one after the other, into one output.

    The configuration says how long the first call for these lengths took. Raises ArithmeticError where a result is wrong.
    """
    dtype, ends = torch.bfloat16, list(itertools.accumulate(lengths))
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    rows = max(start + padded(end - start) for start, end in spans)
    attend = WholePrompts(backend, heads.query, heads.kv, heads.dim, dtype, "cuda")
    set_bytes = (rows * heads.query + 2 * ends[-1] * heads.kv) * heads.dim * dtype.itemsize
    inputs = [
        [
            torch.empty(shape, dtype=dtype, device="cuda").normal_()
            for shape in ((rows, heads.query, heads.dim), (2, ends[-1], heads.kv, heads.dim))
        ]
        for _ in range(max(2, min(64, round(4 * CACHE_BYTES / set_bytes))))
    ]
    out = torch.empty(ends[-1], heads.query, heads.dim, dtype=dtype, device="cuda")

    def call(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        for start, end in spans:
            mixed = attend(q, kv, start, end)
            if len(mixed) == len(out):
                return mixed
            out[start:end] = mixed
        return out

    begun = time.perf_counter()
    result = call(*inputs[0])
    torch.cuda.synchronize()
    first_ms = 1000 * (time.perf_counter() - begun)
    (start, end), (q, kv) = spans[-1], inputs[0]
    last = slice(end - min(256, end - start), end)
    one = torch.tensor([0, last.stop - last.start])
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.tensor([end - start], device="cuda")
    twin = paged_prefill(q[last].float(), *(side[start:end][None] for side in kv), table, one, lens)
    check("whole prompts", result[last], twin)
    us = measure([functools.partial(call, *given) for given in inputs])
    flops = 4 * sum(length * (length + 1) // 2 for length in lengths) * heads.query * heads.dim
    shape = " ".join(f"{len(list(same))} x {length} of {length}" for length, same in itertools.groupby(lengths))
    config = f"{backend.name.lower()}, first {first_ms:.0f} ms"
    return Timing("whole", heads.name, shape, config, us, 1e6 * flops / BF16_FLOPS, flops / us / 1e6, "TFLOP/s")


DECODE_SHAPES = [(1, 1024), (8, 1024), (64, 1024), (64, 4096), (256, 1024), (1, 32768)]
PREFILL_SHAPES = [[(8192, 8192)], [(2048, 2048)] * 4, [(512, 512)], [(512, 8192)], [(64, 1024)] * 16]
WHOLE_SHAPES = [[8192], [2048] * 4, [1024] * 8, [512] * 16, [512], [1024], [1500], [5000]]

# Tile, warps, stages, programs of a multiprocessor, tiles of a program at least.
DECODE_SWEEP = [
    DecodeConfig(*numbers)
    for numbers in [
        (64, 4, 4, 2, 1), (64, 4, 4, 2, 2), (64, 4, 3, 3, 2), (64, 8, 4, 2, 1), (64, 8, 4, 2, 2), (32, 4, 6, 2, 2),
        (32, 4, 4, 4, 2), (32, 4, 5, 3, 4), (128, 8, 4, 1, 1), (16, 4, 8, 3, 4),
    ]
]  # fmt: skip
# Rows, tile, warps, stages.
PREFILL_SWEEP = [
    PrefillConfig(*numbers)
    for numbers in [
        (128, 64, 8, 3), (128, 64, 8, 5), (128, 64, 8, 7), (128, 128, 8, 3), (128, 128, 8, 5), (128, 32, 8, 7),
        (128, 32, 4, 3), (128, 32, 4, 5), (128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 5), (64, 32, 4, 5), (64, 128, 4, 3),
        (256, 64, 8, 3),
    ]
]  # fmt: skip


def tuned() -> Iterable[Timing]:
    """What the kernels' own tables choose, on all shapes."""
    for heads in (LLAMA_8B, QWEN3_600M, QWEN3_32B):
        for batch, context in DECODE_SHAPES:
            yield time_decode(batch, context, heads)
        for parts in PREFILL_SHAPES:
            yield time_prefill(parts, heads)
        for lengths in WHOLE_SHAPES:
            yield time_whole(lengths, heads)
            yield time_prefill([(length, length) for length in lengths], heads)


def sweep_decode(heads: Heads = LLAMA_8B) -> Iterable[Timing]:
    """All configurations on the shapes that matter most; those that do not fit are left out."""
    for batch, context in [(1, 1024), (8, 1024), (64, 1024), (64, 4096), (1, 32768)]:
        for config in DECODE_SWEEP:
            try:
                yield time_decode(batch, context, heads, config=config)
            except OutOfResources as error:
                print(f"decode   {_words(config)}: {error}")


def sweep_prefill(heads: Heads = LLAMA_8B) -> Iterable[Timing]:
    """See `sweep_decode`."""
    for parts in PREFILL_SHAPES[:4]:
        for config in PREFILL_SWEEP:
            try:
                yield time_prefill(parts, heads, config=config)
            except OutOfResources as error:
                print(f"prefill  {_words(config)}: {error}")


def _words(config: DecodeConfig | PrefillConfig) -> str:
    return " ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=["decode", "prefill"], help="other block sizes, warps and stages too")
    options = parser.parse_args()
    torch.manual_seed(0)
    timings = {None: tuned, "decode": sweep_decode, "prefill": sweep_prefill}[options.sweep]()
    for timing in timings:
        print(timing.line(), flush=True)
    for batch in (1, 64, 256):
        print(f"plan     {batch} sequences: {time_plan(batch, 1024):.2f} us")


if __name__ == "__main__":
    main()
