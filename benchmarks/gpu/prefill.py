"""Attention of prompts on a GPU by each backend that is there, as the engine calls it: checked against the twin, then timed.

    export PYTHONPATH=kernels:libs/engine:libs/common:libs/transfer
    python -m benchmarks.gpu.prefill

Keys and values are in the cache, and for whole prompts at hand too. A plan is what the host does once a step, for all layers; it is
not part of the other figure. The floor is that of the tensor cores.
"""

import argparse
import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.attention import BF16_FLOPS, LLAMA_8B, Inputs, Timing, check, draw, measure
from benchmarks.gpu.shapes import SHAPES
from kvrelay.common.errors import Unsupported
from kvrelay.engine.attention.prefill import Operands, Part, Prefill, attend
from kvrelay.engine.attention.registry import choose_device
from kvrelay.engine.attention.triton import TritonAttention
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.inputs import DeviceInputs, Prompt
from kvrelay.engine.models.config import HfConfig
from kvrelay.engine.models.registry import find
from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.reference import paged_prefill

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
BACKENDS = ["cudnn", "flash-attention-4", "flashinfer", "triton"]
Parts = Sequence[tuple[int, int]]
"""Of each sequence: tokens, and context with them."""
STEPS: list[Parts] = [[(8192, 8192)], [(2048, 2048)] * 4, [(512, 8192)]]
CHECKED = 256
"""Tokens of each part, its last: the twin holds all scores."""


def prefill_of(backend: str) -> Prefill:
    """For the 8B shape. Prints the reason. Raises Unsupported where the backend is not there, or cannot."""
    config = EngineConfig(
        model=Path(), device="cuda", attention=backend, block_size=BLOCK_SIZE, max_num_batched_tokens=8192
    )
    values = HfConfig(SHAPES["llama-3.1-8b"])
    attention, reason = choose_device(config, find(values).describe(values), DTYPE, DTYPE)
    print(reason, flush=True)
    assert isinstance(attention, TritonAttention)
    return attention.prefill


def inputs_of(parts: Parts, table: torch.Tensor) -> DeviceInputs:
    """What attention reads of a step."""
    starts = [0, *itertools.accumulate(tokens for tokens, _ in parts)]
    none = torch.empty(0, device="cuda")
    return DeviceInputs(
        token_ids=none,
        positions=none,
        slots=none,
        query_starts=torch.tensor(starts, dtype=torch.int32, device="cuda"),
        context_lens=torch.tensor([context for _, context in parts], dtype=torch.int32, device="cuda"),
        block_tables=table,
        last=None,
        feed_rows=none,
        sampling=SampleParams(none, none, none, none, none, none, none),
        num_decodes=0,
        prompts=tuple(
            Prompt(begin, end, context)
            for (begin, end), (_, context) in zip(itertools.pairwise(starts), parts, strict=True)
        ),
    )


def operands(given: Inputs, inputs: DeviceInputs, planned: Sequence[Part], q: torch.Tensor) -> Operands:
    """With room behind the queries, and keys and values at hand, where `planned` asks for them."""
    num_tokens = len(q)
    room = q.new_zeros(max(part.rows for part in planned), *q.shape[1:])
    room[:num_tokens] = q
    at_hand = None
    if any(part.at_hand for part in planned):
        offsets = torch.arange(BLOCK_SIZE, device="cuda")
        slots = torch.cat(
            [
                (table.long()[:, None] * BLOCK_SIZE + offsets).flatten()[: prompt.context][prompt.start - prompt.end :]
                for prompt, table in zip(inputs.prompts, inputs.block_tables, strict=True)
            ]
        )
        at_hand = torch.stack((given.keys[slots], given.values[slots]))
    return Operands(room, at_hand, given.keys, given.values)


def check_step(backend: str, given: Inputs, inputs: DeviceInputs, q: torch.Tensor, out: torch.Tensor) -> None:
    """Raises ArithmeticError."""
    keys, values = (side.unflatten(0, (-1, BLOCK_SIZE)) for side in (given.keys, given.values))
    for row, prompt in enumerate(inputs.prompts):
        last = slice(max(prompt.start, prompt.end - CHECKED), prompt.end)
        starts = torch.tensor([0, last.stop - last.start])
        one = slice(row, row + 1)
        twin = paged_prefill(q[last].float(), keys, values, inputs.block_tables[one], starts, given.lens[one])
        check(f"{backend}, part {row}", out[last], twin)


def time_step(backend: str, prefill: Prefill, parts: Parts) -> Timing:
    """Raises ArithmeticError where a result is wrong."""
    heads, num_tokens = LLAMA_8B, sum(tokens for tokens, _ in parts)
    given = draw([context for _, context in parts], num_tokens, heads, BLOCK_SIZE, DTYPE)
    # Two sets are more than the second-level cache holds, and no more than a backend may keep plans for.
    queries, inputs = given.queries[:2], [inputs_of(parts, table) for table in given.tables[:2]]
    for _ in range(2):  # what is measured is the second time
        torch.cuda.synchronize()
        begun = time.perf_counter()
        planned = [prefill.plan(step) for step in inputs]
        plan_us = 1e6 * (time.perf_counter() - begun) / len(inputs)
    calls = []
    for q, step, made in zip(queries, inputs, planned, strict=True):
        call = partial(attend, made, operands(given, step, made, q), torch.full_like(q, float("nan")))
        check_step(backend, given, step, q, call())
        calls.append(call)
    us = measure(calls)
    flops = 4 * sum(tokens * (2 * context - tokens + 1) // 2 for tokens, context in parts) * heads.query * heads.dim
    shape = " ".join(
        f"{len(list(same))} x {tokens} of {context}" for (tokens, context), same in itertools.groupby(parts)
    )
    config = f"{backend}, plan {plan_us:.0f} us"
    return Timing("prefill", heads.name, shape, config, us, 1e6 * flops / BF16_FLOPS, flops / us / 1e6, "TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="*", default=BACKENDS, help=f"of {', '.join(BACKENDS)}; all")
    options = parser.parse_args()
    torch.manual_seed(0)
    for backend in options.backends:
        begun = time.perf_counter()
        try:
            prefill = prefill_of(backend)
        except Unsupported as error:
            print(f"{backend}: {error}", flush=True)
            continue
        print(f"{backend}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
        for parts in STEPS:
            print(time_step(backend, prefill, parts).line(), flush=True)


if __name__ == "__main__":
    main()
