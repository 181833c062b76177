"""What every attention backend keeps to: prepared once a step, called once a layer."""

import dataclasses
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.cache import KvCache


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


class AttentionMetadata(Protocol):
    """One step's attention."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KvCache) -> torch.Tensor:
        """Writes `k`, `v` [T', Hkv, D] into the cache, then attends: `q` [T', Hq, D] → [T', Hq, D].

        T' may be over the step's T: what is beyond T is padding, neither written nor computed, and comes out as zeros.
        """
        ...


class AttentionBackend(Protocol):
    name: str

    def prepare(self, batch: AttentionBatch, kv: KvCache) -> AttentionMetadata: ...
