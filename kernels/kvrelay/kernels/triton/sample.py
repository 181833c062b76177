"""Tokens from logits on the device: nothing is sorted, nothing waits for the host, no result depends on the batch.

The twin is the engine's `draw` on the numbers of its `rng`: the same order, thresholds and ties. A row is cut into chunks of
some thousand logits, one program each, and what they find is put together by whoever needs it next, in the order of the chunks:

    _peaks     each chunk's largest logit
    _measure   what of it lies up to each of a few levels: tokens for top-k, weight for top-p
    _weigh     its weight of what is surely kept, and the logits between the two levels that the threshold lies between
    _choose    one program a row: the threshold among those; the most likely token, or the one at which the running sum
               passes uniform × total

Thresholds are distances from the largest logit, exact to the bit: floats that are not negative are ordered as their bits
are, their keys. A bracket (low, high] of keys is narrowed until one is left: less than is wanted lies up to `low`, enough up
to `high`.
"""

import torch
import triton
import triton.language as tl

from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.triton.early import begin, early

TOKEN = 0
"""Purpose of a draw, as the engine's `rng` numbers them."""
LEVELS = 16

_INFINITY = tl.constexpr(0x7F800000)
_NEVER = tl.constexpr(0x7FFFFFFF)
_SMALLEST_TEMPERATURE = tl.constexpr(1e-30)
_FAR = tl.constexpr(24.0)
"""Temperatures from the largest logit: a vocabulary of what lies beyond weighs nothing."""


@triton.jit
def _peaks(logits, stride, vocab, highest, highest_at, lowest, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """Of a chunk: the largest logit, the first token that has it, the smallest finite logit. NaN counts as infinity."""
    if EARLY:
        begin()
    chunk, row = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    place = row * tl.num_programs(0) + chunk
    tl.store(highest + place, top)
    tl.store(highest_at + place, tl.min(tl.where(x == top, at, vocab), 0))
    tl.store(lowest + place, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))


@triton.jit
def _largest(highest, row, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr):
    at = tl.arange(0, CHUNKS_LOADED)
    return tl.max(tl.load(highest + row * CHUNKS + at, mask=at < CHUNKS, other=float("-inf")), 0)


@triton.jit
def _draws(temperature, top_k, largest):
    """Whether a row of these parameters is drawn at all."""
    return (temperature != 0.0) & (top_k != 1) & (tl.abs(largest) < float("inf"))


@triton.jit
def _limits(top_k, vocab):
    """Whether top-k may drop anything."""
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def _logits(logits, stride, vocab, row, chunk, CHUNK: tl.constexpr):
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _weights(distance, temperature, min_p):
    """exp(-distance / temperature), zero for what min-p drops."""
    weight = tl.exp(-distance / tl.maximum(temperature, _SMALLEST_TEMPERATURE))
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def _levels(
    temperature, by_count, largest, lowest, row, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr, LEVELS: tl.constexpr
):
    """[LEVELS] keys in no order: of distances up to the farthest that may matter, half of them evenly spaced, half closer
    and closer to zero; the last is infinity's."""
    at = tl.arange(0, CHUNKS_LOADED)
    least = tl.min(tl.load(lowest + row * CHUNKS + at, mask=at < CHUNKS, other=float("inf")), 0)
    far = largest - least
    far = tl.where(by_count, far, tl.minimum(far, _FAR * tl.maximum(temperature, _SMALLEST_TEMPERATURE)))
    HALF: tl.constexpr = LEVELS // 2
    j = tl.arange(0, LEVELS)
    even = (j - HALF + 1).to(tl.float32) / (HALF - 1)
    share = tl.where(j < HALF, tl.exp2(2.0 * (j - HALF).to(tl.float32)), even)
    return tl.where(j < LEVELS - 1, (far * share).to(tl.int32, bitcast=True), _INFINITY)


