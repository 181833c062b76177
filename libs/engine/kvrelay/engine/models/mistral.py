"""Mistral, without its sliding window."""

from kvrelay.engine.models.config import HfConfig, ModelConfig, refuse_sliding_window
from kvrelay.engine.models.decoder import Decoder
from kvrelay.engine.models.llama import describe_family
from kvrelay.engine.models.registry import Architecture, register

_DEFAULT_WINDOW = 4096


def _describe(config: HfConfig) -> ModelConfig:
    # A configuration that does not speak of the window has one; only a null says that there is none.
    if "sliding_window" in config or not config.has_key("sliding_window"):
        refuse_sliding_window(config.integer("sliding_window", _DEFAULT_WINDOW))
    return describe_family(config, "MistralForCausalLM")


register("MistralForCausalLM", Architecture(_describe, Decoder))
