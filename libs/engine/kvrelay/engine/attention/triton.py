"""Attention on a GPU by Triton kernels, on paged KV where it lies; of long whole prompts by what is given for them."""

import dataclasses
import math

import torch

from kvrelay.engine.attention.base import Heads
from kvrelay.engine.attention.whole import WholePrompts, padded
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.inputs import DeviceInputs, Prompt
from kvrelay.engine.models.config import ModelConfig
from kvrelay.kernels.triton.decode_attention import PagedDecode
from kvrelay.kernels.triton.prefill_attention import paged_prefill
from kvrelay.kernels.triton.rotary import rotate_and_store


class TritonAttention:
    def __init__(
        self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, whole: WholePrompts | None = None
    ) -> None:
        """With `whole`, KV must be of the model's dtype: what is attended to is what is stored. Raises ValueError for heads
        that there is no kernel for."""
        self.name = "triton" if whole is None else "cudnn"
        self._block_size = config.block_size
        self._whole = whole
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
        whole, runs = divide(inputs.prompts, math.inf if self._whole is None else self._whole.from_tokens)
        pages = [Pages(run, inputs, nd) for run in runs]
        return TritonStep(inputs, self._block_size, self._decode, pages, self._whole, whole)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Of prompts one after the other."""

    first: int
    """The first of them."""
    prompts: list[Prompt] = dataclasses.field(default_factory=list)


def divide(prompts: tuple[Prompt, ...], from_tokens: float) -> tuple[list[Prompt], list[Run]]:
    """The whole ones of at least `from_tokens`; of all others, runs without such a one between them."""
    whole: list[Prompt] = []
    runs: list[Run] = []
    for index, prompt in enumerate(prompts):
        if prompt.whole and prompt.end - prompt.start >= from_tokens:
            whole.append(prompt)
        elif runs and runs[-1].first + len(runs[-1].prompts) == index:
            runs[-1].prompts.append(prompt)
        else:
            runs.append(Run(index, [prompt]))
    return whole, runs


class Pages:
    """Of a run of prompts, what the kernel on paged KV reads."""

    def __init__(self, run: Run, inputs: DeviceInputs, num_decodes: int) -> None:
        self.tokens = slice(run.prompts[0].start, run.prompts[-1].end)
        first, end = num_decodes + run.first, num_decodes + run.first + len(run.prompts)
        self.tables = inputs.block_tables[first:end]
        self.starts = inputs.query_starts[first : end + 1] - run.prompts[0].start
        self.lens = inputs.context_lens[first:end]


class TritonStep:
    def __init__(
        self,
        inputs: DeviceInputs,
        block_size: int,
        decode: PagedDecode,
        pages: list[Pages],
        attend_whole: WholePrompts | None,
        whole: list[Prompt],
    ) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._decode = decode
        self._pages = pages
        self._attend_whole = attend_whole
        self._whole = whole
        self._rows = max((prompt.start + padded(prompt.end - prompt.start) for prompt in whole), default=0)

    def mix(self, layer: int, heads: Heads, kv: KvCache) -> torch.Tensor:
        inputs, nd = self._inputs, self._inputs.num_decodes
        keys, values, rotation, qkv = kv.keys[layer], kv.values[layer], heads.rotation, heads.qkv
        num_tokens, num_kv = len(qkv), heads.num_kv_heads
        # The rows behind the last token are read as queries of padding, which may be anything.
        room = qkv.new_empty(max(num_tokens, self._rows), qkv.shape[1] - 2 * num_kv, qkv.shape[2])
        at_hand = qkv.new_empty(2, num_tokens, num_kv, qkv.shape[2]) if self._whole else None
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
        for pages in self._pages:
            paged_prefill(
                q[pages.tokens],
                keys,
                values,
                pages.tables,
                pages.starts,
                pages.lens,
                self._block_size,
                out[pages.tokens],
            )
        if self._attend_whole is not None and at_hand is not None:
            for prompt in self._whole:
                mixed = self._attend_whole(room, at_hand, prompt.start, prompt.end)
                if len(mixed) == num_tokens:
                    return mixed
                out[prompt.start : prompt.end] = mixed
        return out
