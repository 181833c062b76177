"""The decoder of the Llama family: attention with grouped queries, a gated MLP, norms before each."""

import torch

from kvrelay.engine.attention.base import AttentionMetadata
from kvrelay.engine.batch import LayerHook
from kvrelay.engine.cache import KvCache
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.layers import Linear, RmsNorm, linear, no_norm, silu_gate, tied_head
from kvrelay.engine.models.rope import Rope, rotate
from kvrelay.engine.models.weights import Weights


class Decoder:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Raises BadWeights, which names the tensor."""
        self.config = config
        self.dtype = weights.dtype
        self._rope = Rope(config.rope, config.head_dim)
        embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [Layer(config, index, weights) for index in range(config.num_layers)]
        self._norm = RmsNorm(weights.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        if config.tie_embeddings:
            self._head = tied_head(embedding)
        else:
            self._head = linear(weights.take("lm_head.weight", config.vocab_size, config.hidden_size))
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
    ) -> torch.Tensor:
        """`token_ids`, `positions` int64 [T] → normalized hidden states [T, H].

        `on_layer(i)` is called when layer i's KV lies in the cache and its attention was issued.
        """
        hidden = torch.nn.functional.embedding(token_ids, self._embedding).to(self.dtype)
        cos, sin = self._rope.tables(positions, self.dtype)
        for index, layer in enumerate(self._layers):
            q, k, v = layer.project(hidden, cos, sin)
            mixed = attention.attend(index, q, k, v, kv)
            on_layer(index)
            hidden = layer.finish(hidden, mixed)
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → float32 [R, V], of its own memory."""
        return self._head(hidden).to(torch.float32)


class Layer:
    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        self._config = config
        name, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
        eps = config.rms_norm_eps

        def projection(parts: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
            weight = weights.merge(tuple(f"{name}.{part}.weight" for part in parts), rows, columns)
            offset = weights.merge(tuple(f"{name}.{part}.bias" for part in parts), rows) if bias else None
            return linear(weight, offset)

        self._input_norm = RmsNorm(weights.take(f"{name}.input_layernorm.weight", hidden), eps)
        self._qkv = projection(
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (config.q_size, config.kv_size, config.kv_size),
            hidden,
            config.qkv_bias,
        )
        self._output = projection(("self_attn.o_proj",), (hidden,), config.q_size, config.o_bias)
        self._mlp_norm = RmsNorm(weights.take(f"{name}.post_attention_layernorm.weight", hidden), eps)
        self._gate_up = projection(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias)
        self._down = projection(("mlp.down_proj",), (hidden,), inner, config.mlp_bias)
        self._head_norm = _head_norm(config, name, weights) if config.qk_norm else no_norm

    def project(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, Hq, D], keys and values [T, Hkv, D]; queries and keys are rotated together."""
        config = self._config
        qkv = self._qkv(self._input_norm(hidden)).view(len(hidden), -1, config.head_dim)
        turned, v = torch.split(qkv, [config.num_heads + config.num_kv_heads, config.num_kv_heads], 1)
        q, k = torch.split(rotate(self._head_norm(turned), cos, sin), [config.num_heads, config.num_kv_heads], 1)
        return q, k, v

    def finish(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, H] and its attention [T, Hq, D] → the layer's output [T, H]."""
        hidden = hidden + self._output(mixed.flatten(1))
        return hidden + self._down(silu_gate(self._gate_up(self._mlp_norm(hidden))))


def _head_norm(config: ModelConfig, name: str, weights: Weights) -> RmsNorm:
    """Of each head of queries and keys together, [T, Hq + Hkv, D]."""
    queries = weights.take(f"{name}.self_attn.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
    keys = weights.take(f"{name}.self_attn.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
    return RmsNorm(torch.cat((queries, keys)), config.rms_norm_eps)
