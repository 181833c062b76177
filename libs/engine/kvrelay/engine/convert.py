"""Between the float types of KV, bit for bit as torch rounds them (to nearest, ties to even), in numpy alone."""

import numpy as np
from numpy.typing import NDArray

from kvrelay.common.errors import IncompatibleLayout
from kvrelay.common.layout import KvDtype

Bits = NDArray[np.uint16] | NDArray[np.uint32]

_STORAGE: dict[KvDtype, np.dtype[np.uint16] | np.dtype[np.uint32]] = {
    KvDtype.FLOAT32: np.dtype(np.uint32),
    KvDtype.BFLOAT16: np.dtype(np.uint16),
    KvDtype.FLOAT16: np.dtype(np.uint16),
}


def storage(dtype: KvDtype) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
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
        case _:
            target.view(np.float32)[...] = source
