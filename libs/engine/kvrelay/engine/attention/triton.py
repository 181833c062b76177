"""Attention on a GPU: of single tokens by a Triton kernel on paged KV, of prompts by what is given for them."""

import torch

from kvrelay.engine.attention.base import Heads
from kvrelay.engine.attention.prefill import Operands, Pages, Part, Prefill, Run, attend
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.inputs import DeviceInputs
from kvrelay.engine.models.config import ModelConfig
from kvrelay.kernels.triton.decode_attention import PagedDecode
from kvrelay.kernels.triton.prefill_attention import paged_prefill
from kvrelay.kernels.triton.rotary import rotate_and_store


class TritonPages(Pages):
    """A run by Triton's kernel on paged KV."""

    def __init__(self, block_size: int, inputs: DeviceInputs, run: Run) -> None:
        super().__init__(inputs, run)
        self._block_size = block_size

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        return paged_prefill(
            given.q[self.tokens],
            given.keys,
            given.values,
            self.tables,
            self.starts,
            self.lens,
            self._block_size,
            out,
        )


class PaddedPages:
    """All prompts of a padded step by Triton's kernel: what is launched does not depend on where they are."""

    at_hand = False

    def __init__(self, block_size: int, inputs: DeviceInputs) -> None:
        first, self.rows = inputs.num_decodes, len(inputs.token_ids)
        self.tokens = slice(0, self.rows)
        self._block_size = block_size
        self._tables = inputs.block_tables[first:]
        self._starts = inputs.query_starts[first:]
        self._lens = inputs.context_lens[first:]

    def attend(self, given: Operands, out: torch.Tensor) -> torch.Tensor:
        """Leaves what comes before the first prompt as it is, and zeros what comes behind the last."""
        return paged_prefill(
            given.q[self.tokens],
            given.keys,
            given.values,
            self._tables,
            self._starts,
            self._lens,
            self._block_size,
            out,
        )


class TritonAttention:
    def __init__(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, prefill: Prefill) -> None:
        """Where `prefill` takes keys and values that are at hand, KV must be of the model's dtype: what is attended to is what
        is stored. Raises ValueError for heads that there is no kernel for."""
        self.name = prefill.name
        self.prefill = prefill
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
        nd = inputs.num_decodes
        if nd:
            self._decode.plan(inputs.context_lens[:nd])
        if inputs.prompts is None:
            return TritonStep(inputs, self._decode, [PaddedPages(self._block_size, inputs)])
        return TritonStep(inputs, self._decode, self.prefill.plan(inputs))


class TritonStep:
    def __init__(self, inputs: DeviceInputs, decode: PagedDecode, parts: list[Part]) -> None:
        self._inputs = inputs
        self._decode = decode
        self._parts = parts
        self._rows = max((part.rows for part in parts), default=0)
        self._at_hand = any(part.at_hand for part in parts)

    def mix(self, layer: int, heads: Heads, kv: KvCache) -> torch.Tensor:
        inputs, nd = self._inputs, self._inputs.num_decodes
        keys, values, rotation, qkv = kv.keys[layer], kv.values[layer], heads.rotation, heads.qkv
        num_tokens, num_kv = len(qkv), heads.num_kv_heads
        room = qkv.new_empty(max(num_tokens, self._rows), qkv.shape[1] - 2 * num_kv, qkv.shape[2])
        at_hand = qkv.new_empty(2, num_tokens, num_kv, qkv.shape[2]) if self._at_hand else None
        q = rotate_and_store(
            qkv,
            *rotation.rope.table,
            rotation.positions,
            inputs.slots,
            keys,
            values,
            heads.norm,
            room[:num_tokens],
            at_hand,
        )
        out = torch.empty_like(q)
        if nd:
            self._decode(q[:nd], keys, values, inputs.block_tables[:nd], inputs.context_lens[:nd], out[:nd])
        return attend(self._parts, Operands(room, at_hand, keys, values), out)
