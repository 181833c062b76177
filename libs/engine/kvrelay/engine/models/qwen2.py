"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from kvrelay.engine.models.config import HfConfig, ModelConfig, refuse_sliding_window
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.llama import describe_family
from kvrelay.engine.models.registry import Architecture, register


def refuse_active_window(config: HfConfig) -> None:
    """Qwen's configurations carry a window that is mostly switched off. Raises UnsupportedModel where it is on."""
    if config.flag("use_sliding_window", False) or "sliding_attention" in config.texts("layer_types"):
        refuse_sliding_window(config.integer("sliding_window", 4096))


def _describe(config: HfConfig) -> ModelConfig:
    refuse_active_window(config)
    return describe_family(config, "Qwen2ForCausalLM", qkv_bias=True)


register("Qwen2ForCausalLM", Architecture(_describe, Decoder))
