"""Qwen3: Llama with normalized queries and keys."""

from kvrelay.engine.models.config import HfConfig, ModelConfig
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.llama import describe_family
from kvrelay.engine.models.qwen2 import refuse_active_window
from kvrelay.engine.models.registry import Architecture, register

_DEFAULT_HEAD_DIM = 128


def _describe(config: HfConfig) -> ModelConfig:
    refuse_active_window(config)
    bias = config.flag("attention_bias", False)
    return describe_family(
        config, "Qwen3ForCausalLM", head_dim=_DEFAULT_HEAD_DIM, qkv_bias=bias, o_bias=bias, qk_norm=True
    )


register("Qwen3ForCausalLM", Architecture(_describe, Decoder))
