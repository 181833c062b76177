"""Checkpoints in one GGUF file: dequantized tensors, under the names and in the order of Hugging Face."""

import re
from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.loader.checkpoint import Checkpoint, named_dtype, read_eos, read_json
from kvrelay.engine.models.config import HfConfig
from kvrelay.engine.models.errors import BadWeights, UnsupportedModel

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


class GgufSource:
    def __init__(self, tensors: dict[str, gguf.ReaderTensor], interleaved: dict[str, int]) -> None:
        """`interleaved`: projections whose rows stand in llama.cpp's rotary order (pairs), with their number of heads."""
        self._tensors = tensors
        self._interleaved = interleaved

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            values: NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:  # how gguf says that it cannot dequantize this type
            raise BadWeights(f"{name} is quantized as {tensor.tensor_type.name}, which is not supported") from error
        values = values.reshape(self.shape(name))
        heads = next((n for part, n in self._interleaved.items() if part in name), 0)
        if heads:
            # Pairs (x0, y0, x1, y1, …) of a head into halves (x0, x1, …, y0, y1, …).
            paired = values.reshape(heads, -1, 2, *values.shape[1:])
            values = paired.swapaxes(1, 2).reshape(values.shape)
        # What was not quantized is still the file's own memory, read-only: that is copied.
        return torch.from_numpy(np.require(values, requirements="W")).to(device, dtype)


class Fields:
    """The file's metadata."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def get(self, name: str) -> object:
        """None where it is absent."""
        field = self._fields.get(name)
        return None if field is None else field.contents()


def open_gguf(path: Path) -> Checkpoint:
    """A file, or a folder with one; a config.json beside it goes before the file's own metadata.

    Raises BadWeights or UnsupportedModel.
    """
    file = _file(path)
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError) as error:
        raise BadWeights(f"{file.name} cannot be read: {error}") from error
    fields = Fields(reader)
    architecture = str(fields.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(f"GGUF of architecture {architecture} is not among {', '.join(_ARCHITECTURES)}", "model")
    found = {tensor.name: tensor for tensor in reader.tensors}
    factors = found.pop(_ROPE_FACTORS, None)
    beside = file.parent / "config.json"
    if beside.is_file():
        config = read_json(beside)
    else:
        config = _describe(fields, architecture, found, None if factors is None else factors.data)
    tensors = {_rename(name): tensor for name, tensor in found.items()}
    # llama.cpp rotates pairs for this architecture, and halves, as the checkpoints do, for the others.
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    interleaved = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads} if architecture == "llama" else {}
    eos = read_eos(file.parent, config)
    return Checkpoint(config, GgufSource(tensors, interleaved), named_dtype(config) or torch.float32, (file,), eos)


def has_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" or any(path.glob("*.gguf"))


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise BadWeights(f"{path} holds {len(found)} GGUF files, not one: name the file")
    return found[0]


def _rename(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        return name  # left over in the end, and refused by its own name
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def _describe(
    fields: Fields, architecture: str, tensors: dict[str, gguf.ReaderTensor], factors: NDArray[np.float32] | None
) -> HfConfig:
    """The metadata as a configuration of Hugging Face; what is absent there is absent here."""

    def own(name: str) -> object:
        return fields.get(f"{architecture}.{name}")

    embedding = tensors.get("token_embd.weight")
    rope: dict[str, object] = {"rope_theta": own("rope.freq_base")}
    if factors is not None:
        rope |= {"rope_type": "factors", "factors": factors.tolist()}
    elif own("rope.scaling.type") not in (None, "none"):
        rope |= {
            "rope_type": own("rope.scaling.type"),
            "factor": own("rope.scaling.factor"),
            "original_max_position_embeddings": own("rope.scaling.original_context_length"),
        }
    return HfConfig(
        {
            "architectures": [_ARCHITECTURES[architecture]],
            "vocab_size": None if embedding is None else int(embedding.shape[-1]),
            "hidden_size": own("embedding_length"),
            "intermediate_size": own("feed_forward_length"),
            "num_hidden_layers": own("block_count"),
            "num_attention_heads": own("attention.head_count"),
            "num_key_value_heads": own("attention.head_count_kv"),
            "head_dim": own("attention.key_length"),
            "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": own("context_length"),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "rope_parameters": rope,
            "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        }
    )
