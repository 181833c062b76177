"""Attention on a CPU: decodes by what is given for them, prefills by torch's fused kernel.

Prefills: one call a sequence; without a prefix on the keys at hand, else on gathered blocks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from kvrelay.engine.attention.base import AttentionBatch, Heads
from kvrelay.engine.attention.gathered import Gathering, Workspace
from kvrelay.engine.cache import KvCache

MASK_ELEMENTS = 1 << 21
"""Bounds the mask of prefills with a prefix: their queries go in pieces."""


class Decodes(Protocol):
    """The first parts of a step, of one token each."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvCache) -> torch.Tensor:
        """Writes `k`, `v` [S, Hkv, D] into the cache, then attends: `q` [S, Hq, D] → [S, Hq, D]."""
        ...


class Decoding(Protocol):
    def prepare(self, batch: AttentionBatch, kv: KvCache) -> Decodes:
        """Of the batch's decodes, of which there is at least one."""
        ...


class CpuAttention:
    def __init__(self, name: str, dtype: torch.dtype, decoding: Decoding) -> None:
        self.name = name
        self._dtype = dtype
        self._decoding = decoding
        self._workspace = Workspace()

    def prepare(self, batch: AttentionBatch, kv: KvCache) -> "CpuStep":
        nd, lens = batch.num_decodes, batch.context_lens
        decodes = self._decoding.prepare(batch, kv) if nd else None
        prefills = []
        masked = 0
        for i in range(nd, len(lens)):
            start, end, context = int(batch.query_starts[i]), int(batch.query_starts[i + 1]), int(lens[i])
            if context == end - start:
                prefills.append(Prefill(start, end, context, None))
            else:
                blocks = batch.block_tables[i, : -(-context // kv.block_size)].astype(np.int64)
                gather = Gathering(blocks, 1, kv, self._workspace)
                prefills.append(Prefill(start, end, context, gather))
                masked = max(masked, context)
        mask = CausalMask(
            masked, max((p.end - p.start for p in prefills if p.gather is not None), default=0), self._dtype
        )
        return CpuStep(torch.from_numpy(batch.slots), nd, decodes, prefills, mask)


@dataclass(frozen=True, slots=True)
class Prefill:
    start: int
    end: int
    context: int
    gather: Gathering | None
    """Of its blocks; None where all that it attends to is computed in this step."""


class CausalMask:
    """For queries that end where the keys end. One mask serves all lengths: a shorter one is its right part."""

    def __init__(self, context: int, queries: int, dtype: torch.dtype) -> None:
        self.rows = min(queries, max(16, MASK_ELEMENTS // max(context, 1)))
        self._mask = torch.zeros((self.rows, context), dtype=dtype)
        if self.rows:
            own = torch.full((self.rows, self.rows), float("-inf"), dtype=dtype).triu_(1)
            self._mask[:, context - self.rows :] = own

    def part(self, queries: int, context: int) -> torch.Tensor:
        """[queries, context]."""
        return self._mask[self.rows - queries :, self._mask.shape[1] - context :]


class CpuStep:
    def __init__(
        self,
        slots: torch.Tensor,
        num_decodes: int,
        decodes: Decodes | None,
        prefills: list[Prefill],
        mask: CausalMask,
    ) -> None:
        self._num_tokens = len(slots)
        self._num_decodes = num_decodes
        self._prefill_slots = slots[num_decodes:]
        self._decodes = decodes
        self._prefills = prefills
        self._mask = mask

    def mix(self, layer: int, heads: Heads, kv: KvCache) -> torch.Tensor:
        return self.attend(layer, *heads.rotated(), kv)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvCache) -> torch.Tensor:
        """`k`, `v` [T', Hkv, D], `q` [T', Hq, D] → [T', Hq, D]."""
        nd, end = self._num_decodes, self._num_tokens
        parts = [] if self._decodes is None else [self._decodes.attend(layer, q[:nd], k[:nd], v[:nd], kv)]
        if self._prefills:
            k, v = k[:end].to(kv.data.dtype), v[:end].to(kv.data.dtype)
            kv.write(layer, self._prefill_slots, k[nd:], v[nd:])
            # What a later step will read back is what this one attends to.
            k, v = k.to(q.dtype), v.to(q.dtype)
        for prefill in self._prefills:
            span = slice(prefill.start, prefill.end)
            if prefill.gather is None:
                parts.append(_causal(q[span], k[span], v[span]))
            else:
                parts.extend(self._continue(layer, q[span], prefill, prefill.gather, kv))
        if len(q) > end:
            parts.append(q.new_zeros((len(q) - end, *q.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _continue(
        self, layer: int, q: torch.Tensor, prefill: Prefill, gather: Gathering, kv: KvCache
    ) -> list[torch.Tensor]:
        keys, values = gather(layer, kv, q.dtype)
        parts = []
        for first in range(0, len(q), self._mask.rows):
            piece = q[first : first + self._mask.rows]
            end = prefill.context - len(q) + first + len(piece)
            mask = self._mask.part(len(piece), end)
            parts.append(_attend(piece, keys[:, :, :end], values[:, :, :end], mask))
        return parts


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A whole prompt [T, H, D], on its own keys."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`q` [T, Hq, D] on keys and values [1, Hkv, L, D] under `mask` [T, L]."""
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
