"""The KV cache in a GPU's memory.

blocks ─▶ pack ─▶ device memory of one piece ─▶ its checksums' leaves, and to the host             reads
host ─▶ device memory of one piece ─▶ its checksums' leaves ─▶ unpack ─▶ blocks                    writes
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.blocks import SPAN
from kvrelay.common.errors import Unsupported
from kvrelay.common.layout import KvDtype
from kvrelay.engine.cache import TORCH_DTYPES, KvCache
from kvrelay.engine.gpu.kernels import TWINS, CopyKernels, torch_dtype
from kvrelay.engine.gpu.lane import Lane
from kvrelay.engine.gpu.parts import Parts, device_memory
from kvrelay.engine.models.config import ModelConfig
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.transport import Memory

log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Of spans that are on their way at a time: enough for a copy over PCIe to reach its speed."""


class DeviceKvCache(KvCache):
    """What is read was computed by steps that the host has seen the end of, what is written no step has been launched to read,
    and a call returns when all is where it should be: so nothing but the host orders copies and steps.

    One thread at a time may read spans, one write them; parts are read and written by threads of their own.
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
        self._reads, self._writes = (Lane(device, staging_bytes) for _ in range(2))
        self._parts = Parts(self._planes, kernels)

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

    def read_part(self, part: Part, blocks: Sequence[int], out: Memory, *, hashed: bool) -> Copy[bytes]:
        return self._parts.read(part, self.slots(blocks, part.first_token, part.num_tokens), out, hashed=hashed)

    def write_part(self, part: Part, blocks: Sequence[int], data: Memory, check: Check | None) -> Copy[None]:
        return self._parts.write(part, self.slots(blocks, part.first_token, part.num_tokens), data, check)

    def enter_thread(self) -> None:
        if self.data.is_cuda:
            torch.cuda.set_device(self.data.device)

    def staging(self, num_bytes: int, *, on_device: bool) -> Memory:
        if not on_device or self._device.type != "cuda":
            memory = super().staging(num_bytes, on_device=False)
            assert isinstance(memory, np.ndarray)
            self.pin(memory)  # for as long as the process lives
            return memory
        try:
            return device_memory(num_bytes, self._device)
        except MemoryError as error:
            raise Unsupported(
                f"staging of {num_bytes} bytes does not fit beside the KV cache", "staging_bytes"
            ) from error

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
        span = np.empty(self.span_bytes(self.dtype), np.uint8)
        self.read_span(0, span, self.dtype)
        self.write_span(0, span, self.dtype)
        # Single tokens and whole spans, of one layer and of several.
        for part in (Part(0, 1, 0, 1, self.dtype), Part(0, self._model.num_layers, 15, 17, self.dtype)):
            packed = torch.empty(part.num_rows * self.token_bytes, dtype=torch.uint8, device=self._device)
            self.read_part(part, range(2), packed, hashed=True).result()
            self.write_part(part, range(2), packed, lambda found: None).result()

    def _pieces(
        self, lane: Lane, slots: Sequence[int], datas: Sequence[NDArray[np.uint8]], dtype: KvDtype
    ) -> Iterator[tuple[torch.Tensor, Sequence[NDArray[np.uint8]], torch.Tensor, torch.Tensor]]:
        """What fits into the lane's memory at a time: slots, the host's memory, the lane's as bytes [N, size] and as spans
        [N, layers × 2, 16, E]. The lane's is the same for each: what the stream does with one comes before the next."""
        size = self.span_bytes(dtype)
        most = len(lane.staging) // size
        at = self._at(slots)
        for first in range(0, len(slots), most):
            piece = datas[first : first + most]
            staged = lane.staging[: len(piece) * size].view(len(piece), size)
            spans = staged.view(torch_dtype(dtype)).view(len(piece), len(self._planes), SPAN, -1)
            yield at[first : first + most], piece, staged, spans


def _to_host(leaves: Sequence[torch.Tensor]) -> list[bytes]:
    return [span.tobytes() for piece in leaves for span in piece.cpu().numpy()]
