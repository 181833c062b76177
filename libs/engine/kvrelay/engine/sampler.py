"""From a step's logits to its tokens, for all rows at once; a row pays only for what its own parameters ask for.

In order: bias, penalties and `min_tokens` (see `penalties`), temperature, min-p, top-k, top-p, and one draw (see `draw`) by
a number that depends on the request's seed, the choice and the position alone (see `rng`).
"""

from typing import NamedTuple

import torch

from kvrelay.common.request import PositionLogprobs, SamplingParams
from kvrelay.engine.batch import NO_TOKEN
from kvrelay.engine.draw import Truncation, draw
from kvrelay.engine.logprobs import logprobs_of
from kvrelay.engine.penalties import Penalties, adjusts
from kvrelay.engine.rng import Purpose, uniforms
from kvrelay.engine.sequence import Sequence

Row = tuple[Sequence, int]
"""A sequence and the number of the choice that is sampled for."""


class Drawn(NamedTuple):
    """`tokens` [R]; of those rows that ask for them, `logprobs` by row."""

    tokens: list[int]
    logprobs: dict[int, PositionLogprobs]


class Sampler:
    """Not for concurrent use: it keeps the token counts of the last batch's penalized sequences."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        if not all(0 <= token < vocab_size for token in eos_token_ids):
            raise ValueError(f"eos_token_ids {eos_token_ids} lie outside the vocabulary of {vocab_size}")
        self._vocab_size = vocab_size
        self._penalties = Penalties(vocab_size, eos_token_ids)

    def sample(self, logits: torch.Tensor, rows: list[Row]) -> Drawn:
        """One token for each of `rows` from `logits` [R, V], contiguous float32, which may be overwritten.

        The token stands at position seq.sampled_at. A request without a seed draws as with seed 0. A row whose logits
        are not finite gets NO_TOKEN.
        """
        if not rows:
            return Drawn([], {})
        wanted = [row for row, (seq, _) in enumerate(rows) if seq.request.sampling.logprobs is not None]
        raw = logits[wanted] if wanted else logits[:0]
        if any(adjusts(seq) for seq, _ in rows):
            self._penalties.apply(logits, rows)
        largest, best = logits.max(dim=1)
        bad = (~largest.isfinite()).nonzero().squeeze(1).tolist()
        if bad:
            logits[bad] = 0.0
            largest[bad] = 0.0
        tokens = _choose(logits, rows, largest, best)
        counts = [seq.request.sampling.logprobs or 0 for seq, _ in (rows[row] for row in wanted)]
        found = logprobs_of(raw, [tokens[row] for row in wanted], counts)
        for row in bad:
            tokens[row] = NO_TOKEN
        return Drawn(tokens, dict(zip(wanted, found, strict=True)))

    def prompt_logprobs(self, logits: torch.Tensor, targets: list[int], count: int) -> list[PositionLogprobs]:
        """For each of the `logits` [P, V]: of the prompt token that follows, and of the `count` most likely ones."""
        return logprobs_of(logits, targets, [count] * len(targets))


def _greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def _choose(logits: torch.Tensor, rows: list[Row], largest: torch.Tensor, best: torch.Tensor) -> list[int]:
    tokens: list[int] = best.tolist()
    drawn = [row for row, (seq, _) in enumerate(rows) if not _greedy(seq.request.sampling)]
    if not drawn:
        return tokens
    if len(drawn) < len(rows):
        logits, largest = logits[drawn], largest[drawn]
    params = [rows[row][0].request.sampling for row in drawn]
    cut = Truncation(
        temperature=[p.temperature for p in params],
        top_k=[p.top_k if p.top_k < logits.shape[1] else 0 for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
    )
    numbers = uniforms(
        [p.seed or 0 for p in params],
        [rows[row][1] for row in drawn],
        [rows[row][0].sampled_at for row in drawn],
        Purpose.TOKEN,
    )
    ids = draw(logits, largest, cut, torch.from_numpy(numbers).to(logits.device))
    for row, token in zip(drawn, ids.tolist(), strict=True):
        tokens[row] = token
    return tokens
