"""What copies KV of a GPU's cache, and in which types."""

import dataclasses
from collections.abc import Callable

import torch

from kvrelay.common.layout import KvDtype
from kvrelay.engine.cache import TORCH_DTYPES
from kvrelay.engine.convert import storage
from kvrelay.kernels import reference

_OUTSIDE_DTYPES = TORCH_DTYPES | {KvDtype.FLOAT8_E4M3: torch.float8_e4m3fn}
"""What spans and parts may be of where they go to or come from."""


@dataclasses.dataclass(frozen=True, slots=True)
class CopyKernels:
    """See `reference`."""

    pack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = reference.pack
    unpack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = reference.unpack
    leaves: Callable[[torch.Tensor], torch.Tensor] = reference.leaves


TWINS = CopyKernels()
"""In plain torch."""


def torch_dtype(dtype: KvDtype) -> torch.dtype:
    """Raises IncompatibleLayout where KV is not converted to it."""
    storage(dtype)
    return _OUTSIDE_DTYPES[dtype]
