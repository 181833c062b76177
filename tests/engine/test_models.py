"""Each architecture against transformers, on the same random weights; what is not computed is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.models.config import HfConfig
from kvrelay.engine.models.errors import UnsupportedModel
from kvrelay.engine.models.registry import find
from tests.engine.tiny import SHAPE, Host, close, load, make, reference, tokens_of

pytestmark = pytest.mark.integration

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim": ("llama", {"head_dim": 20}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 6}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with mscale": ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
    "llama, yarn untruncated": ("llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0}}),
    "mistral": ("mistral", {}),
    "mistral, head_dim": ("mistral", {"head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(tmp_path: Path, name: str) -> None:
    family, options = CASES[name]
    model = make(tmp_path, family, **options)
    host = Host(tmp_path, dtype="float32")
    tokens = tokens_of(150)
    expected = reference(model, tokens)
    seq = host.sequence(tokens[:100])
    close(host.prefill(seq, 37), expected[99])
    for position in range(100, 150):
        seq.tokens.append(tokens[position])
        host.step((seq, 1))
        close(host.sampler.logits[0], expected[position])


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("chunk", [1, 16, 33, 64, 200])
def test_chunks(llama: tuple[Path, Any], block_size: int, chunk: int) -> None:
    folder, model = llama
    host = Host(folder, block_size=block_size)
    tokens = tokens_of(129, seed=chunk)
    close(host.prefill(host.sequence(tokens), chunk), reference(model, tokens)[-1])


def test_bfloat16_is_near(llama: tuple[Path, Any]) -> None:
    folder, model = llama
    host = Host(folder, dtype="bfloat16")
    tokens = tokens_of(90)
    expected = reference(model, tokens)[-1]
    found = host.prefill(host.sequence(tokens), 40)
    assert found.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(found, expected, 0) > 0.999


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make(folder, "llama")


def test_older_names_of_rope_settings(tmp_path: Path) -> None:
    model = make(tmp_path, "llama", rope_parameters=LLAMA3)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("rope_parameters")
    config["rope_theta"] = settings.pop("rope_theta")
    config["rope_scaling"] = {"type": settings.pop("rope_type"), **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = tokens_of(100)
    host = Host(tmp_path)
    close(host.prefill(host.sequence(tokens), 100), reference(model, tokens)[-1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    "no architecture": ({"architectures": None}, "architectures"),
    "sliding window": ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding_window"),
    "sliding window by default": ({"architectures": ["MistralForCausalLM"]}, "sliding_window"),
    "qwen2 window": ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "sliding_window"),
    "qwen3 window": ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"]}, "sliding_window"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
    "longrope": ({"rope_scaling": {"type": "longrope"}}, "rope_parameters"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "factor"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "heads": ({"num_key_value_heads": 4}, "num_key_value_heads"),
    "no size": ({"hidden_size": None}, "hidden_size"),
    "wrong type": ({"vocab_size": "many"}, "vocab_size"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    options, field = REFUSED[name]
    config = HfConfig({"architectures": ["LlamaForCausalLM"]} | SHAPE | options)
    with pytest.raises(UnsupportedModel) as caught:
        find(config).describe(config)
    assert caught.value.param == field


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_window_that_is_switched_off_is_none(architecture: str) -> None:
    config = HfConfig(SHAPE | {"architectures": [architecture], "sliding_window": 64, "use_sliding_window": False})
    assert find(config).describe(config).num_layers == 3


def test_what_differs_in_config_differs_in_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for theta in (10000.0, 20000.0):
        folder = tmp_path / str(theta)
        make(folder, "llama", rope_parameters={"rope_type": "default", "rope_theta": theta})
        prints.add(load(folder).fingerprint)
    assert len(prints) == 2
