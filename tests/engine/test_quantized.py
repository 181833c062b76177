"""Weights in 8 bits: the model is the one of the rounded weights, and says so by its fingerprint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import Logits, Subject, compare
from kvrelay.common.errors import Unsupported
from kvrelay.common.modelfiles import tokenizer_bytes
from kvrelay.common.request import SamplingParams
from kvrelay.common.tokenizer import Tokenizer
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.llm import LLM
from kvrelay.engine.loader.fingerprint import fingerprint
from kvrelay.engine.loader.load import check_fp8
from kvrelay.engine.models.errors import UnsupportedModel
from kvrelay.engine.pod.settings import PodSettings
from kvrelay.kernels.scaled import quantize
from tests.engine.tiny import Host, close, load, make, reference, tokens_of

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def in_8_bits(model: Any) -> Any:
    """The reference, with its layers' weights rounded."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.weight" in name:
                parameter.copy_(quantize(parameter).wide(torch.float32))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_equals_the_model_of_the_rounded_weights(tmp_path: Path, family: str) -> None:
    """In one piece, and in chunks small and large: on a CPU nothing depends on how many tokens a step has."""
    plain = make(tmp_path, family)
    tokens = tokens_of(50)
    unrounded = reference(plain, tokens)[-1]
    expected = reference(in_8_bits(plain), tokens)[-1]
    for chunk in (50, 33, 7):
        host = Host(tmp_path, quantization="fp8")
        close(host.prefill(host.sequence(tokens), chunk), expected)
    assert (unrounded - expected).abs().max() > 0.01


def test_fingerprints(tmp_path: Path) -> None:
    """Without quantization it is what it always was."""
    make(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text("{}")
    plain, fp8 = load(tmp_path), load(tmp_path, quantization="fp8")
    files = tuple(tmp_path.glob("*.safetensors"))
    assert plain.fingerprint == fingerprint(plain.model_config, files, tokenizer_bytes(tmp_path))
    assert plain.fingerprint != fp8.fingerprint
    assert fp8.fingerprint == load(tmp_path, quantization="fp8", dtype="bfloat16").fingerprint
    dummies = [load(tmp_path, load_format="dummy", quantization=kind).fingerprint for kind in ("none", "fp8", "fp8")]
    assert dummies[0] != dummies[1] == dummies[2]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantization must be none or fp8, not int4"):
        EngineConfig(model=tmp_path, quantization="int4")
    with pytest.raises(ValueError, match="'none' or 'fp8'"):
        PodSettings(model=tmp_path, quantization="int4")
    assert PodSettings(model=tmp_path, quantization="fp8").engine_config().quantization == "fp8"
    make(tmp_path, "llama", intermediate_size=84)
    with pytest.raises(UnsupportedModel, match=r"up_proj.weight: 168 x 48 is no multiple of 16 each way") as caught:
        load(tmp_path, quantization="fp8")
    assert caught.value.param == "quantization"
    with pytest.raises(Unsupported, match="fp8 on cuda:0 goes with bfloat16, not with float16"):
        check_fp8("cuda:0", torch.float16)
    check_fp8("cpu", torch.float16)


PROMPT = (
    "A lighthouse keeper writes down the weather each morning: the wind, the height of the waves, and what ships went by in "
    "the night. In winter, when no boat can land, the book is the only one who listens."
)


def test_a_prefix_is_found_and_changes_nothing(model_dir: Path) -> None:
    """In float32, and twice over."""
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    first, second = (LLM(model_dir, quantization="fp8", kv_cache_bytes=64 << 20) for _ in range(2))
    cold = first.generate([PROMPT], params)[0]
    warm = first.generate([PROMPT], params)[0]
    assert warm.num_cached_tokens == (len(warm.prompt_token_ids) - 1) // 16 * 16 > 0
    assert warm.outputs == cold.outputs == second.generate([PROMPT], params)[0].outputs


def test_quality(model_dir: Path) -> None:
    """`benchmarks.quality` found a mean divergence of 0.0175 nats over 2,044 positions, and nine in ten of the most likely tokens the
    same: twice the mean is the bound for these few, and more than a tenth of it must be there, for the weights to be rounded."""
    prompt = Tokenizer(model_dir).encode(PROMPT)
    ask = [
        Logits(model_dir, Subject(kind, {"quantization": kind}), kv_cache_bytes=64 << 20) for kind in ("none", "fp8")
    ]
    plain, fp8 = (logits(prompt) for logits in ask)
    assert len(prompt) > 40
    found = compare([plain], [fp8], [prompt])
    assert 0.0017 < found.kl_mean < 0.035
    assert found.top1_agreement > 0.8
    assert compare([plain], [plain], [prompt]).kl_max == 0
