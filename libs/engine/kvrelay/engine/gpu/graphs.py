"""Steps as CUDA graphs, captured for a few sizes at the start, so that a step costs the host one launch."""

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.gpu.inputs import DECODE_WORDS, NOWHERE, Draw
from kvrelay.engine.gpu.padded import Size
from kvrelay.engine.gpu.staging import Staging

Key = TypeVar("Key")
Result = TypeVar("Result")


class Capture:
    """Makes graphs that share memory: what one leaves is good until another is replayed."""

    def __init__(self) -> None:
        self.count = 0
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        compute()  # kernels are compiled, workspaces made
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        self.count += 1
        return graph, result


class Graphs(Generic[Key, Result]):
    """Of one function, a graph for each key. What it reads must stay where it is, and so does what it gives."""

    def __init__(self, compute: Callable[[Key], Result]) -> None:
        self._compute = compute
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, Result]] = {}

    def capture(self, key: Key, capture: Capture) -> None:
        self._captured[key] = capture(lambda: self._compute(key))

    def __call__(self, key: Key) -> Result:
        """Computes what was not captured."""
        if key not in self._captured:
            return self._compute(key)
        graph, result = self._captured[key]
        graph.replay()
        return result


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, then multiples of 8, which are sparser the larger they are; the last is `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1024, 32), *range(1024, most + 64, 64)]
    return [*(size for size in sizes if size < most), most]


Decode = Callable[[torch.Tensor, Draw], torch.Tensor]
"""Computes a step of single tokens out of its words [11, S] on the device (see `inputs`), and gives their tokens [S]."""


class DecodeGraphs:
    """Of steps of single tokens, with the choice of the next."""

    def __init__(self, max_num_seqs: int, decode: Decode, staging: Staging, device: torch.device) -> None:
        self._sizes = sizes_up_to(max_num_seqs)
        self._staging = staging
        self._words = torch.zeros(DECODE_WORDS * max_num_seqs, dtype=torch.int64, device=device)
        self._graphs = Graphs[tuple[int, Draw], torch.Tensor](lambda key: decode(self._room(key[0]), key[1]))

    def size_for(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)

    def capture(self, capture: Capture) -> None:
        """All of them, the largest first: the others use its memory."""
        for size in reversed(self._sizes):
            words = self._room(size)
            words.zero_()
            words[3] = NOWHERE
            for draw in Draw:
                self._graphs.capture((size, draw), capture)

    def run(self, words: NDArray[np.int64], draw: Draw) -> torch.Tensor:
        """`words` [11, S], S one of the sizes."""
        size = words.shape[1]
        self._staging.copy([words], self._room(size).view(-1))
        return self._graphs((size, draw))

    def _room(self, size: int) -> torch.Tensor:
        return self._words[: DECODE_WORDS * size].view(DECODE_WORDS, size)


class StepGraphs(Generic[Result]):
    """Of small steps of any parts."""

    def __init__(
        self,
        sizes: list[Size],
        compute: Callable[[list[torch.Tensor], Size], Result],
        staging: Staging,
        device: torch.device,
    ) -> None:
        """`compute` is given what `padded_words` gives, on the device."""
        self._sizes = sizes
        self._staging = staging
        most = max((size.num_words for size in sizes), default=0)
        self._words = torch.zeros(most, dtype=torch.int64, device=device)
        self._graphs = Graphs[Size, Result](lambda size: compute(size.divide(self._room(size)), size))

    def fitting(self, tokens: int, decodes: int, prompts: int, sampled: int) -> Size | None:
        """The smallest size; None where there is none."""
        return next((size for size in self._sizes if size.holds(tokens, decodes, prompts, sampled)), None)

    def capture(self, capture: Capture) -> None:
        """As `DecodeGraphs.capture`."""
        for size in reversed(self._sizes):
            words = self._room(size)
            words.zero_()
            tokens, *_ = size.divide(words)
            tokens[3] = NOWHERE
            self._graphs.capture(size, capture)

    def run(self, words: list[NDArray[np.int64]], size: Size) -> Result:
        self._staging.copy(words, self._room(size))
        return self._graphs(size)

    def _room(self, size: Size) -> torch.Tensor:
        return self._words[: size.num_words]
