"""Random numbers without state: Philox4x32-10, a function of what is drawn for and of nothing else.

Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011). The 64-bit key is the request's seed;
the 128-bit counter is (choice, position's low and high half, purpose). So a draw depends neither on the batch, nor on the
pod, nor on what was drawn before: a preempted, moved or restarted stream goes on as it would have.
"""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words, held in 64 bits so that products are exact."""

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MASK_64 = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """What a draw is for: draws of one position for different purposes are independent. Values are fixed for ever."""

    TOKEN = 0


def philox(counter: Words, key: Words) -> Words:
    """The block function, by column: `counter` [4, R] and `key` [2, R] give [4, R], all 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) of 53 bits a row: [R]. Seeds count modulo 2**64, so negative ones are seeds like others."""
    keys = np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64)
    where = np.array(positions, dtype=np.uint64)
    counter = np.stack(
        (np.array(choices, dtype=np.uint64), where & _LOW, where >> _HALF, np.full_like(where, int(purpose)))
    )
    words = philox(counter, np.stack((keys & _LOW, keys >> _HALF)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    fractions: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions
