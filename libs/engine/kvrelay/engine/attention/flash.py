"""Attention of prompts by FlashAttention-4: whole ones on keys and values at hand, others on paged KV; a run in one call.

Lengths are read on the device. Calls are for flash-attn-4 4.0.0b36, whose public function takes no `out`.
"""

import functools

import torch
from flash_attn.cute.interface import _flash_attn_fwd

from kvrelay.engine.attention.prefill import Operands, Pages, Prefill, Run
from kvrelay.engine.gpu.inputs import DeviceInputs

MAJOR_CAPABILITIES = (9, 10, 11)
"""Of GPUs for which it has kernels on paged KV with blocks of any size: Hopper, and Blackwell but for 12."""
MANY = 257
"""Prompts from which on FlashAttention finds them by another kernel."""


def attend_whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Each of `starts` int32 [S + 1] on its own part of `k` and `v` [T, Hkv, D]; `q` and `out` are [T, Hq, D]."""
    # A bound of the lengths would choose between compiled kernels; without one there is one of them for all steps.
    _flash_attn_fwd(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, out=out)
    return out


def attend_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """`keys` and `values` [blocks, block_size, Hkv, D], `tables` int32 [S, max_blocks], `lens` int32 [S] with the context."""
    _flash_attn_fwd(
        q, keys, values, cu_seqlens_q=starts, seqused_k=lens, page_table=tables, causal=True, out=out
    )  # fmt: skip
    return out


class FlashWhole(Pages):
    at_hand = True

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        assert given.at_hand is not None, "asked for"
        # Nothing behind the run: what is in a tile and of no prompt is multiplied by 0 and must be a number.
        k, v = given.at_hand[:, self.tokens]
        return attend_whole(given.q[self.tokens], k, v, self.starts, out)


class FlashPages(Pages):
    def __init__(self, block_size: int, inputs: DeviceInputs, run: Run) -> None:
        super().__init__(inputs, run)
        self._block_size = block_size

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        keys, values = (side.unflatten(0, (-1, self._block_size)) for side in (given.keys, given.values))
        return attend_pages(given.q[self.tokens], keys, values, self.tables, self.starts, self.lens, out)


def flash_prefill(block_size: int) -> Prefill:
    return Prefill("flash-attention-4", functools.partial(FlashPages, block_size), FlashWhole, from_tokens=1)


def rehearse(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    max_tokens: int,
    max_prompts: int,
) -> None:
    """Has all kernels compiled that steps up to these sizes take: seconds each. Raises what FlashAttention does."""
    for lengths in ([1], [max_tokens], *([[1] * MANY] if max_prompts >= MANY else [])):
        lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        q = torch.zeros(sum(lengths), num_heads, head_dim, dtype=dtype, device=device)
        k = torch.zeros(len(q), num_kv_heads, head_dim, dtype=dtype, device=device)
        block = torch.zeros(1, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)
        tables = torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32, device=device)
        out = torch.empty_like(q)
        attend_whole(q, k, k, starts, out)
        attend_pages(q, block, block, tables, starts, lens, out)
    torch.cuda.synchronize(device)
