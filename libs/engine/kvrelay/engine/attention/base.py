"""What every attention backend keeps to: prepared once a step, called once a layer."""

import dataclasses
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.cache import KvCache
from kvrelay.engine.models.rope import Rotation
from kvrelay.kernels.ops import Norm, Ops


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionBatch:
    """S sequences' parts of a step of T tokens, flattened. The first `num_decodes` parts have one token each."""

    query_starts: NDArray[np.int64]
    """[S + 1]: part i is tokens query_starts[i] : query_starts[i + 1]."""
    context_lens: NDArray[np.int64]
    """[S]: tokens that the part's last one attends to, itself included."""
    block_tables: NDArray[np.int32]
    """[S, …]: beyond a sequence's own blocks, any number."""
    slots: NDArray[np.int64]
    """[T]: where each token's KV goes."""
    num_decodes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """A layer's queries, keys and values as they were projected, neither normed nor rotated: `qkv` [T, Hq + 2 Hkv, D]."""

    qkv: torch.Tensor
    num_kv_heads: int
    rotation: Rotation
    norm: Norm | None
    """Of queries and keys, [Hq + Hkv, D]."""
    ops: Ops

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D]. Once: `qkv` may be overwritten."""
        num_kv = self.num_kv_heads
        qk, v = torch.split(self.qkv, [self.qkv.shape[1] - num_kv, num_kv], 1)
        q, k = torch.split(self.ops.rotate(qk, *self.rotation.tables, self.norm), [qk.shape[1] - num_kv, num_kv], 1)
        return q, k, v


class AttentionMetadata(Protocol):
    """One step's attention."""

    def mix(self, layer: int, heads: Heads, kv: KvCache) -> torch.Tensor:
        """Writes the keys and values of T' tokens into the cache, then attends: [T', Hq, D].

        T' may be over the step's T: what is beyond T is padding, neither written nor computed, and comes out as zeros.
        """
        ...


class AttentionBackend(Protocol):
    name: str

    def prepare(self, batch: AttentionBatch, kv: KvCache) -> AttentionMetadata: ...
