"""Drawing a token from truncated distributions, in batch: one uniform number a row, by inverse distribution function.

A row's weights are exp((logit - largest) / temperature), so the most likely token has weight 1. Truncation sets weights to
zero, by a threshold: equal weights stay or go together, whatever else is in the batch. The token is the first one, in the
order of the vocabulary, at which the running sum passes uniform × total: slightly different logits seldom give another
token. Spans of weights are summed in float32, everything over them in float64.
"""

import dataclasses

import torch

_SPAN = 256
"""Weights that are summed together before the search goes into one span."""
_NUCLEUS = (256, 4096)
"""Most likely tokens that are looked at for top-p before a row is sorted whole."""
_SMALLEST_TEMPERATURE = 1e-30
"""Of float32: below it the division would overflow even for neighbouring logits; the draw is greedy long before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Truncation:
    """Of each row, as lists [R]. `top_k` 0, `top_p` 1 and `min_p` 0 leave the row whole."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]


def draw(logits: torch.Tensor, largest: torch.Tensor, cut: Truncation, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids [R] for `logits` [R, V] (overwritten), their maxima [R], finite, and `uniforms` [R] in float64."""
    limited = [row for row, k in enumerate(cut.top_k) if k > 0]
    nucleus = [row for row, p in enumerate(cut.top_p) if p < 1.0]
    weights = logits.sub_(largest.unsqueeze(1))
    dropped = _beyond_top_k(weights, limited, [cut.top_k[row] for row in limited]) if limited else None
    temperature = _column([max(t, _SMALLEST_TEMPERATURE) for t in cut.temperature], weights)
    weights.div_(temperature).exp_()
    if dropped is not None:
        weights.masked_fill_(dropped, 0.0)
    if any(cut.min_p):
        weights.masked_fill_(weights < _column(cut.min_p, weights), 0.0)
    if nucleus:
        _keep_top_p(weights, nucleus, [cut.top_p[row] for row in nucleus])
    return invert(weights, uniforms)


def _column(values: list[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)


def _beyond_top_k(logits: torch.Tensor, rows: list[int], counts: list[int]) -> torch.Tensor:
    """True where one of the named rows of `logits` [R, V] is less than its k-th largest: [R, V]."""
    counts = [min(count, logits.shape[1]) for count in counts]
    best = _rows(logits, rows).topk(max(counts), dim=1).values
    floor = torch.full((len(logits), 1), -torch.inf, dtype=logits.dtype, device=logits.device)
    floor[rows] = best.gather(1, _column([count - 1 for count in counts], best, torch.int64))
    return logits < floor


def _keep_top_p(weights: torch.Tensor, rows: list[int], masses: list[float]) -> None:
    """Sets to zero what comes after the most likely tokens that together reach `masses`, in place."""
    left = torch.tensor(rows, device=weights.device)
    wanted = _column(masses, weights, torch.float64) * _span_sums(_rows(weights, rows)).sum(1, keepdim=True)
    floor = torch.zeros((len(weights), 1), dtype=weights.dtype, device=weights.device)
    for width in (*_NUCLEUS, weights.shape[1]):
        best = weights[left].topk(min(width, weights.shape[1]), dim=1).values
        floor[left], reached = _nucleus_floor(best, wanted)
        left, wanted = left[~reached], wanted[~reached]
        if not len(left):
            break
    weights.masked_fill_(weights < floor, 0.0)


def _nucleus_floor(best: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `best` [R, L], descending: the least weight of the first ones that reach `wanted` [R, 1], as [R, 1]; and whether
    they do, [R]."""
    sums = best.cumsum(1, dtype=torch.float64)
    last = (sums < wanted).sum(1, keepdim=True)
    reached = last.squeeze(1) < best.shape[1]
    return best.gather(1, last.clamp_(max=best.shape[1] - 1)), reached


def _rows(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return values if len(rows) == len(values) else values[torch.tensor(rows, device=values.device)]


def _span_sums(weights: torch.Tensor) -> torch.Tensor:
    """[R, V] → [R, ceil(V / span)] in float64."""
    whole = weights.shape[1] // _SPAN * _SPAN
    spans = weights[:, :whole].view(len(weights), whole // _SPAN, _SPAN)
    sums = spans.sum(2).double()
    if whole == weights.shape[1]:
        return sums
    rest = weights[:, whole:].sum(1, keepdim=True).double()
    return torch.cat((sums, rest), dim=1)


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The index [R] in each row of `weights` [R, V] (not negative, none of the rows all zero) at which the running sum
    passes `uniforms` [R] × total. Never one of weight zero."""
    sums = _span_sums(weights).cumsum(1)
    total = sums[:, -1:]
    target = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    span = torch.searchsorted(sums, target, right=True)
    before = torch.where(span > 0, sums.gather(1, (span - 1).clamp_(min=0)), 0.0)
    at = span * _SPAN + torch.arange(_SPAN, device=weights.device)
    inside = weights.gather(1, at.clamp(max=weights.shape[1] - 1)).masked_fill_(at >= weights.shape[1], 0.0)
    inner = inside.cumsum(1, dtype=torch.float64)
    first = torch.searchsorted(before + inner, target, right=True)
    # A span's sum and the sums within it are rounded apart: where the latter fall short, its last weight is meant.
    last = torch.searchsorted(inner, inner[:, -1:].contiguous())
    return (span * _SPAN + torch.where(first < _SPAN, first, last)).squeeze(1)
