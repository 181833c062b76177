"""Models by shape alone: a configuration, and a tokenizer in which each token is a word. Weights are drawn where it is loaded."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
}


def write_model(folder: Path, shape: str, **changes: Any) -> Path:
    """For `--load-format dummy`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape] | {"torch_dtype": "bfloat16"} | changes
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(config["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.decoder = ByteLevel()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def weight_bytes(shape: str, *, itemsize: int = 2) -> int:
    """That a step reads: all of them, of an embedding that is looked up only a few rows. `itemsize` is that of the layers; scales and
    norms, less than a thousandth, are left out."""
    config = SHAPES[shape]
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner
    return itemsize * (layers * layer) + 2 * config["vocab_size"] * hidden


def kv_bytes(shape: str) -> int:
    """Of a token, in bfloat16."""
    config = SHAPES[shape]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim


def flops(shape: str, num_tokens: int) -> float:
    """Of a whole prompt's layers, causal attention with them, and one token's logits."""
    config = SHAPES[shape]
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    head = config["vocab_size"] * config["hidden_size"]
    products = 2.0 * ((weight_bytes(shape) / 2 - head) * num_tokens + head)
    attention = 2.0 * num_tokens**2 * config["num_attention_heads"] * head_dim * config["num_hidden_layers"]
    return products + attention
