"""Attention of prompts by FlashInfer, on paged KV: planned once a step on the host, from numbers that are there."""

import itertools
from collections.abc import Sequence

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from kvrelay.engine.attention.prefill import Operands, Run
from kvrelay.engine.gpu.inputs import DeviceInputs, Prompt

WORKSPACE_BYTES = 128 << 20
"""As FlashInfer recommends. It keeps partial results there of prompts that are divided along their keys."""
FEW = 64
"""Tokens up to which FlashInfer takes another kernel, on a Hopper."""


class Planner:
    """Two wrappers take turns, since a plan is copied to the device out of memory of its wrapper's, which the next plan writes
    over, and the host may be a step ahead."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: str
    ) -> None:
        self._shape = num_heads, num_kv_heads, head_dim, block_size
        self._dtype, self._device = dtype, device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._turns = itertools.cycle(
            [(BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"), torch.cuda.Event()) for _ in range(2)]
        )

    def plan(self, prompts: Sequence[Prompt], tables: torch.Tensor) -> BatchPrefillWithPagedKVCacheWrapper:
        """For queries of `prompts`, one after the other, and the blocks that `tables` int32 [S, max_blocks] has of each.

        Waits only for the copy of the plan before the last, which is done where the host is one step ahead.
        """
        wrapper, copied = next(self._turns)
        copied.synchronize()
        block_size = self._shape[-1]
        counts = [-(-prompt.context // block_size) for prompt in prompts]
        starts = [prompt.start - prompts[0].start for prompt in prompts] + [prompts[-1].end - prompts[0].start]
        last = [prompt.context - (count - 1) * block_size for prompt, count in zip(prompts, counts, strict=True)]
        wrapper.plan(
            _on_host(starts),
            _on_host([0, *itertools.accumulate(counts)]),
            torch.cat([table[:count] for table, count in zip(tables, counts, strict=True)]),
            _on_host(last),
            *self._shape,
            causal=True,
            q_data_type=self._dtype,
        )
        copied.record()
        return wrapper

    def part(self, inputs: DeviceInputs, run: Run) -> "FlashInferPart":
        first = inputs.num_decodes + run.first
        tables = inputs.block_tables[first : first + len(run.prompts)]
        return FlashInferPart(run, self.plan(run.prompts, tables), self._shape[-1])

    def rehearse(self, max_tokens: int) -> None:
        """Has kernels compiled, which may take minutes where they were never before. Raises what FlashInfer does."""
        num_heads, num_kv_heads, head_dim, block_size = self._shape
        block = torch.zeros(2, 1, block_size, num_kv_heads, head_dim, dtype=self._dtype, device=self._device)
        for length in (1, min(FEW + 1, max_tokens)):
            tables = torch.zeros(1, -(-length // block_size), dtype=torch.int32, device=self._device)
            q = torch.zeros(length, num_heads, head_dim, dtype=self._dtype, device=self._device)
            self.plan([Prompt(0, length, length)], tables).run(q, tuple(block), out=torch.empty_like(q))
        torch.cuda.synchronize(self._device)


class FlashInferPart:
    at_hand = False

    def __init__(self, run: Run, planned: BatchPrefillWithPagedKVCacheWrapper, block_size: int) -> None:
        self.tokens = run.tokens
        self.rows = run.tokens.stop
        self._planned = planned
        self._block_size = block_size

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        keys, values = (side.unflatten(0, (-1, self._block_size)) for side in (given.keys, given.values))
        self._planned.run(given.q[self.tokens], (keys, values), out=out)
        return out


def _on_host(numbers: list[int]) -> torch.Tensor:
    """Pinned, so that FlashInfer's copy does not wait."""
    return torch.tensor(numbers, dtype=torch.int32).pin_memory()
