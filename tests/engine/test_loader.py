"""Checkpoints of every kind; what is wrong with one is said by name; fingerprints."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.common.errors import Unsupported
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.loader import load_model
from kvrelay.engine.loader.load import arithmetic_of
from kvrelay.engine.models.errors import BadWeights, UnsupportedModel
from tests.engine.tiny import Host, close, load, make, reference, tokens_of

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("saved")
    model = make(folder, "llama")
    (folder / "tokenizer.json").write_text("{}")
    return folder, model


@pytest.fixture
def folder(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(saved[0], tmp_path / "model")


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_is_loaded(saved: tuple[Path, Any]) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_model(EngineConfig(model=saved[0]), lambda *progress: seen.append(progress))
    assert loaded.eos_token_ids == (2,)
    assert loaded.max_model_len == 512
    assert loaded.vocab_size == 131
    assert loaded.model.dtype is torch.float32
    assert {what for what, done, total in seen if done == total} == {"loading weights", "hashing weights"}


def test_shards(saved: tuple[Path, Any], tmp_path: Path) -> None:
    saved[1].save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    host, tokens = Host(tmp_path), tokens_of(20)
    close(host.prefill(host.sequence(tokens), 20), reference(saved[1], tokens)[-1])


def test_stored_dtype_is_the_default(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": None, "torch_dtype": "bfloat16"}))
    assert load(folder).dtype is torch.bfloat16
    (folder / "config.json").write_text(json.dumps(config | {"dtype": None}))
    assert load(folder).dtype is torch.bfloat16
    assert load(folder, dtype="float32").dtype is torch.float32


@pytest.mark.parametrize(("name", "operator"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_arithmetic_of_a_processor_without_halves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, operator: str
) -> None:
    """Weights and KV keep the dtype that was asked for, the matrices are multiplied in float32."""
    dtype = getattr(torch, name)
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{operator}_supported", lambda: True)
    assert arithmetic_of(dtype, "cpu") is dtype
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{operator}_supported", lambda: False)
    assert arithmetic_of(dtype, "cuda:0") is dtype
    loaded = load(folder, dtype=name)
    assert (loaded.dtype, loaded.model.dtype) == (dtype, torch.float32)
    host, whole = Host(folder, dtype=name), Host(folder, dtype="float32", kv_dtype=name)
    assert str(host.runner.kv.data.dtype) == f"torch.{name}"
    tokens = tokens_of(20)
    halves, exact = (h.prefill(h.sequence(tokens), 20) for h in (host, whole))
    assert not torch.equal(halves, exact), "the weights were not rounded"
    torch.testing.assert_close(halves, exact, atol=0.05, rtol=0.05)


def test_eos_of_the_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 77]}')
    assert load(folder).eos_token_ids == (2, 77)


WRONG: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"model.layers.1.mlp.up_proj.weight": None}, "lack model.layers.1.mlp.up_proj.weight"),
    "extra": ({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, "not use: model.layers.0.self_attn.q_norm"),
    "shape": ({"model.norm.weight": torch.ones(47)}, r"model.norm.weight has the shape \[47\], not \[48\]"),
    "type": ({"model.norm.weight": torch.ones(48, dtype=torch.int64)}, "model.norm.weight is stored as I64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(folder: Path, name: str) -> None:
    change, message = WRONG[name]
    rewrite(folder, change)
    with pytest.raises(BadWeights, match=message):
        load(folder)


def test_old_frequencies_and_a_tied_head_stored_twice_are_ignored(tmp_path: Path) -> None:
    make(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(2)})
    assert load(tmp_path).model_config.tie_embeddings


def test_broken_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadWeights, match="is no directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadWeights, match="neither safetensors nor GGUF"):
        load(tmp_path / "empty")
    (folder / "config.json").write_text("{")
    with pytest.raises(BadWeights, match=r"config.json cannot be read"):
        load(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(BadWeights, match=r"model.safetensors cannot be read"):
        load(folder)


def test_an_index_stays_in_its_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(BadWeights, match="outside"):
        load(folder)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(BadWeights, match="gone"):
        load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="device cuda cannot be used: "):
        load(tmp_path / "none", device="cuda")


def test_length_over_the_model(folder: Path) -> None:
    assert load(folder, max_model_len=100).max_model_len == 100
    with pytest.raises(Unsupported) as caught:
        load(folder, max_model_len=513)
    assert caught.value.param == "max_model_len"


class TestFingerprint:
    def test_is_of_content_not_of_place_or_dtype(self, saved: tuple[Path, Any], folder: Path) -> None:
        assert load(saved[0]).fingerprint == load(folder, dtype="bfloat16", kv_dtype="float16").fingerprint

    def test_one_byte_of_weights(self, saved: tuple[Path, Any], folder: Path) -> None:
        weights = folder / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1000] ^= 1
        weights.write_bytes(data)
        assert load(saved[0]).fingerprint != load(folder).fingerprint

    def test_tokenizer(self, saved: tuple[Path, Any], folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{ }")
        assert load(saved[0]).fingerprint != load(folder).fingerprint


class TestDummy:
    def test_the_same_for_one_seed(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        tokens = tokens_of(9)

        def logits(seed: int) -> torch.Tensor:
            host = Host(folder, load_format="dummy", seed=seed)
            return host.prefill(host.sequence(tokens), 9)

        assert torch.equal(logits(1), logits(1))
        assert not torch.equal(logits(1), logits(2))
        prints = [load(folder, load_format="dummy", seed=seed).fingerprint for seed in (1, 1, 2)]
        assert prints[0] == prints[1] != prints[2]

    def test_all_parts_of_a_configuration(self, tmp_path: Path) -> None:
        make(tmp_path, "qwen3", attention_bias=True, tie_word_embeddings=True, head_dim=16)
        assert load(tmp_path, load_format="dummy").model_config.qk_norm


def write_gguf(path: Path, model: Any, architecture: str = "llama", **tensors: np.ndarray) -> None:
    """As llama.cpp's converter does: its names, and pairs of rotary rows together."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(values))
    for name, values in tensors.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGguf:
    def test_equals_the_model_it_was_written_from(self, saved: tuple[Path, Any], tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", saved[1])
        tokens = tokens_of(40)
        expected = reference(saved[1], tokens)[-1]
        for path in (tmp_path, tmp_path / "m.gguf"):
            host = Host(path)
            close(host.prefill(host.sequence(tokens), 25), expected)
            assert host.loaded.eos_token_ids == (2,)
        shutil.copy(saved[0] / "config.json", tmp_path)
        assert load(tmp_path, load_format="gguf").model_config == load(saved[0]).model_config

    def test_rope_factors_divide_the_frequencies(self, saved: tuple[Path, Any], tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", saved[1], rope_freqs__weight=np.full(4, 3.0, np.float32))
        linear = make(
            tmp_path / "hf", "llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
        )
        linear.load_state_dict(saved[1].state_dict())
        host, tokens = Host(tmp_path), tokens_of(40)
        close(host.prefill(host.sequence(tokens), 40), reference(linear, tokens)[-1])

    def test_what_is_refused(self, saved: tuple[Path, Any], tmp_path: Path) -> None:
        write_gguf(tmp_path / "a.gguf", saved[1], "gemma")
        with pytest.raises(UnsupportedModel, match="gemma"):
            load(tmp_path)
        write_gguf(tmp_path / "b.gguf", saved[1], surprise=np.ones(3, np.float32))
        with pytest.raises(BadWeights, match="2 GGUF files"):
            load(tmp_path)
        with pytest.raises(BadWeights, match="surprise"):
            load(tmp_path / "b.gguf")
        (tmp_path / "c.gguf").write_bytes(b"GGUG" + bytes(100))
        with pytest.raises(BadWeights, match=r"c.gguf cannot be read"):
            load(tmp_path / "c.gguf")


def test_bundled_model(model_dir: Path) -> None:
    """The real one, in float32, against transformers on the same files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = tokens_of(60, vocab=49152)
    expected = reference(model, tokens)[-1]
    del model
    host = Host(model_dir, kv_cache_bytes=32 << 20)
    torch.testing.assert_close(host.prefill(host.sequence(tokens), 33), expected, rtol=1e-4, atol=1e-4)
