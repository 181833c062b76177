"""Random weights for a configuration: for speed, where answers do not matter.

The same on every machine for one seed and one kind of device, on which they are drawn.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch

from kvrelay.engine.loader.checkpoint import Checkpoint, named_dtype, read_eos, read_json
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.registry import find

_SCALE = 0.02


class DummySource:
    def __init__(self, model: ModelConfig, seed: int) -> None:
        self._shapes = _shapes(model)
        self._seed = seed

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(self._shapes[name], dtype=dtype, device=device)
        key = hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:8]
        generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little", signed=True))
        return torch.randn(self._shapes[name], generator=generator, device=device).mul_(_SCALE).to(dtype)


def open_dummy(folder: Path, seed: int) -> Checkpoint:
    """For the config.json in `folder`. Raises BadWeights or UnsupportedModel."""
    config = read_json(folder / "config.json")
    source = DummySource(find(config).describe(config), seed)
    dtype = named_dtype(config) or torch.float32
    return Checkpoint(config, source, dtype, (), read_eos(folder, config), revision=f"dummy {seed}")


def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = model.hidden_size, model.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not model.tie_embeddings:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    projections = {
        "self_attn.q_proj": (model.q_size, hidden, model.qkv_bias),
        "self_attn.k_proj": (model.kv_size, hidden, model.qkv_bias),
        "self_attn.v_proj": (model.kv_size, hidden, model.qkv_bias),
        "self_attn.o_proj": (hidden, model.q_size, model.o_bias),
        "mlp.gate_proj": (inner, hidden, model.mlp_bias),
        "mlp.up_proj": (inner, hidden, model.mlp_bias),
        "mlp.down_proj": (hidden, inner, model.mlp_bias),
    }
    for layer in (f"model.layers.{index}" for index in range(model.num_layers)):
        for part, (rows, columns, bias) in projections.items():
            shapes[f"{layer}.{part}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{part}.bias"] = (rows,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if model.qk_norm:
            norms |= {"self_attn.q_norm": model.head_dim, "self_attn.k_norm": model.head_dim}
        shapes |= {f"{layer}.{part}.weight": (size,) for part, size in norms.items()}
    return shapes
