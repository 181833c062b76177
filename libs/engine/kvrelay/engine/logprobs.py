"""Log-probabilities of raw logits: the chosen tokens' and the most likely ones', with ranks."""

import torch

from kvrelay.common.request import PositionLogprobs, TokenLogprob

_CHUNK = 64
"""Positions at a time: bounds the temporaries, which are as large as the logits."""


def logprobs_of(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[PositionLogprobs]:
    """For each row of `logits` [P, V]: of its token, and of its `count` most likely ones, best first.

    A rank is one more than the number of tokens that are more likely: equal ones share it.
    """
    found: list[PositionLogprobs] = []
    for start in range(0, len(tokens), _CHUNK):
        part = slice(start, start + _CHUNK)
        found += _chunk(logits[part].float(), tokens[part], counts[part])
    return found


def _chunk(logits: torch.Tensor, tokens: list[int], counts: list[int]) -> list[PositionLogprobs]:
    normalizer = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = ((logits > chosen).sum(1) + 1).tolist()
    best, ids = logits.topk(min(max(counts), logits.shape[1]), dim=1)
    values = (chosen - normalizer).squeeze(1).tolist()
    rows = zip(tokens, values, ranks, ids.tolist(), (best - normalizer).tolist(), counts, strict=True)
    return [
        PositionLogprobs(TokenLogprob(token, value, rank), _ranked(top_ids[:count], top_values[:count]))
        for token, value, rank, top_ids, top_values, count in rows
    ]


def _ranked(ids: list[int], values: list[float]) -> tuple[TokenLogprob, ...]:
    """Of descending values; equal ones by token id, with the rank of the first."""
    ranked: list[TokenLogprob] = []
    for place, (negative, token) in enumerate(
        sorted((-value, token) for value, token in zip(values, ids, strict=True))
    ):
        tied = bool(ranked) and ranked[-1].logprob == -negative
        ranked.append(TokenLogprob(token, -negative, ranked[-1].rank if tied else place + 1))
    return tuple(ranked)
