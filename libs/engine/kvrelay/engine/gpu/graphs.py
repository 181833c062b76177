"""Decode steps as CUDA graphs: one for each of a few sizes, so that a step costs the host one launch."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.gpu.inputs import DECODE_WORDS, NOWHERE, Draw
from kvrelay.engine.gpu.staging import Staging

Decode = Callable[[torch.Tensor, Draw], torch.Tensor]
"""Computes a step of single tokens out of its words [11, S] on the device (see `inputs`), and gives their tokens [S]."""


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, then multiples of 8, which are sparser the larger they are; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most + 64, 64)]
    return [*(size for size in sizes if size < most), most]


class DecodeGraphs:
    def __init__(self, max_num_seqs: int, decode: Decode, staging: Staging, device: torch.device) -> None:
        self._sizes = sizes_up_to(max_num_seqs)
        self._decode = decode
        self._staging = staging
        self._words = torch.zeros(DECODE_WORDS * max_num_seqs, dtype=torch.int64, device=device)
        self._captured: dict[tuple[int, Draw], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def size_for(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    @torch.inference_mode()
    def capture(self) -> None:
        """All of them, the largest first: the others use its memory."""
        if not self._words.is_cuda:
            return
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            words = self._room(size)
            words.zero_()
            words[3] = NOWHERE
            for draw in Draw:
                self._decode(words, draw)  # kernels are compiled, workspaces made
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    tokens = self._decode(words, draw)
                self._captured[size, draw] = graph, tokens
        torch.cuda.synchronize()

    def run(self, words: NDArray[np.int64], draw: Draw) -> torch.Tensor:
        """`words` [11, S], S one of the sizes."""
        size = words.shape[1]
        room = self._room(size)
        self._staging.copy([words], room.view(-1))
        if (size, draw) not in self._captured:
            return self._decode(room, draw)
        graph, tokens = self._captured[size, draw]
        graph.replay()
        return tokens

    def _room(self, size: int) -> torch.Tensor:
        return self._words[: DECODE_WORDS * size].view(DECODE_WORDS, size)
