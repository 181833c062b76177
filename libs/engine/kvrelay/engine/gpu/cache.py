"""The KV cache in a GPU's memory."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.blocks import SPAN
from kvrelay.common.errors import Unsupported
from kvrelay.common.layout import KvDtype
from kvrelay.engine.cache import TORCH_DTYPES, KvCache
from kvrelay.engine.convert import Bits, convert, storage
from kvrelay.engine.models.config import ModelConfig


class DeviceKvCache(KvCache):
    """Rows go in and out by a stream of their own: what they copy, no step in flight writes."""

    def __init__(
        self, model: ModelConfig, dtype: KvDtype, block_size: int, kv_cache_bytes: int, device: torch.device
    ) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        super().__init__(model, dtype, block_size, kv_cache_bytes)

    def _allocate(self) -> torch.Tensor:
        size = self.num_blocks * self.block_size * self._model.num_layers * 2 * self._model.kv_size
        try:
            return torch.zeros(size, dtype=TORCH_DTYPES[self.dtype], device=self._device)
        except torch.OutOfMemoryError as error:
            raise Unsupported(
                f"{self.num_blocks} KV blocks do not fit into the memory of {self._device}: {error}", "kv_cache_bytes"
            ) from error

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            # No target is another pair's source.
            sources, targets = torch.tensor(pairs, device=self._device).T
            self.data[:, :, targets] = self.data[:, :, sources]

    def read_rows(self, layer: int, slots: NDArray[np.int64], out: NDArray[np.uint8], dtype: KvDtype) -> None:
        rows = out.view(storage(dtype)).reshape(2, len(slots), self._model.kv_size)
        with torch.cuda.stream(self._stream):
            at = torch.from_numpy(slots).to(self._device)
            for side, cached in enumerate((self.keys[layer], self.values[layer])):
                self._deliver(cached.index_select(0, at), rows[side], dtype)

    def write_rows(self, layer: int, slots: NDArray[np.int64], data: NDArray[np.uint8], dtype: KvDtype) -> None:
        rows = data.view(storage(dtype)).reshape(2, len(slots), self._model.kv_size)
        with torch.cuda.stream(self._stream):
            at = torch.from_numpy(slots).to(self._device)
            for side, cached in enumerate((self.keys[layer], self.values[layer])):
                cached.index_copy_(0, at, self._fetch(rows[side], dtype).view(len(slots), *cached.shape[1:]))
            self._finish()

    def read_span(self, slot: int, out: NDArray[np.uint8], dtype: KvDtype) -> None:
        with torch.cuda.stream(self._stream):
            self._deliver(self._span_of(slot).contiguous(), self._span(out, dtype), dtype)

    def write_span(self, slot: int, data: NDArray[np.uint8], dtype: KvDtype) -> None:
        with torch.cuda.stream(self._stream):
            span = self._span_of(slot)
            span.copy_(self._fetch(self._span(data, dtype), dtype).view(span.shape))
            self._finish()

    def _span_of(self, slot: int) -> torch.Tensor:
        """[layers, 2, 16, Hkv, D]"""
        return self.data.flatten(2, 3)[:, :, slot : slot + SPAN]

    def _deliver(self, rows: torch.Tensor, out: Bits, dtype: KvDtype) -> None:
        """Contiguous rows to the host, as `dtype`. They are there when this returns."""
        host = rows.cpu().view(-1).view(torch.uint8).numpy().view(storage(self.dtype)).reshape(out.shape)
        if dtype is self.dtype:
            np.copyto(out, host)
        else:
            convert(host, self.dtype, out, dtype)

    def _fetch(self, rows: Bits, dtype: KvDtype) -> torch.Tensor:
        """Rows of the host, of `dtype`, as the cache's, flat, on the device."""
        if dtype is not self.dtype:
            converted = np.empty(rows.shape, storage(self.dtype))
            convert(rows, dtype, converted, self.dtype)
            rows = converted
        raw = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
        return torch.from_numpy(raw).view(TORCH_DTYPES[self.dtype]).to(self._device)

    def _finish(self) -> None:
        """What is read next may be read by another stream."""
        if self._stream is not None:
            self._stream.synchronize()