@triton.jit
def _measure(
    logits, stride, vocab, temperatures, top_ks, top_ps, min_ps, highest, lowest, sums,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr, LEVELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        begin()
    chunk, row = tl.program_id(0), tl.program_id(1)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    largest = _largest(highest, row, CHUNKS, CHUNKS_LOADED)
    by_count = _limits(top_k, vocab)
    if not (_draws(temperature, top_k, largest) & (by_count | (tl.load(top_ps + row) < 1.0))):
        return
    distance = largest - _logits(logits, stride, vocab, row, chunk, CHUNK)
    key = distance.to(tl.int32, bitcast=True)
    if by_count:
        measure = tl.where(key < _INFINITY, 1.0, 0.0)
    else:
        measure = _weights(distance, temperature, tl.load(min_ps + row))
    level = _levels(temperature, by_count, largest, lowest, row, CHUNKS, CHUNKS_LOADED, LEVELS)
    found = tl.sum(tl.where(key[None, :] <= level[:, None], measure[None, :], 0.0), 1)
    tl.store(sums + (row * CHUNKS + chunk) * LEVELS + tl.arange(0, LEVELS), found)


@triton.jit
def _bracket(
    temperature, top_k, top_p, by_count, largest, lowest, sums, row,
    CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Out of what was measured: low, high, what lies up to low, what is wanted, what there is in all."""
    level = _levels(temperature, by_count, largest, lowest, row, CHUNKS, CHUNKS_LOADED, LEVELS)
    chunk = tl.arange(0, CHUNKS_LOADED)[:, None]
    at = (row * CHUNKS + chunk) * LEVELS + tl.arange(0, LEVELS)[None, :]
    reached = tl.sum(tl.load(sums + at, mask=chunk < CHUNKS, other=0.0).to(tl.float64), 0)
    total = tl.max(reached, 0)
    wanted = tl.where(by_count, top_k.to(tl.float64), top_p.to(tl.float64) * total)
    enough = reached >= wanted
    low = tl.max(tl.where(enough, -1, level), 0)
    high = tl.min(tl.where(enough, level, _INFINITY), 0)
    return low, high, tl.max(tl.where(enough, 0.0, reached), 0), wanted, total


@triton.jit
def _weigh(
    logits, stride, vocab, temperatures, top_ks, top_ps, min_ps, highest, lowest, sums, mass, between, counts,
    CUT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr, LEVELS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A chunk's weight, in float64. With thresholds to find: of what is closer than the bracket, and the logits in it, in
    order; with top-k all up to its end are taken as in it, since what they weigh is not known yet."""
    if EARLY:
        begin()
    chunk, row = tl.program_id(0), tl.program_id(1)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    largest = _largest(highest, row, CHUNKS, CHUNKS_LOADED)
    if not _draws(temperature, top_k, largest):
        return
    x = _logits(logits, stride, vocab, row, chunk, CHUNK)
    distance = largest - x
    weight = _weights(distance, temperature, tl.load(min_ps + row))
    place = row * CHUNKS + chunk
    if CUT:
        top_p, by_count = tl.load(top_ps + row), _limits(top_k, vocab)
        if by_count | (top_p < 1.0):
            low, high, _, _, _ = _bracket(
                temperature, top_k, top_p, by_count, largest, lowest, sums, row, CHUNKS, CHUNKS_LOADED, LEVELS
            )
            low = tl.where(by_count, -1, low)
            key = distance.to(tl.int32, bitcast=True)
            inside = (key > low) & (key <= high) & (key < _INFINITY)
            count = inside.to(tl.int32)
            at = between + place.to(tl.int64) * CHUNK + (tl.cumsum(count, 0) - count)
            tl.store(at, x.to(between.dtype.element_ty), mask=inside)
            tl.store(counts + place, tl.sum(count, 0))
            weight = tl.where(key <= low, weight, 0.0)
    tl.store(mass + place, tl.sum(weight.to(tl.float64), 0))


@triton.jit
def _tile(
    between, counts, row, turn, largest, temperature, min_p,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and weights of the next `WIDTH` logits of each chunk's that are in the bracket, [TILE]; infinity and 0 for none."""
    at = tl.arange(0, TILE)
    chunk, inner = at // WIDTH, turn * WIDTH + at % WIDTH
    count = tl.load(counts + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0)
    place = (row * CHUNKS + chunk).to(tl.int64) * CHUNK + inner
    x = tl.load(between + place, mask=inner < count, other=float("-inf")).to(tl.float32)
    distance = largest - x
    return distance.to(tl.int32, bitcast=True), _weights(distance, temperature, min_p)


@triton.jit
def _candidates(low, high, round, LEVELS: tl.constexpr):
    """[LEVELS] keys in the bracket, in no order; in the first round half of them are evenly spaced as numbers rather than as
    bits, and the last one is `high`."""
    HALF: tl.constexpr = LEVELS // 2
    j = tl.arange(0, LEVELS)
    width = (high - low).to(tl.int64)
    nearest = tl.maximum(low, 0).to(tl.float32, bitcast=True)
    share = (j - HALF + 1).to(tl.float32) / HALF
    number = nearest + (high.to(tl.float32, bitcast=True) - nearest) * share
    mixed = tl.where(j < HALF, low + width * (j + 1) // (HALF + 1), number.to(tl.int32, bitcast=True).to(tl.int64))
    mixed = tl.where(j < LEVELS - 1, mixed, high.to(tl.int64))
    return tl.where(round == 0, mixed, low + width * (j + 1) // (LEVELS + 1)).to(tl.int32)


@triton.jit
def _search(
    between, counts, row, turns, largest, temperature, min_p, low, high, below, wanted, MASS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The key in the bracket (low, high] up to which there is as much as wanted: a token's."""
    round = 0
    while high - low > 1:
        level = _candidates(low, high, round, LEVELS)
        sums = tl.zeros((LEVELS,), tl.float64)
        near, far = tl.maximum(high, _NEVER), tl.minimum(low, -1)
        for turn in range(turns):
            key, weight = _tile(between, counts, row, turn, largest, temperature, min_p, CHUNK, CHUNKS, WIDTH, TILE)
            inside = (key > low) & (key <= high) & (key < _INFINITY)
            measure = tl.where(inside, weight, 0.0) if MASS else tl.where(inside, 1.0, 0.0)
            near = tl.minimum(near, tl.min(tl.where(measure > 0, key, _NEVER), 0))
            far = tl.maximum(far, tl.max(tl.where(measure > 0, key, -1), 0))
            sums += tl.sum(tl.where(key[None, :] <= level[:, None], measure[None, :], 0.0), 1).to(tl.float64)
        reached = below + sums
        enough = reached >= wanted
        below = tl.maximum(below, tl.max(tl.where(enough, below, reached), 0))
        low = tl.maximum(tl.maximum(low, near - 1), tl.max(tl.where(enough, low, level), 0))
        high = tl.minimum(tl.minimum(high, far), tl.min(tl.where(enough, level, high), 0))
        # Sums of different rounds are rounded apart: the bracket keeps its last key.
        low = tl.minimum(low, high - 1)
        round += 1
    return high


@triton.jit
def _uniform(seed, choice, position, TOKEN: tl.constexpr):
    """In [0, 1), of 53 bits: float64."""
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(high)
    first, second, _, _ = tl.philox(
        seed, choice.to(tl.uint32, bitcast=True), position.to(tl.uint32), high, zero + TOKEN
    )
    bits = ((first >> 5).to(tl.int64) << 26) | (second >> 6).to(tl.int64)
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _first_over(weight, before, target, SIZE: tl.constexpr):
    """The first element of `weight` [SIZE], float64, at which `before` and the running sum pass `target`; where they fall short
    of it by rounding, the last. Never one of weight zero."""
    at = tl.arange(0, SIZE)
    over = (before + tl.cumsum(weight, 0) > target) & (weight > 0)
    first = tl.min(tl.where(over, at, SIZE), 0)
    last = tl.max(tl.where(weight > 0, at, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _choose(
    logits, stride, vocab, temperatures, top_ks, top_ps, min_ps, seeds, choices, positions, highest, highest_at, lowest, sums, mass,
    between, counts, tokens, finite, DRAW: tl.constexpr, CUT: tl.constexpr, TOKEN: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = CHUNKS_LOADED * WIDTH
    if EARLY:
        begin()
    row = tl.program_id(0)
    at = tl.arange(0, CHUNKS_LOADED)
    real = at < CHUNKS
    tops = tl.load(highest + row * CHUNKS + at, mask=real, other=float("-inf"))
    largest = tl.max(tops, 0)
    places = tl.load(highest_at + row * CHUNKS + at, mask=real & (tops == largest), other=vocab)
    token = tl.min(places, 0)
    whole = tl.abs(largest) < float("inf")
    tl.store(finite + row, whole)
    if DRAW:
        temperature, top_k, min_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(min_ps + row)
        if _draws(temperature, top_k, largest):
            masses = tl.load(mass + row * CHUNKS + at, mask=real, other=0.0)
            ceiling = tl.full((), _INFINITY, tl.int32)
            if CUT:
                top_p, by_count = tl.load(top_ps + row), _limits(top_k, vocab)
                if by_count | (top_p < 1.0):
                    low, high, below, wanted, total = _bracket(
                        temperature, top_k, top_p, by_count, largest, lowest, sums, row, CHUNKS, CHUNKS_LOADED, LEVELS
                    )
                    most = tl.max(tl.load(counts + row * CHUNKS + at, mask=real, other=0), 0)
                    turns = tl.cdiv(most, WIDTH)
                    if by_count:
                        if total >= wanted:
                            ceiling = _search(
                                between, counts, row, turns, largest, temperature, min_p, low, high, below, wanted,
                                False, CHUNK, CHUNKS, WIDTH, TILE, LEVELS,
                            )  # fmt: skip
                        if top_p < 1.0:
                            total = 0.0 * total
                            for turn in range(turns):
                                key, weight = _tile(
                                    between, counts, row, turn, largest, temperature, min_p, CHUNK, CHUNKS, WIDTH, TILE
                                )
                                total += tl.sum(tl.where(key <= ceiling, weight, 0.0), 0).to(tl.float64)
                        low, high, below, wanted = (
                            tl.full((), -1, tl.int32),
                            ceiling,
                            0.0 * total,
                            top_p.to(tl.float64) * total,
                        )
                    if top_p < 1.0:
                        ceiling = _search(
                            between, counts, row, turns, largest, temperature, min_p, low, high, below, wanted,
                            True, CHUNK, CHUNKS, WIDTH, TILE, LEVELS,
                        )  # fmt: skip
                    for turn in range(turns):
                        key, weight = _tile(
                            between, counts, row, turn, largest, temperature, min_p, CHUNK, CHUNKS, WIDTH, TILE
                        )
                        kept = tl.where(key <= ceiling, weight, 0.0)
                        masses += tl.sum(tl.reshape(kept, (CHUNKS_LOADED, WIDTH)), 1).to(tl.float64)
            total = tl.sum(masses, 0)
            under = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
            uniform = _uniform(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row), TOKEN)
            target = tl.minimum(uniform * total, under)
            chunk = _first_over(masses, 0.0, target, CHUNKS_LOADED)
            before = tl.sum(tl.where(at < chunk, masses, 0.0), 0)
            distance = largest - _logits(logits, stride, vocab, row, chunk, CHUNK)
            weight = _weights(distance, temperature, min_p)
            weight = tl.where(distance.to(tl.int32, bitcast=True) <= ceiling, weight, 0.0)
            token = chunk * CHUNK + _first_over(weight.to(tl.float64), before, target, CHUNK)
    tl.store(tokens + row, tl.where(whole, token, -1).to(tl.int64))


class TokenSampler:
    """Holds what kernels of one call leave for each other, so that calls may be captured; not for concurrent use."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str, chunk: int = 4096) -> None:
        """`chunk` is a power of two; sums are rounded by what it is. Takes as much memory as so many rows of float32 logits."""
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._chunks = chunks = triton.cdiv(vocab_size, chunk)
        loaded = triton.next_power_of_2(chunks)
        self._width = max(1, chunk // loaded)
        self._sizes = {"CHUNK": chunk, "CHUNKS": chunks, "CHUNKS_LOADED": loaded, "LEVELS": LEVELS}

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(max_rows, chunks, *shape, dtype=dtype, device=device)

        self._highest, self._lowest = room(dtype=torch.float32), room(dtype=torch.float32)
        self._highest_at = room(dtype=torch.int32)
        self._sums = room(LEVELS, dtype=torch.float32)
        self._mass = room(dtype=torch.float64)
        self._between, self._counts = room(chunk, dtype=torch.float32), room(dtype=torch.int32)

    def __call__(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        tokens: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
        *,
        draws: bool = True,
        cuts: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [R] for `logits` [R, V] of any float type, a row's contiguous; and whether a row's largest logit is finite,
        bool [R]: where it is not, the token is -1.

        `draws` False says that no row is drawn, `cuts` False that none asks for top-k or top-p: it saves the launches.
        Raises ValueError for more rows than there is room for, or another vocabulary.
        """
        rows, vocab = logits.shape
        if rows > self._max_rows or vocab != self._vocab_size:
            raise ValueError(f"logits [{rows}, {vocab}] for a sampler of [{self._max_rows}, {self._vocab_size}]")
        if tokens is None:
            tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if finite is None:
            finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
        if not rows:
            return tokens, finite
        source, grid, launch = (logits, logits.stride(0), vocab), (self._chunks, rows), early(logits)
        limits = (params.temperature, params.top_k, params.top_p, params.min_p)
        peaks, between = (self._highest, self._lowest), self._between.view(logits.dtype)
        _peaks[grid](
            *source, self._highest, self._highest_at, self._lowest, CHUNK=self._sizes["CHUNK"], num_warps=4, **launch
        )
        if draws:
            if cuts:
                _measure[grid](*source, *limits, *peaks, self._sums, **self._sizes, num_warps=4, **launch)
            _weigh[grid](
                *source, *limits, *peaks, self._sums, self._mass, between, self._counts,
                CUT=cuts, **self._sizes, num_warps=16 if cuts else 4, **launch,
            )  # fmt: skip
        _choose[(rows,)](
            *source, *limits, params.seed, params.choice, params.position,
            self._highest, self._highest_at, self._lowest, self._sums, self._mass, between, self._counts, tokens, finite,
            DRAW=draws, CUT=cuts, TOKEN=TOKEN, WIDTH=self._width, **self._sizes, num_warps=8 if draws else 1, **launch,
        )  # fmt: skip
        return tokens, finite
