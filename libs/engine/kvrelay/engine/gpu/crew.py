"""Steps of single tokens: what of their inputs stays the same while they are the same sequences'."""

import sys

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.gpu.inputs import DECODE_WORDS, NOWHERE, UNKNOWN, Draw, HostRows, sampling_words
from kvrelay.engine.penalties import adjusted_below
from kvrelay.engine.sequence import Sequence


class Crew:
    """Sequences that compute one token each and sample the next, for as long as they keep their rows."""

    def __init__(self, seqs: list[Sequence], host: HostRows, size: int) -> None:
        """`size`: that of the step, with what pads it."""
        count = len(seqs)
        self.seqs = seqs
        self.draw = Draw.of(seq.request.sampling for seq in seqs)
        self._host = host
        self._rows = np.array([seq.row for seq in seqs], np.int64)
        self._free_from = np.array([_free_from(seq) for seq in seqs], np.int64)
        self._following = np.full(count, -1, np.int64)
        """The starts of the step after the last one."""
        self._words = np.zeros((DECODE_WORDS, size), np.int64)
        padding = self._words[:, count:]
        padding[0], padding[1], padding[3] = host.nobody, -1, NOWHERE
        choices = np.array([seq.choice for seq in seqs], np.int64)
        self._words[0, :count] = self._rows
        self._words[4:, :count] = sampling_words(self._rows, choices, self._following, host)

    def needs_host(self, starts: NDArray[np.int64]) -> bool:
        """Whether the device alone cannot sample what comes after `starts`."""
        return bool((starts + 1 < self._free_from).any())

    def words(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """[11, size], until the next call: of the step that computes the tokens at `starts`. See `unpack_decodes`."""
        words, count, block_size = self._words, len(starts), self._host.block_size
        blocks = self._host.tables.table[self._rows, starts // block_size].astype(np.int64)
        words[1, :count] = starts
        words[2, :count] = self._tokens(starts)
        words[3, :count] = blocks * block_size + starts % block_size
        words[7, :count] = self._following = starts + 1
        return words

    def _tokens(self, starts: NDArray[np.int64]) -> NDArray[np.int64] | int:
        if np.array_equal(starts, self._following):
            return UNKNOWN  # the step before sampled them: the device has them, whether they are known here or not
        known = zip(self.seqs, starts.tolist(), strict=True)
        return np.array([seq.tokens[start] if start < len(seq.tokens) else UNKNOWN for seq, start in known], np.int64)


def _free_from(seq: Sequence) -> int:
    """The first position whose token the device samples by itself."""
    return sys.maxsize if seq.request.sampling.logprobs is not None else adjusted_below(seq)
