"""The compiled kernels on tensors."""

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.kernels.cpu.compiled import (
    LANES,
    PIECE,
    add_norm_kernel,
    decode_kernel,
    decode_room,
    rotate_kernel,
    silu_gate_kernel,
)
from kvrelay.kernels.cpu.openmp import arguments
from kvrelay.kernels.ops import Norm
from kvrelay.kernels.reference import ReferenceOps

ALONE_ELEMENTS = 8192
"""Up to which one thread is done before it could have told the others."""


class CompiledOps(ReferenceOps):
    """See `Ops`. Products are torch's."""

    name = "compiled"

    def __init__(self, dtype: torch.dtype) -> None:
        """Compiles. Raises NoThreads."""
        self._add_norm = add_norm_kernel(dtype.itemsize)
        self._rotate = rotate_kernel(dtype.itemsize)
        self._silu_gate = silu_gate_kernel(dtype.itemsize)

    def add_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        rows, width = hidden.shape
        out = torch.empty_like(hidden)
        added = 0 if delta is None else delta.data_ptr()
        values = arguments(
            rows, width, hidden.data_ptr(), added, norm.weight.data_ptr(), norm.eps.data_ptr(), out.data_ptr()
        )
        self._add_norm.run(values, rows * width > ALONE_ELEMENTS)
        return out

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        tokens, count, dim = heads.shape
        weight, eps = (0, 0) if norm is None else (norm.weight.data_ptr(), norm.eps.data_ptr())
        values = arguments(
            tokens, heads.stride(0), count, dim, heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight, eps
        )
        self._rotate.run(values, heads.numel() > ALONE_ELEMENTS)
        return heads

    def silu_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((rows, width))
        values = arguments(rows, width, gate_up.data_ptr(), out.data_ptr())
        self._silu_gate.run(values, rows * width > ALONE_ELEMENTS // 4)
        return out


class DecodeKernel:
    """Attention of single tokens on paged KV, for one shape of heads."""

    def __init__(self, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
        """Compiles. Raises NoThreads, and ValueError for what there is no kernel for."""
        if dim % LANES:
            raise ValueError(f"heads of {dim} are not a multiple of {LANES}")
        for each in (dtype, kv_dtype):
            if each not in (torch.float32, torch.bfloat16):
                raise ValueError(f"no kernel computes on {each}")
        self.num_kv_heads, self.group, self.dim = num_kv_heads, num_heads // num_kv_heads, dim
        self.kernel = decode_kernel(dim, self.group, dtype.itemsize, kv_dtype.itemsize)
        self.scale = torch.tensor(dim**-0.5, dtype=torch.float32)

    def prepare(self, block_tables: NDArray[np.int32], lens: NDArray[np.int64], block_size: int) -> "PagedDecode":
        """For S sequences whose last token is being computed: block tables [S, …], tokens with it [S]."""
        return PagedDecode(self, block_tables, lens, block_size)


class PagedDecode:
    """A step's decodes; called once a layer."""

    def __init__(
        self, kernel: DecodeKernel, block_tables: NDArray[np.int32], lens: NDArray[np.int64], block_size: int
    ) -> None:
        self._kernel = kernel
        pieces = _pieces(lens)
        heads = kernel.num_kv_heads * kernel.group
        partial = len(pieces) * heads * (kernel.dim + 2) if len(pieces) > len(lens) else 0
        self._partial = np.empty(partial, np.float32)
        self._room = np.empty(torch.get_num_threads() * decode_room(kernel.dim, kernel.group), np.uint8)
        self._held = (pieces, np.ascontiguousarray(block_tables), lens)
        addresses = [held.ctypes.data for held in self._held]
        self._values = arguments(
            len(pieces), kernel.num_kv_heads, block_size, block_tables.shape[1], 0, 0, 0, *addresses
        )
        self._rest = (kernel.scale.data_ptr(), self._partial.ctypes.data, self._room.ctypes.data)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """`q` [S, Hq, D], `k` and `v` [S, Hkv, D], of which a token's are contiguous. Stores `k` and `v` as the sequences' last
        tokens in the cached `keys` and `values` [slots, Hkv, D] and attends: [S, Hq, D]."""
        out = q.new_empty(q.shape)
        head = self._values
        head[4], head[5], head[6] = q.stride(0), k.stride(0), v.stride(0)
        tensors = (tensor.data_ptr() for tensor in (q, k, v, keys, values, out))
        self._kernel.kernel.run(arguments(*head, *self._rest, *tensors), True)
        return out


def _pieces(lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """[P, 4]: sequence, first token, tokens, tokens of all pieces up to and with it."""
    counts = -(-lens // PIECE)
    seqs = np.repeat(np.arange(len(lens)), counts)
    firsts = (np.arange(len(seqs)) - np.repeat(counts.cumsum() - counts, counts)) * PIECE
    tokens = np.minimum(lens[seqs] - firsts, PIECE)
    return np.stack((seqs, firsts, tokens, tokens.cumsum()), 1)
