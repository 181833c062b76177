"""A model that is quick and otherwise as others are: a random Llama behind the bundled model's tokenizer."""

import shutil
from pathlib import Path

import torch
import transformers

LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 16
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""Of its KV in float32."""
VOCAB = 49_152
MODEL_FILES = ("model.safetensors", "config.json", "generation_config.json")


def make(folder: Path, bundled: Path, seed: int = 0) -> Path:
    """Into `folder`; `bundled` lends its tokenizer and template. Other seeds, other weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for file in bundled.iterdir():
        if file.is_file() and file.name not in MODEL_FILES:
            shutil.copy(file, folder / file.name)
    return folder
