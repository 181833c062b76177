"""The counter-based generator: known answers, independence of rows, range."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.rng import Purpose, philox, uniforms

pytestmark = pytest.mark.unit

# The known-answer vectors that the authors of Philox publish for 4x32, 10 rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = st.integers(-(2**63), 2**63 - 1)
DRAWS = st.lists(st.tuples(SEEDS, st.integers(0, 127), st.integers(0, 2**40)), min_size=1, max_size=20)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The algorithm in plain integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def test_known_answers_in_one_batch() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN], dtype=np.uint64).T
    keys = np.array([words(key) for _, key, _ in KNOWN], dtype=np.uint64).T
    assert philox(counters, keys).T.tolist() == [words(output) for _, _, output in KNOWN]


@given(draws=DRAWS)
def test_uniforms_are_the_upper_53_bits_of_two_words(draws: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = zip(*draws, strict=True)
    expected = []
    for seed, choice, position in draws:
        key = seed % 2**64
        a, b, _, _ = plain_philox(
            [choice, position % 2**32, position // 2**32, Purpose.TOKEN], [key % 2**32, key // 2**32]
        )
        expected.append(((a >> 5) * 2**26 + (b >> 6)) / 2**53)
    found = uniforms(seeds, choices, positions, Purpose.TOKEN)
    assert found.tolist() == expected
    assert found.min() >= 0.0
    assert found.max() < 1.0


@given(draws=DRAWS)
def test_rows_do_not_depend_on_one_another(draws: list[tuple[int, int, int]]) -> None:
    seeds, choices, positions = zip(*draws, strict=True)
    together = uniforms(seeds, choices, positions, Purpose.TOKEN)
    alone = [uniforms([seed], [choice], [position], Purpose.TOKEN)[0] for seed, choice, position in draws]
    assert together.tolist() == alone


def test_pinned_values() -> None:
    """These may never change: a stream that is resumed after an upgrade goes on as it would have."""
    found = uniforms([0, 42, -1], [0, 3, 127], [0, 1000, 2**33 + 5], Purpose.TOKEN)
    assert found.tolist() == [0.39904647231489565, 0.37584037152575955, 0.11893271099219371]


def test_numbers_are_spread_evenly_and_uncorrelated() -> None:
    count = 20_000
    found = uniforms([7] * count, [0] * count, range(count), Purpose.TOKEN)
    bins = np.bincount((found * 64).astype(int), minlength=64)
    assert ((bins - count / 64) ** 2 / (count / 64)).sum() < 103.4  # chi-square, 63 degrees of freedom, 0.1%
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03
    other = uniforms([7] * count, [1] * count, range(count), Purpose.TOKEN)
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.03
