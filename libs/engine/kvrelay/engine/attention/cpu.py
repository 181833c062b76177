"""Attention on a CPU by torch's fused kernel, over blocks gathered a few megabytes at a time.

Decodes: the query heads that share a KV head become that head's query rows, so that a batch of single tokens is one call
on [B, Hkv, G, D] without repeating KV. Sequences are grouped by length: a group's gathered blocks stay in the core's cache, and
little of it is padding. Prefills: one call a sequence; without a prefix on the keys at hand, else on gathered blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kvrelay.engine.attention.base import AttentionBatch
from kvrelay.engine.cache import KvCache

GROUP_BYTES = 4 << 20
"""Of one layer's gathered KV for a group of decodes."""
GROUP_WASTE_TOKENS = 256
"""Padding that costs as much as a group more does, measured."""
MASK_ELEMENTS = 1 << 21
"""Bounds the mask of prefills with a prefix: their queries go in pieces."""


class CpuAttention:
    name = "torch-cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._workspace = Workspace()

    def prepare(self, batch: AttentionBatch, kv: KvCache) -> "CpuStep":
        nd, lens = batch.num_decodes, batch.context_lens
        counts = -(-lens // kv.block_size)
        groups = [
            self._group(rows, lens[rows], batch.block_tables[rows, : counts[rows].max()], kv)
            for rows in _split(lens[:nd], kv)
        ]
        prefills = []
        masked = 0
        for i in range(nd, len(lens)):
            start, end, context = int(batch.query_starts[i]), int(batch.query_starts[i + 1]), int(lens[i])
            if context == end - start:
                prefills.append(Prefill(start, end, context, None))
            else:
                blocks = batch.block_tables[i, : counts[i]].astype(np.int64)
                gather = Gathering(blocks, 1, kv, self._workspace)
                prefills.append(Prefill(start, end, context, gather))
                masked = max(masked, context)
        mask = CausalMask(
            masked, max((p.end - p.start for p in prefills if p.gather is not None), default=0), self._dtype
        )
        return CpuStep(torch.from_numpy(batch.slots), nd, groups, prefills, mask)

    def _group(
        self, rows: NDArray[np.int64], lens: NDArray[np.int64], tables: NDArray[np.int32], kv: KvCache
    ) -> "DecodeGroup":
        first_tokens = np.arange(tables.shape[1]) * kv.block_size
        blocks = np.where(first_tokens < lens[:, None], tables, 0).astype(np.int64)
        hidden = np.arange(tables.shape[1] * kv.block_size) >= lens[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        gather = Gathering(blocks.reshape(-1), len(rows), kv, self._workspace)
        return DecodeGroup(torch.from_numpy(rows), gather, mask[:, None, None])


def _split(lens: NDArray[np.int64], kv: KvCache) -> list[NDArray[np.int64]]:
    """Rows by length, longest first, cut where a group is full or padding would cost more than another group."""
    room = GROUP_BYTES // kv.token_bytes
    groups: list[list[int]] = []
    longest = waste = 0
    for row in np.argsort(-lens, kind="stable").tolist():
        waste += longest - int(lens[row])
        if not groups or (len(groups[-1]) + 1) * longest > room or waste > GROUP_WASTE_TOKENS:
            groups.append([])
            longest, waste = int(lens[row]), 0
        groups[-1].append(row)
    if len(groups) == 1:
        return [np.arange(len(lens))]  # as they stand: nothing to reorder
    return [np.asarray(group) for group in groups]


class Workspace:
    """Room for one layer's gathered blocks, used again by every group and layer; it grows to the largest."""

    def __init__(self) -> None:
        self._buffer = torch.empty((0, 0))

    def room(self, num_blocks: int, kv: KvCache) -> torch.Tensor:
        """[num_blocks, block_size, Hkv, D]: holds what is gathered there until the next gathering anywhere."""
        if num_blocks > len(self._buffer):
            self._buffer = torch.empty((num_blocks, *kv.data.shape[3:]), dtype=kv.data.dtype)
        return self._buffer[:num_blocks]


class Gathering:
    """The blocks of `batch` sequences, as many of each, in one layer after the other."""

    def __init__(self, blocks: NDArray[np.int64], batch: int, kv: KvCache, workspace: Workspace) -> None:
        self._indices = torch.from_numpy(np.concatenate((blocks, blocks + kv.num_blocks)))  # keys, then values
        self._room = workspace.room(len(self._indices), kv)
        self._keys, self._values = self._room.view(2, batch, -1, *kv.data.shape[4:]).transpose(2, 3)

    def __call__(self, layer: int, kv: KvCache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [batch, Hkv, L, D], that hold until the next call of any."""
        kv.gather(layer, self._indices, self._room)
        if dtype is self._room.dtype:
            return self._keys, self._values
        return self._keys.to(dtype), self._values.to(dtype)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    rows: torch.Tensor
    gather: Gathering
    mask: torch.Tensor
    """[B, 1, 1, L], added."""


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
        groups: list[DecodeGroup],
        prefills: list[Prefill],
        mask: CausalMask,
    ) -> None:
        self._slots = slots
        self._num_decodes = num_decodes
        self._groups = groups
        self._prefills = prefills
        self._mask = mask

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvCache) -> torch.Tensor:
        num_tokens = len(self._slots)
        if len(k) > num_tokens:
            k, v = k[:num_tokens], v[:num_tokens]
        if kv.data.dtype is not q.dtype:
            k, v = k.to(kv.data.dtype), v.to(kv.data.dtype)
        kv.write(layer, self._slots, k, v)
        if self._num_decodes == len(q):
            return self._decode(layer, q, kv)
        if kv.data.dtype is not q.dtype:
            # What a later step will read back is what this one attends to.
            k, v = k.to(q.dtype), v.to(q.dtype)
        parts = [self._decode(layer, q[: self._num_decodes], kv)] if self._groups else []
        for prefill in self._prefills:
            span = slice(prefill.start, prefill.end)
            if prefill.gather is None:
                parts.append(_causal(q[span], k[span], v[span]))
            else:
                parts.extend(self._continue(layer, q[span], prefill, prefill.gather, kv))
        if len(q) > num_tokens:
            parts.append(q.new_zeros((len(q) - num_tokens, *q.shape[1:])))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, q: torch.Tensor, kv: KvCache) -> torch.Tensor:
        if len(self._groups) == 1:
            return self._decode_group(layer, q, self._groups[0], kv)
        out = torch.empty(q.shape, dtype=q.dtype)
        for group in self._groups:
            out.index_copy_(0, group.rows, self._decode_group(layer, q.index_select(0, group.rows), group, kv))
        return out

    def _decode_group(self, layer: int, q: torch.Tensor, group: DecodeGroup, kv: KvCache) -> torch.Tensor:
        keys, values = group.gather(layer, kv, q.dtype)
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask).reshape(q.shape)

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
