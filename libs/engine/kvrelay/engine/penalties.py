"""What changes logits before anything is drawn: bias, penalties, and the tokens that may not come yet.

In order, as vLLM and Hugging Face do: `logit_bias` is added; the repetition penalty divides positive and multiplies negative
logits of tokens of prompt and output; presence and frequency penalties are subtracted for tokens of the output; the tokens
that would end the choice are masked until `min_tokens` have come.
"""

import dataclasses
import math
import sys

import numpy as np
import torch

from kvrelay.engine.sequence import Sequence


def adjusts(seq: Sequence) -> bool:
    """Whether any of this concerns the sequence's next token."""
    return seq.sampled_at < adjusted_below(seq)


def adjusted_below(seq: Sequence) -> int:
    """The position from which on none of this concerns the sequence's tokens."""
    params = seq.request.sampling
    return sys.maxsize if params.logit_bias or seq.remembers else seq.num_prompt + params.min_tokens


def _must_go_on(seq: Sequence) -> bool:
    return seq.sampled_at - seq.num_prompt < seq.request.sampling.min_tokens


class History:
    """The distinct tokens of a sequence and how often each stands in its output, kept up by what was appended."""

    def __init__(self, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._num_seen = 0
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def extend(self, tokens: list[int]) -> None:
        """`tokens` are all of the sequence's: those seen before, unchanged, and the new ones."""
        for position in range(self._num_seen, len(tokens)):
            slot = self._slots.setdefault(tokens[position], len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = tokens[position]
            self._counts[slot] += position >= self._num_prompt
        self._num_seen = len(tokens)

    @property
    def ids(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """[U], in order of first occurrence."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """[U]: occurrences in the output, 0 for tokens of the prompt alone."""
        return self._counts[: len(self._slots)]


@dataclasses.dataclass(slots=True)
class _Edits:
    """Positions in the flat logits, gathered over the rows so that each kind of change is one operation."""

    bias_at: list[int] = dataclasses.field(default_factory=list)
    bias: list[float] = dataclasses.field(default_factory=list)
    masked: list[int] = dataclasses.field(default_factory=list)
    penalized: list[tuple[int, Sequence]] = dataclasses.field(default_factory=list)


class Penalties:
    """Applies them to a batch. Holds the histories of the last batch's penalized sequences, no others."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._histories: dict[Sequence, History] = {}

    def apply(self, logits: torch.Tensor, rows: list[tuple[Sequence, int]]) -> None:
        """Changes `logits` [R, V] in place, at the tokens concerned."""
        edits = _Edits()
        for row, (seq, _) in enumerate(rows):
            self._collect(edits, row * self._vocab_size, row, seq)
        flat = logits.view(-1)
        if edits.bias_at:
            at = torch.tensor(edits.bias_at, device=flat.device)
            flat[at] += torch.tensor(edits.bias, dtype=flat.dtype, device=flat.device)
        if edits.penalized:
            self._penalize(flat, edits.penalized)
        if edits.masked:
            flat[torch.tensor(edits.masked, device=flat.device)] = -math.inf

    def _collect(self, edits: _Edits, start: int, row: int, seq: Sequence) -> None:
        params = seq.request.sampling
        if params.logit_bias:
            edits.bias_at += [start + token for token in params.logit_bias]
            edits.bias += params.logit_bias.values()
        if _must_go_on(seq):
            edits.masked += [start + token for token in (*self._eos_token_ids, *params.stop_token_ids)]
        if seq.remembers:
            edits.penalized.append((row, seq))

    def _penalize(self, flat: torch.Tensor, penalized: list[tuple[int, Sequence]]) -> None:
        histories = {seq: self._histories.get(seq) or History(seq.num_prompt) for _, seq in penalized}
        for seq, history in histories.items():
            history.extend(seq.tokens)
        self._histories = histories
        parts = [(row, seq.request.sampling, histories[seq]) for row, seq in penalized]
        sizes = [len(history.ids) for _, _, history in parts]

        def spread(values: list[float]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(flat.device)

        at = torch.from_numpy(np.concatenate([row * self._vocab_size + h.ids for row, _, h in parts])).to(flat.device)
        counts = torch.from_numpy(np.concatenate([h.counts for _, _, h in parts])).to(flat.device)
        repetition = spread([params.repetition_penalty for _, params, _ in parts])
        values = flat[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= spread([params.frequency_penalty for _, params, _ in parts]) * counts
        values -= spread([params.presence_penalty for _, params, _ in parts]) * (counts > 0)
        flat[at] = values
