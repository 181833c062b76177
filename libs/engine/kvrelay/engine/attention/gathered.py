"""KV gathered out of its blocks, a few megabytes at a time, for kernels of torch's that want it in one piece.

Decodes: the query heads that share a KV head become that head's query rows, so that a batch of single tokens is one call
on [B, Hkv, G, D] without repeating KV. Sequences are grouped by length: a group's gathered blocks stay in the core's cache, and
little of it is padding.
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


class GatheredDecoding:
    """See `Decoding`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._workspace = Workspace()

    def prepare(self, batch: AttentionBatch, kv: KvCache) -> "GatheredDecodes":
        nd = batch.num_decodes
        lens = batch.context_lens[:nd]
        counts = -(-lens // kv.block_size)
        groups = [
            self._group(rows, lens[rows], batch.block_tables[rows, : counts[rows].max()], kv)
            for rows in _split(lens, kv)
        ]
        return GatheredDecodes(torch.from_numpy(batch.slots[:nd]), groups)

    def _group(
        self, rows: NDArray[np.int64], lens: NDArray[np.int64], tables: NDArray[np.int32], kv: KvCache
    ) -> "DecodeGroup":
        first_tokens = np.arange(tables.shape[1]) * kv.block_size
        blocks = np.where(first_tokens < lens[:, None], tables, 0).astype(np.int64)
        hidden = np.arange(tables.shape[1] * kv.block_size) >= lens[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        gather = Gathering(blocks.reshape(-1), len(rows), kv, self._workspace)
        return DecodeGroup(torch.from_numpy(rows), gather, mask[:, None, None])


class GatheredDecodes:
    def __init__(self, slots: torch.Tensor, groups: list["DecodeGroup"]) -> None:
        self._slots = slots
        self._groups = groups

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvCache) -> torch.Tensor:
        kv.write(layer, self._slots, k.to(kv.data.dtype), v.to(kv.data.dtype))
        if len(self._groups) == 1:
            return self._groups[0].attend(layer, q, kv)
        out = torch.empty(q.shape, dtype=q.dtype)
        for group in self._groups:
            out.index_copy_(0, group.rows, group.attend(layer, q.index_select(0, group.rows), kv))
        return out


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    rows: torch.Tensor
    gather: Gathering
    mask: torch.Tensor
    """[B, 1, 1, L], added."""

    def attend(self, layer: int, q: torch.Tensor, kv: KvCache) -> torch.Tensor:
        keys, values = self.gather(layer, kv, q.dtype)
        grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask).reshape(q.shape)


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
