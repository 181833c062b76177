"""Tokens from logits on the device: nothing is sorted, nothing waits for the host, no result depends on the batch.

The twin is the engine's `draw` on the numbers of its `rng`: the same order, thresholds and ties. A row is cut into chunks of
some thousand logits, one program each, and what they find is put together by whoever needs it next, in the order of the chunks:

    _peaks     each chunk's largest logit
    _narrow    in rounds, the threshold of top-k by counting tokens, then that of top-p by summing weights
    _weigh     each chunk's weight of what is kept
    _choose    the most likely token, or the one at which the running sum passes uniform × total

A threshold is a distance from the largest logit, exact to the bit: floats that are not negative are ordered as their bits
are, and a round leaves of a bracket of such bits what lies between two of some candidates. A row whose bracket has one
value left, and a chunk that has none in it, cost the rest of the rounds next to nothing.
"""

import dataclasses

import torch
import triton
import triton.language as tl

TOKEN = 0
"""Purpose of a draw, as the engine's `rng` numbers them."""

_INFINITY = tl.constexpr(0x7F800000)
_NEVER = tl.constexpr(0x7FFFFFFF)
_SMALLEST_TEMPERATURE = tl.constexpr(1e-30)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampleParams:
    """Of R rows, on the device, each [R]. Temperature 0 or `top_k` 1 take the most likely token; `top_k` 0, `top_p` 1 and
    `min_p` 0 leave a row whole."""

    temperature: torch.Tensor
    """float32"""
    top_k: torch.Tensor
    """int32"""
    top_p: torch.Tensor
    """float32"""
    min_p: torch.Tensor
    """float32"""
    seed: torch.Tensor
    """int64, which counts modulo 2^64"""
    choice: torch.Tensor
    """int32"""
    position: torch.Tensor
    """int64"""


@triton.jit
def _peaks(logits, stride, vocab, highest, highest_at, lowest, ceiling, CHUNK: tl.constexpr):
    """Of a chunk: the largest logit, the first token that has it, the smallest finite logit. NaN counts as infinity."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 0)
    place = row * tl.num_programs(0) + chunk
    tl.store(highest + place, top)
    tl.store(highest_at + place, tl.min(tl.where(x == top, at, vocab), 0))
    tl.store(lowest + place, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
    if chunk == 0:
        tl.store(ceiling + row, _INFINITY)


@triton.jit
def _largest(highest, row, chunks, CHUNKS: tl.constexpr):
    at = tl.arange(0, CHUNKS)
    return tl.max(tl.load(highest + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)


@triton.jit
def _draws(temperature, top_k, largest):
    """Whether a row of these parameters is drawn at all."""
    return (temperature != 0.0) & (top_k != 1) & (tl.abs(largest) < float("inf"))


@triton.jit
def _distances(logits, stride, vocab, row, chunk, largest, CHUNK: tl.constexpr):
    """From the largest logit, [CHUNK], not negative; and their bits, which are ordered as they are."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    distance = largest - x
    return distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _weights(distance, key, temperature, min_p, ceiling):
    """exp(-distance / temperature), zero for what min-p or the threshold `ceiling` drops."""
    weight = tl.exp(-distance / tl.maximum(temperature, _SMALLEST_TEMPERATURE))
    return tl.where((key <= ceiling) & (weight >= min_p), weight, 0.0)


