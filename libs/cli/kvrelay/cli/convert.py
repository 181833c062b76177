"""From a GGUF file to a Hugging Face directory: the one module of the command line that needs torch and transformers."""

import json
import os
from collections.abc import Callable
from pathlib import Path

GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(gguf: Path, target: Path, report: Callable[[str], None]) -> None:
    """Writes config, tokenizer, chat template and float32 weights of a Llama-shaped GGUF into the directory `target`.

    `report` is told of each stage. Raises ValueError for a file without a chat template or with weights that do not fit.
    """
    # The file is here; nothing is to be looked up on a hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    report("loading torch and transformers")
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    report("converting the tokenizer")
    _write_tokenizer(gguf, target)
    report("dequantizing the weights")
    _write_weights(gguf, target, report)


def _write_tokenizer(gguf: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} carries no chat template")
    tokenizer.save_pretrained(str(target))


def _write_weights(gguf: Path, target: Path, report: Callable[[str], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = LlamaConfig.from_dict(_plain(loaded.config.to_dict()))
    config.dtype = torch.float32
    # A model that was loaded from a GGUF refuses to be saved; a fresh one with its weights does not.
    model = LlamaForCausalLM(config).float()  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict(), strict=True)
    report("writing the weights")
    model.save_pretrained(str(target))
    (target / "model.safetensors").chmod(0o644)
    ids = {key: getattr(config, key) for key in GENERATION_KEYS}
    (target / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _plain(config: dict[str, object]) -> dict[str, object]:
    """Without what says that the weights were quantized, and where they came from."""
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "dtype")
    return {key: value for key, value in config.items() if key not in dropped}
