"""The KV cache in a GPU's memory.

blocks ─▶ pack ─▶ device memory of one piece ─▶ its checksums' leaves, and to the host             reads
host ─▶ device memory of one piece ─▶ its checksums' leaves ─▶ unpack ─▶ blocks                    writes
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.blocks import SPAN
from kvrelay.common.errors import Unsupported
from kvrelay.common.layout import KvDtype
from kvrelay.engine.cache import TORCH_DTYPES, KvCache
from kvrelay.engine.convert import storage
from kvrelay.engine.models.config import ModelConfig
from kvrelay.kernels import reference

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Of spans that are on their way at a time: enough for a copy over PCIe to reach its speed."""
_OUTSIDE_DTYPES = TORCH_DTYPES | {KvDtype.FLOAT8_E4M3: torch.float8_e4m3fn}
"""What spans and rows may be of where they go to or come from."""


@dataclasses.dataclass(frozen=True, slots=True)
class CopyKernels:
    """See `reference`."""

    pack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = reference.pack
    unpack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = reference.unpack
    leaves: Callable[[torch.Tensor], torch.Tensor] = reference.leaves


TWINS = CopyKernels()
"""In plain torch."""


class _Lane:
    """Copies beside the steps, on a stream of their own. Within it one follows the other; at its end all are done."""

    def __init__(self, device: torch.device, staging_bytes: int = 0) -> None:
        self.staging = torch.empty(staging_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._current = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._current.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.__exit__(kind, error, trace)
        # Not the device: the steps go on. Also after an error: what is copied to or from is the caller's again.
        if self._stream is not None:
            self._stream.synchronize()


class DeviceKvCache(KvCache):
    """What is read was computed by steps that the host has seen the end of, what is written no step has been launched to read,
    and a call returns when all is where it should be: so nothing but the host orders copies and steps.

    One thread at a time may read spans, one write them, and one read and write rows.
    """

    def __init__(
        self,
        model: ModelConfig,
        dtype: KvDtype,
        block_size: int,
        kv_cache_bytes: int,
        device: torch.device,
        kernels: CopyKernels = TWINS,
    ) -> None:
        self._device = device
        super().__init__(model, dtype, block_size, kv_cache_bytes)
        self._kernels = kernels
        self._planes = self.data.view(model.num_layers * 2, -1, model.kv_size)
        """Keys and values of each layer, by slot."""
        staging_bytes = max(PIECE_BYTES, self.span_bytes(KvDtype.FLOAT32))
        self._reads, self._writes = (_Lane(device, staging_bytes) for _ in range(2))
        self._rows_lane = _Lane(device)

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
        with self._rows_lane:
            rows = self._new_rows(len(slots), dtype)
            self._kernels.pack(self._layer(layer), self._at(slots), rows.transpose(0, 1))
            torch.from_numpy(out).copy_(_bytes(rows), non_blocking=True)

    def write_rows(self, layer: int, slots: NDArray[np.int64], data: NDArray[np.uint8], dtype: KvDtype) -> None:
        with self._rows_lane:
            rows = self._new_rows(len(slots), dtype)
            _bytes(rows).copy_(torch.from_numpy(data), non_blocking=True)
            self._kernels.unpack(self._layer(layer), self._at(slots), rows.transpose(0, 1))

    def _layer(self, layer: int) -> torch.Tensor:
        return self._planes[2 * layer : 2 * layer + 2]

    def _new_rows(self, count: int, dtype: KvDtype) -> torch.Tensor:
        """[K and V, count, 1, E]"""
        return torch.empty(2, count, 1, self._model.kv_size, dtype=_torch_dtype(dtype), device=self._device)

    def _at(self, slots: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(slots, dtype=torch.int64).to(self._device)

    def read_span(self, slot: int, out: NDArray[np.uint8], dtype: KvDtype) -> None:
        self.read_spans([slot], [out], dtype)

    def write_span(self, slot: int, data: NDArray[np.uint8], dtype: KvDtype) -> None:
        self.write_spans([slot], [data], dtype)

    def read_spans(self, slots: Sequence[int], outs: Sequence[NDArray[np.uint8]], dtype: KvDtype) -> list[bytes]:
        with self._reads:
            found = []
            for at, piece, staged, spans in self._pieces(self._reads, slots, outs, dtype):
                self._kernels.pack(self._planes, at, spans)
                found.append(self._kernels.leaves(staged))
                for out, span in zip(piece, staged, strict=True):
                    torch.from_numpy(out).copy_(span, non_blocking=True)
            return _to_host(found)

    def write_spans(self, slots: Sequence[int], datas: Sequence[NDArray[np.uint8]], dtype: KvDtype) -> list[bytes]:
        with self._writes:
            found = []
            for at, piece, staged, spans in self._pieces(self._writes, slots, datas, dtype):
                for data, span in zip(piece, staged, strict=True):
                    span.copy_(torch.from_numpy(data), non_blocking=True)
                found.append(self._kernels.leaves(staged))
                self._kernels.unpack(self._planes, at, spans)
            return _to_host(found)

    def pin(self, memory: NDArray[np.uint8]) -> Callable[[], None]:
        """So that the GPU's copy engines read and write it as it lies. Copies to other memory are slower, and make their thread wait."""
        if self._device.type != "cuda":
            return super().pin(memory)
        cudart, address = torch.cuda.cudart(), memory.ctypes.data
        with torch.cuda.device(self._device):
            error = cudart.cudaHostRegister(address, memory.nbytes, 0)
        if error != cudart.cudaError.success:
            log.warning("a store's memory is not pinned, copies are slower: %s", cudart.cudaGetErrorString(error))
            return super().pin(memory)
        return lambda: cudart.cudaHostUnregister(address)

    def rehearse(self) -> None:
        """Copies of what lies in the first slots, there and back, so that kernels are compiled before they are needed."""
        span, row = (np.empty(size, np.uint8) for size in (self.span_bytes(self.dtype), self.token_bytes))
        self.read_span(0, span, self.dtype)
        self.write_span(0, span, self.dtype)
        first = np.zeros(1, np.int64)
        self.read_rows(0, first, row, self.dtype)
        self.write_rows(0, first, row, self.dtype)

    def _pieces(
        self, lane: _Lane, slots: Sequence[int], datas: Sequence[NDArray[np.uint8]], dtype: KvDtype
    ) -> Iterator[tuple[torch.Tensor, Sequence[NDArray[np.uint8]], torch.Tensor, torch.Tensor]]:
        """What fits into the lane's memory at a time: slots, the host's memory, the lane's as bytes [N, size] and as spans
        [N, layers × 2, 16, E]. The lane's is the same for each: what the stream does with one comes before the next."""
        size = self.span_bytes(dtype)
        most = len(lane.staging) // size
        at = self._at(slots)
        for first in range(0, len(slots), most):
            piece = datas[first : first + most]
            staged = lane.staging[: len(piece) * size].view(len(piece), size)
            spans = staged.view(_torch_dtype(dtype)).view(len(piece), len(self._planes), SPAN, -1)
            yield at[first : first + most], piece, staged, spans


def _torch_dtype(dtype: KvDtype) -> torch.dtype:
    storage(dtype)  # raises where it is not converted
    return _OUTSIDE_DTYPES[dtype]


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1).view(torch.uint8)


def _to_host(leaves: Sequence[torch.Tensor]) -> list[bytes]:
    return [span.tobytes() for piece in leaves for span in piece.cpu().numpy()]
