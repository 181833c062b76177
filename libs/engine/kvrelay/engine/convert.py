"""Between the float types of KV, bit for bit as torch rounds them (to nearest, ties to even), in numpy alone."""

import numpy as np
from numpy.typing import NDArray

from kvrelay.common.errors import IncompatibleLayout
from kvrelay.common.layout import KvDtype

Bits = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]

_STORAGE: dict[KvDtype, np.dtype[np.uint8] | np.dtype[np.uint16] | np.dtype[np.uint32]] = {
    KvDtype.FLOAT32: np.dtype(np.uint32),
    KvDtype.BFLOAT16: np.dtype(np.uint16),
    KvDtype.FLOAT16: np.dtype(np.uint16),
    KvDtype.FLOAT8_E4M3: np.dtype(np.uint8),
}
_FLOAT8_LARGEST = np.uint32(0x7E)
"""448: what is larger becomes it, infinity as well, as the type has none. The code above it is no number."""
_INFINITY = np.uint32(0x7F800000)
_FLOAT8_NORMAL = np.uint32(0x3C800000)
"""2^-6, the smallest that has a whole significand."""
_FLOAT8_ADDEND = np.float32(2.0**14)
"""In which a step of the last place is 2^-9, as in what is smaller than that: an addition rounds as it should."""
_FLOAT8_REBIAS = np.uint32((7 - 127) << 23 & 0xFFFFFFFF)


def storage(dtype: KvDtype) -> np.dtype[np.uint8] | np.dtype[np.uint16] | np.dtype[np.uint32]:
    """What carries the bits of a type, where numpy need not know it. Raises IncompatibleLayout."""
    if dtype not in _STORAGE:
        raise IncompatibleLayout(f"KV of {dtype} is not converted")
    return _STORAGE[dtype]


def convert(source: Bits, source_dtype: KvDtype, target: Bits, target_dtype: KvDtype) -> None:
    """The bits of `source` as `target_dtype` into `target`, of the same shape."""
    if source_dtype is target_dtype:
        target[...] = source
    else:
        _narrow(_widen(source, source_dtype), target, target_dtype)


def _widen(source: Bits, dtype: KvDtype) -> NDArray[np.float32]:
    match dtype:
        case KvDtype.BFLOAT16:
            return (source.astype(np.uint32) << 16).view(np.float32)
        case KvDtype.FLOAT16:
            return source.view(np.float16).astype(np.float32)
        case KvDtype.FLOAT8_E4M3:
            return _FLOAT8[source]
    return source.view(np.float32)


def _narrow(source: NDArray[np.float32], target: Bits, dtype: KvDtype) -> None:
    match dtype:
        case KvDtype.BFLOAT16:
            bits = source.view(np.uint32)
            # Half of the last kept place, less one where that place is even; a carry runs into the exponent, as it should.
            rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
            target[...] = np.where(np.isnan(source), np.uint32(0x7FC0), rounded)
        case KvDtype.FLOAT16:
            with np.errstate(over="ignore"):  # what is too large becomes infinite
                target.view(np.float16)[...] = source
        case KvDtype.FLOAT8_E4M3:
            target[...] = _to_float8(source.view(np.uint32))
        case _:
            target.view(np.float32)[...] = source


def _to_float8(bits: NDArray[np.uint32]) -> NDArray[np.uint8]:
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Half of the last kept place, less one where that place is even; a carry runs into the exponent.
    rounded = (size + _FLOAT8_REBIAS + ((size >> 20) & 1) + np.uint32(0x7FFFF)) >> 20
    with np.errstate(invalid="ignore", over="ignore"):  # of what is no small number, whose result is not taken
        small = (size.view(np.float32) + _FLOAT8_ADDEND).view(np.uint32) - _FLOAT8_ADDEND.view(np.uint32)
    kept = np.where(size < _FLOAT8_NORMAL, small, np.minimum(rounded, _FLOAT8_LARGEST))
    codes: NDArray[np.uint8] = (np.where(size > _INFINITY, np.uint32(0x7F), kept) | sign).astype(np.uint8)
    return codes


def _all_float8() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 7), np.ldexp(fraction / 8, -6))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -size, size)).astype(np.float32)


_FLOAT8 = _all_float8()
"""What each code stands for."""
