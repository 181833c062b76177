"""The decoder of the Llama family: attention with grouped queries, a gated MLP, norms before each."""

import torch

from kvrelay.engine.attention.base import AttentionMetadata, Heads
from kvrelay.engine.batch import LayerHook
from kvrelay.engine.cache import KvCache
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.layers import Linear, linear, rms_norm, tied_head
from kvrelay.engine.models.rope import Rope, Rotation
from kvrelay.engine.models.weights import Weights
from kvrelay.kernels.ops import Norm, Ops


class Decoder:
    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        """Raises BadWeights, which names the tensor."""
        self.config = config
        self.dtype = weights.dtype
        self._ops = ops
        self._rope = Rope(config.rope, config.head_dim, config.max_positions, weights.device)
        embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [Layer(config, index, weights, ops) for index in range(config.num_layers)]
        self._norm = rms_norm(weights.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        if config.tie_embeddings:
            self._head = tied_head(ops, embedding)
        else:
            self._head = linear(ops, weights.take("lm_head.weight", config.vocab_size, config.hidden_size))
        self._embedding = embedding if self._head.uses(embedding) else embedding.to(weights.stored_dtype)
        weights.finish(self._unused)

    def _unused(self, name: str) -> bool:
        """Old checkpoints store the rotary frequencies; some store a tied output layer twice."""
        return name.endswith("rotary_emb.inv_freq") or (self.config.tie_embeddings and name == "lm_head.weight")

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvCache,
        attention: AttentionMetadata,
        on_layer: LayerHook,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`token_ids`, `positions` int64 [T] → normalized hidden states [T, H], or [R, H] of the tokens `wanted`, int64 [R]:
        of others the last layer computes nothing beyond their KV and their attention.

        `on_layer(i)` is called when layer i's KV lies in the cache and its attention was issued.
        """
        hidden = torch.nn.functional.embedding(token_ids, self._embedding).to(self.dtype)
        rotation = Rotation(self._rope, positions, self.dtype)
        delta: torch.Tensor | None = None  # what is still to be added to `hidden`, together with the next norm
        for index, layer in enumerate(self._layers):
            mixed = attention.mix(index, layer.project(hidden, delta, rotation), kv)
            on_layer(index)
            if wanted is not None and layer is self._layers[-1]:
                if not len(wanted):
                    return hidden[:0]
                hidden, mixed = hidden[wanted], mixed[wanted]
            delta = layer.finish(hidden, mixed)
        return self._ops.add_norm(hidden, delta, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → float32 [R, V], of its own memory."""
        return self._head.wide(hidden)


class Layer:
    def __init__(self, config: ModelConfig, index: int, weights: Weights, ops: Ops) -> None:
        self._config = config
        self._ops = ops
        name, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        eps = config.rms_norm_eps

        def projection(parts: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
            weight = weights.factor(tuple(f"{name}.{part}.weight" for part in parts), rows, columns)
            offset = weights.merge(tuple(f"{name}.{part}.bias" for part in parts), rows) if bias else None
            return linear(ops, weight, offset)

        self._input_norm = rms_norm(weights.take(f"{name}.input_layernorm.weight", hidden), eps)
        self._qkv = projection(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (config.q_size, config.kv_size, config.kv_size),
            hidden,
            config.qkv_bias,
        )
        self._output = projection(("self_attn.o_proj",), (hidden,), config.q_size, config.o_bias)
        self._mlp_norm = rms_norm(weights.take(f"{name}.post_attention_layernorm.weight", hidden), eps)
        self._gate_up = projection(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias)
        self._down = projection(("mlp.down_proj",), (hidden,), inner, config.mlp_bias)
        self._head_norm = _head_norm(config, name, weights) if config.qk_norm else None

    def project(self, hidden: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation) -> Heads:
        """Adds `delta` to `hidden` [T, H] in place. Queries, keys and values, not rotated yet."""
        config = self._config
        normed = self._ops.add_norm(hidden, delta, self._input_norm)
        qkv = self._qkv(normed).view(len(hidden), -1, config.head_dim)
        return Heads(qkv, config.num_kv_heads, rotation, self._head_norm, self._ops)

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor | None:
        """Adds the attention `mixed` [T, Hq, D] to `hidden` [T, H] in place, and the MLP as far as `add_norm` is not to: gives what
        is."""
        normed = self._ops.add_norm(hidden, self._output.added(mixed.flatten(1), hidden), self._mlp_norm)
        return self._down.added(self._gate_up.gated(normed), hidden)


def _head_norm(config: ModelConfig, name: str, weights: Weights) -> Norm:
    """Of each head of queries and keys together, [Hq + Hkv, D]."""
    queries = weights.take(f"{name}.self_attn.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
    keys = weights.take(f"{name}.self_attn.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
    return rms_norm(torch.cat((queries, keys)), config.rms_norm_eps)
