"""Llama 1 to 3, SmolLM and SmolLM2, and what the rest of the family shares of a configuration."""

from kvrelay.engine.models.config import HfConfig, ModelConfig
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.errors import UnsupportedModel
from kvrelay.engine.models.registry import Architecture, register
from kvrelay.engine.models.rope import read_rope


def describe_family(
    config: HfConfig,
    architecture: str,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """`head_dim` is what an absent one means; None: the hidden size over the heads. Raises UnsupportedModel."""
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {activation} is not supported", "hidden_act")
    if "quantization_config" in config:
        raise UnsupportedModel("quantized checkpoints are not supported, GGUF aside", "quantization_config")
    hidden, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=config.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.positive("num_key_value_heads", heads),
        head_dim=config.positive("head_dim", head_dim or hidden // heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_positions=config.positive("max_position_embeddings", 2048),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        rope=read_rope(config),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _describe(config: HfConfig) -> ModelConfig:
    attention_bias = config.flag("attention_bias", False)
    return describe_family(
        config,
        "LlamaForCausalLM",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


register("LlamaForCausalLM", Architecture(_describe, Decoder))
