"""Loads a model: finds the checkpoint, reads its configuration, builds the model from its tensors."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kvrelay.common.errors import Unsupported
from kvrelay.common.ids import Fingerprint
from kvrelay.common.modelfiles import missing, tokenizer_bytes
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.loader.checkpoint import DTYPES, Checkpoint
from kvrelay.engine.loader.dummy import open_dummy
from kvrelay.engine.loader.fingerprint import fingerprint
from kvrelay.engine.loader.shards import open_safetensors
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.errors import BadWeights
from kvrelay.engine.models.registry import CausalModel, find
from kvrelay.engine.models.weights import Weights
from kvrelay.kernels.ops import choose_ops

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""What is being done, how far it is, how far it goes."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    model: CausalModel
    dtype: torch.dtype
    """Of the weights and, unless told otherwise, the KV; `model.dtype` is what is computed in."""
    model_config: ModelConfig
    fingerprint: Fingerprint
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int


def load_model(config: EngineConfig, on_progress: OnProgress) -> LoadedModel:
    """Raises UnsupportedModel, BadWeights or Unsupported, with a message for whoever started the engine."""
    check_device(config.device)
    checkpoint = _open(config)
    architecture = find(checkpoint.config)
    described = architecture.describe(checkpoint.config)
    max_model_len = _max_model_len(config, described)
    dtype = checkpoint.dtype if config.dtype == "auto" else DTYPES[config.dtype]
    arithmetic = arithmetic_of(dtype, config.device)
    if arithmetic is not dtype:
        log.info("this processor has no instructions for %s: weights and KV are so, the arithmetic is float32", dtype)
    if config.quantization == "fp8":
        check_fp8(config.device, dtype)
    weights = Weights(
        checkpoint.source,
        dtype,
        arithmetic,
        lambda done, total: on_progress("loading weights", done, total),
        config.device,
        in_8_bits=config.quantization == "fp8",
    )
    try:
        ops, reason = choose_ops(config.device, arithmetic, config.kernels)
    except ValueError as error:
        raise Unsupported(str(error), "kernels") from error
    log.info("kernels: %s", reason)
    with torch.inference_mode():
        model = architecture.build(described, weights, ops)
    identity = fingerprint(
        described,
        checkpoint.files,
        tokenizer_bytes(config.model),
        checkpoint.revision if config.quantization == "none" else f"{checkpoint.revision} {config.quantization}",
        lambda done, total: on_progress("hashing weights", done, total),
    )
    eos = tuple(token for token in checkpoint.eos_token_ids if token < described.vocab_size)
    return LoadedModel(model, dtype, described, identity, eos, max_model_len, described.vocab_size)


def check_device(device: str) -> None:
    """Raises Unsupported for a GPU that is not there, or that this torch cannot use."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise Unsupported(f"device {device} cannot be used: {why}", "device")


def arithmetic_of(dtype: torch.dtype, device: str) -> torch.dtype:
    """What a model of `dtype` computes in: float32 on a CPU that lacks instructions for the halves, as many with AVX2 do.

    There, products of halves go element by element, many times slower. The price is twice the memory of the weights.
    """
    if not device.startswith("cpu"):
        return dtype
    if dtype is torch.bfloat16:
        return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    if dtype is torch.float16:
        return dtype if torch.ops.mkldnn._is_mkldnn_fp16_supported() else torch.float32
    return dtype


def check_fp8(device: str, dtype: torch.dtype) -> None:
    """Raises Unsupported where a model of `dtype` cannot have weights in 8 bits."""
    if device.startswith("cpu"):
        return
    if dtype is not torch.bfloat16:
        raise Unsupported(f"fp8 on {device} goes with bfloat16, not with {str(dtype)[6:]}", "quantization")
    if device.startswith("cuda") and torch.cuda.get_device_capability(device) < (8, 9):
        raise Unsupported(f"{device} has no products in 8 bits", "quantization")


def _open(config: EngineConfig) -> Checkpoint:
    path = config.model
    if not path.exists():
        raise BadWeights(missing(path))
    match config.load_format:
        case "auto":
            is_folder_of_shards = path.is_dir() and any(path.glob("*.safetensors"))
            return open_safetensors(path) if is_folder_of_shards else _open_gguf(path)
        case "safetensors":
            return open_safetensors(path)
        case "gguf":
            return _open_gguf(path)
        case "dummy":
            return open_dummy(path, config.seed)
    raise Unsupported(f"load_format {config.load_format} is not among auto, safetensors, gguf, dummy", "load_format")


def _open_gguf(path: Path) -> Checkpoint:
    try:
        from kvrelay.engine.loader.ggufs import has_gguf, open_gguf
    except ImportError as error:
        raise BadWeights(f"{path} holds no safetensors, and GGUF needs the package gguf: {error}") from error
    if not has_gguf(path):
        raise BadWeights(f"{path} holds neither safetensors nor GGUF")
    return open_gguf(path)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    asked = config.max_model_len
    if asked is None:
        return model.max_positions
    if not 1 <= asked <= model.max_positions:
        raise Unsupported(f"max_model_len must be between 1 and the model's {model.max_positions}", "max_model_len")
    return asked
