"""Decodes on paged KV, where it lies, by a compiled kernel."""

import torch

from kvrelay.engine.attention.base import AttentionBatch
from kvrelay.engine.cache import KvCache
from kvrelay.kernels.cpu.ops import DecodeKernel, PagedDecode


class PagedDecoding:
    """See `Decoding`."""

    def __init__(self, kernel: DecodeKernel) -> None:
        self._kernel = kernel

    def prepare(self, batch: AttentionBatch, kv: KvCache) -> "PagedDecodes":
        nd = batch.num_decodes
        return PagedDecodes(self._kernel.prepare(batch.block_tables[:nd], batch.context_lens[:nd], kv.block_size))


class PagedDecodes:
    def __init__(self, decode: PagedDecode) -> None:
        self._decode = decode

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvCache) -> torch.Tensor:
        return self._decode(q, k, v, kv.keys[layer], kv.values[layer])
