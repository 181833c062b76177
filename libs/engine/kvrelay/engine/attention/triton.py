"""Attention on a GPU by Triton kernels, on paged KV where it lies."""

import torch

from kvrelay.engine.attention.base import Heads
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.inputs import DeviceInputs
from kvrelay.engine.models.config import ModelConfig
from kvrelay.kernels.triton.decode_attention import PagedDecode
from kvrelay.kernels.triton.prefill_attention import paged_prefill
from kvrelay.kernels.triton.rotary import rotate_and_store


class TritonAttention:
    name = "triton"

    def __init__(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> None:
        """Raises ValueError for heads that there is no kernel for."""
        self._block_size = config.block_size
        self._decode = PagedDecode(
            config.max_num_seqs,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            config.block_size,
            dtype,
            config.device,
        )

    def prepare(self, inputs: DeviceInputs) -> "TritonStep":
        if inputs.num_decodes:
            self._decode.plan(inputs.context_lens[: inputs.num_decodes])
        return TritonStep(inputs, self._decode, self._block_size)


class TritonStep:
    def __init__(self, inputs: DeviceInputs, decode: PagedDecode, block_size: int) -> None:
        self._inputs = inputs
        self._decode = decode
        self._block_size = block_size
        self._prefill_starts = inputs.query_starts[inputs.num_decodes :] - inputs.num_decodes

    def mix(self, layer: int, heads: Heads, kv: KvCache) -> torch.Tensor:
        inputs, nd = self._inputs, self._inputs.num_decodes
        keys, values, tables, lens = kv.keys[layer], kv.values[layer], inputs.block_tables, inputs.context_lens
        rotation = heads.rotation
        q = rotate_and_store(
            heads.qkv, *rotation.rope.table, rotation.positions, inputs.slots, keys, values, heads.norm
        )
        out = torch.empty_like(q)
        if nd:
            self._decode(q[:nd], keys, values, tables[:nd], lens[:nd], out[:nd])
        if len(q) > nd:
            paged_prefill(
                q[nd:], keys, values, tables[nd:], self._prefill_starts, lens[nd:], self._block_size, out[nd:]
            )
        return out