@triton.jit
def _candidates(low, high, FIRST: tl.constexpr, LEVELS: tl.constexpr):
    """[LEVELS] keys in the bracket (low, high]. In the first round half of them are evenly spaced as numbers rather than as bits,
    since keys of any size are in it, and the last one is `high`."""
    j = tl.arange(0, LEVELS)
    width = (high - low).to(tl.int64)
    if FIRST:
        HALF: tl.constexpr = LEVELS // 2
        share = (j - HALF + 1).to(tl.float32) / HALF
        number = (high.to(tl.float32, bitcast=True) * share).to(tl.int32, bitcast=True)
        key = (low + width * (j + 1) // (HALF + 1)).to(tl.int32)
        level = tl.where(j < HALF, key, tl.where(j < LEVELS - 1, number, high))
    else:
        level = (low + width * (j + 1) // (LEVELS + 1)).to(tl.int32)
    return level


@triton.jit
def _narrowed(
    limit,
    round,
    bounds,
    known,
    levels,
    inside,
    nearest,
    row,
    chunks,
    MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """The bracket (low, high] after the round whose findings these are; what lies up to `low`, and what is wanted.

    Less than the wanted lies up to `low`, and enough up to `high`. The row is done when they are neighbours.
    """
    low, high = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    below, wanted = tl.load(known + row * 2), tl.load(known + row * 2 + 1)
    if high - low > 1:
        chunk = tl.arange(0, CHUNKS)
        real = chunk < chunks
        found = (row * chunks + chunk)[:, None] * LEVELS + tl.arange(0, LEVELS)[None, :]
        sums = below + tl.sum(tl.load(inside + found, mask=real[:, None], other=0.0).to(tl.float64), 0)
        level = tl.load(levels + row * LEVELS + tl.arange(0, LEVELS))
        near = tl.min(tl.load(nearest + (row * chunks + chunk) * 2, mask=real, other=_NEVER), 0)
        far = tl.max(tl.load(nearest + (row * chunks + chunk) * 2 + 1, mask=real, other=-1), 0)
        if round == 1:
            wanted = limit.to(tl.float64)
            if MASS:
                wanted *= tl.max(sums, 0)
        enough = sums >= wanted
        below = tl.maximum(below, tl.max(tl.where(enough, below, sums), 0))
        low = tl.maximum(tl.maximum(low, near - 1), tl.max(tl.where(enough, low, level), 0))
        high = tl.minimum(far, tl.min(tl.where(enough, level, high), 0))
        # Sums of different rounds are rounded apart: the bracket keeps its last key.
        low = tl.minimum(low, high - 1)
        few = (round == 1) & (tl.max(sums, 0) < wanted)  # fewer tokens than top-k allows
        low = tl.where(few, _INFINITY - 1, low)
        high = tl.where(few, _INFINITY, high)
    return low, high, below, wanted


@triton.jit(do_not_specialize=["round"])
def _narrow(
    logits, stride, vocab, temperatures, top_ks, limits, min_ps, highest, lowest, ceiling,
    round, rows, bounds, known, levels, inside, nearest,
    FIRST: tl.constexpr, LAST: tl.constexpr, MASS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Takes the bracket from the last round and measures what of the chunk lies up to each of its levels.

    The row's bounds, known sums, levels and findings have two places each, [2, rows, …], for odd and even rounds. The last
    round stores the threshold in `ceiling`.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    temperature, top_k, limit = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(limits + row)
    largest = _largest(highest, row, CHUNKS, CHUNKS_LOADED)
    limited = limit < 1.0 if MASS else (limit > 0) & (limit < vocab)
    if not (_draws(temperature, top_k, largest) & limited):
        return
    new = (round % 2) * rows + row
    if FIRST:
        at = tl.arange(0, CHUNKS_LOADED)
        least = tl.min(tl.load(lowest + row * CHUNKS + at, mask=at < CHUNKS, other=float("inf")), 0)
        low, high = -1, (largest - least).to(tl.int32, bitcast=True)
        below, wanted = 0.0, 0.0
    else:
        old = ((round + 1) % 2) * rows + row
        low, high, below, wanted = _narrowed(
            limit, round, bounds, known, levels, inside, nearest, old, CHUNKS, MASS, CHUNKS_LOADED, LEVELS
        )
    if LAST:
        tl.store(ceiling + row, high)
        return
    if chunk == 0:
        tl.store(bounds + new * 2, low)
        tl.store(bounds + new * 2 + 1, high)
        tl.store(known + new * 2, below)
        tl.store(known + new * 2 + 1, wanted)
        tl.store(levels + new * LEVELS + tl.arange(0, LEVELS), _candidates(low, high, FIRST, LEVELS))
    if high - low <= 1:
        return
    found = new * CHUNKS + chunk
    if not FIRST:
        own = (old * CHUNKS + chunk) * 2
        if (tl.load(nearest + own) > high) | (tl.load(nearest + own + 1) <= low):
            tl.store(inside + found * LEVELS + tl.arange(0, LEVELS), tl.zeros((LEVELS,), tl.float32))
            tl.store(nearest + found * 2, _NEVER)
            tl.store(nearest + found * 2 + 1, -1)
            return
    distance, key = _distances(logits, stride, vocab, row, chunk, largest, CHUNK)
    if MASS:
        measure = _weights(distance, key, temperature, tl.load(min_ps + row), tl.load(ceiling + row))
    else:
        measure = tl.where(key < _INFINITY, 1.0, 0.0)
    measure = tl.where((key > low) & (key <= high), measure, 0.0)
    tl.store(nearest + found * 2, tl.min(tl.where(measure > 0, key, _NEVER), 0))
    tl.store(nearest + found * 2 + 1, tl.max(tl.where(measure > 0, key, -1), 0))
    level = _candidates(low, high, FIRST, LEVELS)
    sums = tl.sum(tl.where(key[None, :] <= level[:, None], measure[None, :], 0.0), 1)
    tl.store(inside + found * LEVELS + tl.arange(0, LEVELS), sums)


@triton.jit
def _weigh(
    logits, stride, vocab, temperatures, top_ks, min_ps, highest, ceiling, mass,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr,
):  # fmt: skip
    """A chunk's weight, in float64."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    largest = _largest(highest, row, CHUNKS, CHUNKS_LOADED)
    if not _draws(temperature, tl.load(top_ks + row), largest):
        return
    distance, key = _distances(logits, stride, vocab, row, chunk, largest, CHUNK)
    weight = _weights(distance, key, temperature, tl.load(min_ps + row), tl.load(ceiling + row))
    tl.store(mass + row * CHUNKS + chunk, tl.sum(weight.to(tl.float64), 0))


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
    logits, stride, vocab, temperatures, top_ks, min_ps, seeds, choices, positions, highest, highest_at, ceiling, mass, tokens, finite,
    DRAW: tl.constexpr, TOKEN: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_LOADED: tl.constexpr,
):  # fmt: skip
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
        temperature = tl.load(temperatures + row)
        if _draws(temperature, tl.load(top_ks + row), largest):
            masses = tl.load(mass + row * CHUNKS + at, mask=real, other=0.0)
            total = tl.sum(masses, 0)
            under = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
            uniform = _uniform(tl.load(seeds + row), tl.load(choices + row), tl.load(positions + row), TOKEN)
            target = tl.minimum(uniform * total, under)
            chunk = _first_over(masses, 0.0, target, CHUNKS_LOADED)
            before = tl.sum(tl.where(at < chunk, masses, 0.0), 0)
            distance, key = _distances(logits, stride, vocab, row, chunk, largest, CHUNK)
            weight = _weights(distance, key, temperature, tl.load(min_ps + row), tl.load(ceiling + row))
            token = chunk * CHUNK + _first_over(weight.to(tl.float64), before, target, CHUNK)
    tl.store(tokens + row, tl.where(whole, token, -1).to(tl.int64))


class TokenSampler:
    """Holds what kernels of one call leave for each other, so that calls may be captured; not for concurrent use."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, chunk: int = 4096, levels: int = 16
    ) -> None:
        """`chunk` and `levels`, candidates of a round, are powers of two; sums are rounded by what the first one is."""
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._chunks = chunks = triton.cdiv(vocab_size, chunk)
        self._sizes = {"CHUNK": chunk, "CHUNKS": chunks, "CHUNKS_LOADED": triton.next_power_of_2(chunks)}
        self._levels = levels
        self._rounds = rounds_for(levels)

        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._highest = room(max_rows, chunks, dtype=torch.float32)
        self._highest_at = room(max_rows, chunks, dtype=torch.int32)
        self._lowest = room(max_rows, chunks, dtype=torch.float32)
        self._ceiling = room(max_rows, dtype=torch.int32)
        self._mass = room(max_rows, chunks, dtype=torch.float64)
        self._search = (
            room(2, max_rows, 2, dtype=torch.int32),
            room(2, max_rows, 2, dtype=torch.float64),
            room(2, max_rows, levels, dtype=torch.int32),
            room(2, max_rows, chunks, levels, dtype=torch.float32),
            room(2, max_rows, chunks, 2, dtype=torch.int32),
        )

    def __call__(
        self,
        logits: torch.Tensor,
        params: SampleParams,
        tokens: torch.Tensor | None = None,
        finite: torch.Tensor | None = None,
        *,
        draws: bool = True,
        top_k: bool = True,
        top_p: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [R] for `logits` [R, V] of any float type, a row's contiguous; and whether a row's largest logit is finite,
        bool [R]: where it is not, the token is -1.

        `draws` False says that no row is drawn, `top_k` and `top_p` False that none asks for that: it saves the launches.
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
        source = (logits, logits.stride(0), vocab)
        grid = (self._chunks, rows)
        _peaks[grid](
            *source,
            self._highest,
            self._highest_at,
            self._lowest,
            self._ceiling,
            CHUNK=self._sizes["CHUNK"],
            num_warps=4,
        )
        if draws:
            if top_k:
                self._narrow(source, params, params.top_k, mass=False)
            if top_p:
                self._narrow(source, params, params.top_p, mass=True)
            shape = (params.temperature, params.top_k, params.min_p)
            _weigh[grid](*source, *shape, self._highest, self._ceiling, self._mass, **self._sizes, num_warps=4)
        _choose[(rows,)](
            *source, params.temperature, params.top_k, params.min_p, params.seed, params.choice, params.position,
            self._highest, self._highest_at, self._ceiling, self._mass, tokens, finite,
            DRAW=draws, TOKEN=TOKEN, **self._sizes, num_warps=8 if draws else 1,
        )  # fmt: skip
        return tokens, finite

    def _narrow(
        self,
        source: tuple[torch.Tensor, int, int],
        params: SampleParams,
        limits: torch.Tensor,
        mass: bool,
    ) -> None:
        rows = len(source[0])
        for turn in range(self._rounds + 1):
            _narrow[(1 if turn == self._rounds else self._chunks, rows)](
                *source, params.temperature, params.top_k, limits, params.min_p, self._highest, self._lowest, self._ceiling,
                turn, self._max_rows, *self._search,
                FIRST=turn == 0, LAST=turn == self._rounds, MASS=mass, LEVELS=self._levels, **self._sizes, num_warps=4,
            )  # fmt: skip


def rounds_for(levels: int) -> int:
    """Until one key of 2^31 is left: half the first round's candidates are evenly spaced, and all of the others'."""
    width, rounds = -(-(2**31) // (levels // 2 + 1)), 1
    while width > 1:
        width, rounds = -(-width // (levels + 1)), rounds + 1
    return rounds
