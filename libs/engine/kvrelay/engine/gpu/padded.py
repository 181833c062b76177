"""A step of any parts, padded to one of a few sizes: its numbers then lie in fixed places, and its kernels are launched alike.

Tokens     [decodes, then prompts' tokens | padding]   padding is written NOWHERE
Parts      [decodes | padding] [prompts | padding]     padding has no context, and a prompt's no tokens
Sampled    [rows | padding]                            padding is nobody's
"""

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.batch import Scheduled
from kvrelay.engine.gpu.inputs import NOWHERE, HostRows, step_words

MAX_TOKENS = 512
"""Of a model of some billions of weights, the kernels of many more outlast their launch."""
MAX_PROMPTS = 16
"""More cost little in attention, but each is a row of the last layer."""
_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How many there may be of each in a step."""

    tokens: int
    decodes: int
    """Parts of one token."""
    prompts: int
    """Parts of more."""
    sampled: int

    def holds(self, tokens: int, decodes: int, prompts: int, sampled: int) -> bool:
        return tokens <= self.tokens and decodes <= self.decodes and prompts <= self.prompts and sampled <= self.sampled

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of what `step_words` gives."""
        parts = self.decodes + self.prompts
        return [(4, self.tokens), (parts + 1,), (2, parts), (2, self.sampled), (7, self.sampled)]

    @property
    def num_words(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def divide(self, words: torch.Tensor) -> list[torch.Tensor]:
        """`words` [num_words] as the shapes."""
        pieces = words.split([math.prod(shape) for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def sizes_up_to(max_tokens: int, max_num_seqs: int) -> list[Size]:
    """The smallest first. Of each number of tokens one without decodes, which samples few rows, and one with as many as there
    can be."""

    def size(tokens: int, decodes: int) -> Size:
        prompts = min(MAX_PROMPTS, tokens // 2, max_num_seqs)
        return Size(tokens, decodes, prompts, min(decodes + prompts, max_num_seqs))

    counts = [*(count for count in _TOKENS if count < max_tokens), max_tokens] if max_tokens else []
    return [size(tokens, decodes) for tokens in counts for decodes in (0, min(tokens, max_num_seqs))]


def padded_words(
    parts: list[Scheduled], num_decodes: int, rows: NDArray[np.int64], host: HostRows, size: Size
) -> list[NDArray[np.int64]]:
    """What `step_words` gives of a step that `size` holds, in its shapes."""
    given_tokens, given_starts, given_parts, given_sampled, given_sampling = step_words(parts, rows, host)
    tokens, starts, all_parts, sampled, sampling = (np.zeros(shape, np.int64) for shape in size.shapes)
    count, total = given_sampled.shape[1], given_tokens.shape[1]
    first_prompt, end = size.decodes, size.decodes + len(parts) - num_decodes
    tokens[:, :total] = given_tokens
    tokens[1, total:], tokens[3, total:] = host.nobody, NOWHERE
    starts[first_prompt : end + 1], starts[end + 1 :] = given_starts[num_decodes:], total
    all_parts[1] = sampled[1] = host.nobody
    all_parts[:, :num_decodes], all_parts[:, first_prompt:end] = np.split(given_parts, [num_decodes], 1)
    sampled[:, :count] = given_sampled
    sampling[:, :count] = given_sampling
    return [tokens, starts, all_parts, sampled, sampling]
