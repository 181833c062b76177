"""Parts of sequences between a GPU's cache and the transfer's staging, beside the steps and the event loop.

blocks ─▶ pack ─▶ staging ─▶ its checksum's leaves, to the host                       reads
staging ─▶ its checksum's leaves, to the host: are they right? ─▶ unpack ─▶ blocks    writes

Staging is the device's memory where the transport carries that; else the host's, and one more copy comes between.
"""

import functools
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.blocks import SPAN
from kvrelay.engine.gpu.kernels import CopyKernels, torch_dtype
from kvrelay.engine.gpu.lane import Lane
from kvrelay.kernels import reference
from kvrelay.transfer.copies import Check, Copy, Done, Part
from kvrelay.transfer.transport import Memory

T = TypeVar("T")

MIN_BYTES, STRIPE_BYTES = 256, 64
"""Of a last leaf: what the kernel does not hash is hashed on the host."""
LANES = 2
"""Copies at a time: one runs while the host learns of the other's end, and launches the next."""


def device_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes], one allocation that another process can map, which torch's need not be. Never given back but as a whole.

    Raises MemoryError.
    """
    import rmm  # UCXX brings it

    with torch.cuda.device(device):
        buffer = rmm.DeviceBuffer(size=num_bytes, mr=rmm.mr.CudaMemoryResource())
    return torch.as_tensor(buffer, device=device)


class Parts:
    """Whose the slots and the staging are, the caller sees to, until a copy is done. Without a GPU it is done at once."""

    def __init__(self, planes: torch.Tensor, kernels: CopyKernels) -> None:
        """`planes` [layers × 2, slots, E]: keys and values of each layer."""
        self._planes = planes
        self._kernels = kernels
        self._device = planes.device
        self._threads = ThreadPoolExecutor(LANES, thread_name_prefix="parts") if planes.is_cuda else None
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for _ in range(LANES):
            self._lanes.put(Lane(self._device))

    def read(self, part: Part, slots: NDArray[np.int64], out: Memory, *, hashed: bool) -> Copy[bytes]:
        """Of the part's tokens, which lie in `slots`, into `out`; and the leaves of what lies there then, if `hashed`."""
        torch_dtype(part.dtype)  # raises here, not there
        return self._begin(functools.partial(self._read, part, slots, out, hashed=hashed))

    def write(self, part: Part, slots: NDArray[np.int64], data: Memory, check: Check | None) -> Copy[None]:
        torch_dtype(part.dtype)
        return self._begin(functools.partial(self._write, part, slots, data, check))

    def _begin(self, work: Callable[[], T]) -> Copy[T]:
        if self._threads is None:
            return Done(self._in_lane(work))
        return self._threads.submit(self._in_lane, work)

    def _in_lane(self, work: Callable[[], T]) -> T:
        lane = self._lanes.get()
        try:
            # What was made in inference mode can be written to in it alone.
            with torch.inference_mode(), lane:
                return work()
        finally:
            self._lanes.put(lane)

    def _read(self, part: Part, slots: NDArray[np.int64], out: Memory, *, hashed: bool) -> bytes:
        staged = _tensor(out)
        packed = staged if staged.device == self._device else torch.empty_like(staged, device=self._device)
        planes = self._planes[2 * part.layer : 2 * part.layers.stop]
        for at, runs in self._runs(part, slots, packed):
            self._kernels.pack(planes, at, runs)
        if packed is not staged:
            staged.copy_(packed, non_blocking=True)
        return self._leaves(packed) if hashed else b""

    def _write(self, part: Part, slots: NDArray[np.int64], data: Memory, check: Check | None) -> None:
        packed = _tensor(data).to(self._device, non_blocking=True)
        if check is not None:
            check(self._leaves(packed))
        planes = self._planes[2 * part.layer : 2 * part.layers.stop]
        for at, runs in self._runs(part, slots, packed):
            self._kernels.unpack(planes, at, runs)

    def _leaves(self, packed: torch.Tensor) -> bytes:
        """When the lane is done with them."""
        last = packed.nbytes % reference.LEAF_BYTES
        is_short = 0 < last < MIN_BYTES or last % STRIPE_BYTES
        hash_leaves = reference.leaves if is_short else self._kernels.leaves
        return hash_leaves(packed[None]).cpu().numpy().tobytes()

    def _runs(
        self, part: Part, slots: NDArray[np.int64], packed: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Whole spans, whose slots lie together, and single tokens before and behind them: slots [N] where the runs begin, and what
        lies there in `packed`, [N, planes, length, E]."""
        rows = packed.view(torch_dtype(part.dtype)).view(2 * part.num_layers, part.num_tokens, -1)
        first = min(-part.first_token % SPAN, part.num_tokens)
        end = part.num_tokens - (part.num_tokens - first) % SPAN
        for start, stop, length in ((0, first, 1), (first, end, SPAN), (end, part.num_tokens, 1)):
            if start < stop:
                at = torch.from_numpy(np.ascontiguousarray(slots[start:stop:length]))
                yield at.to(self._device), rows[:, start:stop].unflatten(1, (-1, length)).transpose(0, 1)


def _tensor(memory: Memory) -> torch.Tensor:
    if isinstance(memory, torch.Tensor):
        return memory
    assert isinstance(memory, np.ndarray)
    return torch.from_numpy(memory)
