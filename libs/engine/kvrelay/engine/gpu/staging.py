"""The way of a step's numbers to the device, which does not wait for what the device does."""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray

PIECES = 8
"""Copies on their way at once: a step has two or three, and two steps are in work."""


class Staging:
    """Pinned pieces of memory in turn, which grow to what is asked of them; each is free again when its copy is over. On a CPU
    nothing is in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces = itertools.cycle([_Piece() for _ in range(PIECES if device.type == "cuda" else 0)])

    def send(self, parts: list[NDArray[np.int64]]) -> list[torch.Tensor]:
        """All in one copy."""
        sizes = [part.size for part in parts]
        flat = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        self.copy(parts, flat)
        return [words.view(part.shape) for words, part in zip(flat.split(sizes), parts, strict=True)]

    def copy(self, parts: list[NDArray[np.int64]], target: torch.Tensor) -> None:
        """One after the other into `target` int64 [sum of sizes]."""
        flat = [part.reshape(-1) for part in parts]
        if self._device.type == "cuda":
            next(self._pieces).copy(flat, target)
        else:
            np.concatenate(flat, out=target.numpy())


class _Piece:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int64)
        self._over = torch.cuda.Event()

    def copy(self, flat: list[NDArray[np.int64]], target: torch.Tensor) -> None:
        count = len(target)
        self._over.synchronize()
        if count > len(self._memory):
            self._memory = torch.empty(1 << max(12, (count - 1).bit_length()), dtype=torch.int64, pin_memory=True)
        np.concatenate(flat, out=self._memory[:count].numpy())
        target.copy_(self._memory[:count], non_blocking=True)
        self._over.record()
