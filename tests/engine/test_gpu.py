"""The GPU's runner, on a GPU or with its kernels interpreted: it says what the CPU's says, whatever the steps are made of."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from kvrelay.common.request import ChoiceDelta, SamplingParams
from kvrelay.engine.attention.prefill import Prefill
from kvrelay.engine.attention.registry import choose
from kvrelay.engine.attention.whole import WholePrompts
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.core import Engine
from kvrelay.engine.gpu.graphs import sizes_up_to
from kvrelay.engine.gpu.inputs import DECODE_WORDS, DeviceInputs, DeviceRows, unpack_decodes
from kvrelay.engine.gpu.padded import MAX_TOKENS
from kvrelay.engine.gpu.runner import GpuRunner
from kvrelay.engine.gpu.sampler import TritonSampler
from kvrelay.engine.gpu.unpack import TritonUnpack
from kvrelay.engine.loader import LoadedModel, load, load_model
from kvrelay.engine.messages import PromptComputed, RequestFailed
from kvrelay.engine.models import layers
from kvrelay.engine.models.weights import Weights
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampler import Sampler
from kvrelay.kernels.reference import FEW_TOKENS
from kvrelay.kernels.scaled import quantize
from kvrelay.kernels.triton import gemv
from kvrelay.kernels.triton.ops import TritonOps
from tests.engine.tiny import make, tokens_of
from tests.kernels.triton_device import DEVICE

pytestmark = pytest.mark.kernels

FAMILIES = ["llama", "qwen3"]
INTERPRETED = {("qwen3", "greedy"), ("llama", "seeded"), ("llama", "choices"), ("qwen3", "on the host")}
"""What is run without a GPU, of families and mixes: a step is some thousand times slower there."""
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
BLOCK_BYTES = 16 * 2 * 2 * 2 * 64 * 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        # The interpreter takes programs one by one.
        monkeypatch.setattr(gemv, "gemv_config", lambda *_: gemv.GemvConfig(256, 64))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make(path, request.param, **SHAPE)
    return path


def config_of(folder: Path, device: str, **options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "model": folder,
        "device": device,
        "kernels": "torch" if device == "cpu" else "auto",
        "attention": "auto" if device == "cuda" else "torch-cpu",
        "max_model_len": 96,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 24,
        "kv_cache_bytes": 24 * BLOCK_BYTES,
        "watermark": 0.0,
    }
    return EngineConfig(**(defaults | options))


def on_gpu(
    folder: Path, whole_from: int | None = None, max_padded_tokens: int = MAX_TOKENS, **options: Any
) -> tuple[GpuRunner, LoadedModel, EngineConfig]:
    """With the interpreter, what a GPU does happens on the CPU. Prompts of `whole_from` tokens and more by torch's kernels."""
    from kvrelay.engine.attention.triton import TritonAttention, TritonPages

    config = config_of(folder, DEVICE, **options)
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(load, "choose_ops", lambda *_: (TritonOps(), "interpreted"))
            patch.setattr(layers, "_packs", lambda weight: False)
        loaded = load_model(config, lambda what, done, total: None)
    model, dtype = loaded.model_config, loaded.model.dtype
    prefill = Prefill("triton", partial(TritonPages, config.block_size))
    if whole_from is not None:
        whole = WholePrompts(SDPBackend.MATH, model.num_heads, model.num_kv_heads, model.head_dim, dtype, DEVICE)
        prefill = Prefill("torch", partial(TritonPages, config.block_size), whole.part, whole_from)
    attention = TritonAttention(config, model, dtype, prefill)
    sampler = TritonSampler(config.max_num_seqs, loaded.vocab_size, torch.device(DEVICE))
    host_sampler = Sampler(loaded.vocab_size, loaded.eos_token_ids)
    assert config.kv_cache_bytes is not None
    unpack = TritonUnpack(config.block_size)
    runner = GpuRunner(
        loaded,
        config,
        attention,
        sampler,
        host_sampler,
        config.kv_cache_bytes,
        unpack,
        max_padded_tokens=max_padded_tokens,
    )
    runner.rehearse()
    runner.capture()
    return runner, loaded, config


def on_cpu(folder: Path, **options: Any) -> tuple[ModelRunner, LoadedModel, EngineConfig]:
    config = config_of(folder, "cpu", **options)
    loaded = load_model(config, lambda what, done, total: None)
    backend, _ = choose(config, loaded.model_config, loaded.model.dtype, torch.float32)
    sampler = Sampler(loaded.vocab_size, loaded.eos_token_ids)
    return ModelRunner(loaded, config, backend, sampler), loaded, config


class Bench:
    """An engine, and all that its requests were told."""

    def __init__(self, made: tuple[GpuRunner | ModelRunner, LoadedModel, EngineConfig]) -> None:
        runner, loaded, config = made
        self.loaded = loaded
        self.num_blocks = runner.kv.num_blocks
        self.engine = Engine(
            config,
            runner,
            num_blocks=self.num_blocks,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            fingerprint=loaded.fingerprint,
        )
        self.deltas: dict[tuple[str, int], list[ChoiceDelta]] = {}
        self.prompt_logprobs: dict[str, Any] = {}

    def run(self, requests: list[Any], *, late: int = 0) -> None:
        """The last `late` of them come after some steps."""
        early = len(requests) - late
        for request in requests[:early]:
            self.engine.add(request)
        for _ in range(4):
            self.step()
        for request in requests[early:]:
            self.engine.add(request)
        while self.engine.has_work:
            self.step()
        assert self.engine.inspect().free_blocks == self.num_blocks

    def step(self) -> None:
        update = self.engine.step()
        assert self.engine.inspect().violations == ()
        for delta in update.deltas:
            self.deltas.setdefault((delta.request_id, delta.choice), []).append(delta)
        for notice in update.notices:
            assert not isinstance(notice.kind, RequestFailed)
            if isinstance(notice.kind, PromptComputed):
                self.prompt_logprobs[notice.request_id] = notice.kind.prompt_logprobs

    def tokens(self) -> dict[tuple[str, int], list[int]]:
        return {key: [token for delta in deltas for token in delta.token_ids] for key, deltas in self.deltas.items()}


def requests_of(*sampling: dict[str, Any], lengths: tuple[int, ...] = (1, 17, 31, 3, 16)) -> list[Any]:
    from kvrelay.common.ids import RequestId
    from kvrelay.common.request import EngineRequest

    return [
        EngineRequest(
            request_id=RequestId(f"r{i}"),
            prompt_token_ids=tuple(tokens_of(lengths[i % len(lengths)], seed=i)),
            sampling=SamplingParams(**({"max_tokens": 4, "ignore_eos": True} | params)),
        )
        for i, params in enumerate(sampling)
    ]


MIXES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}] * 5,
    "seeded": [
        {"seed": 3},
        {"seed": 2**63 - 1, "top_k": 5},
        {"seed": -7, "top_p": 0.8},
        {"temperature": 0.0},
        {"seed": 11, "min_p": 0.1, "temperature": 0.7},
    ],
    "choices": [{"n": 3, "seed": 5}, {"temperature": 0.0}, {"n": 2, "seed": 9}],
    "on the host": [
        {"temperature": 0.0, "logprobs": 2},
        {"seed": 1, "presence_penalty": 1.5},
        {"temperature": 0.0, "prompt_logprobs": 1},
        {"seed": 4, "logit_bias": {5: 50.0}},
        {"seed": 4},
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_says_what_the_cpu_says(folder: Path, mix: str, request: pytest.FixtureRequest) -> None:
    if DEVICE == "cpu" and (request.node.callspec.params["folder"], mix) not in INTERPRETED:
        pytest.skip("the interpreter is slow: each family has other mixes there")
    requests = requests_of(*MIXES[mix])
    gpu, cpu = Bench(on_gpu(folder)), Bench(on_cpu(folder))
    gpu.run(requests, late=2)
    cpu.run(requests)
    assert gpu.tokens() == cpu.tokens()
    for key, deltas in gpu.deltas.items():
        for delta, other in zip(deltas, cpu.deltas[key], strict=True):
            for found, expected in zip(delta.logprobs, other.logprobs, strict=True):
                assert found.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-4)
    for request_id, logprobs in gpu.prompt_logprobs.items():
        for found, expected in zip(logprobs, cpu.prompt_logprobs[request_id], strict=True):
            assert found.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-4)


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_whole_prompts_apart(folder: Path) -> None:
    """Short and long ones, chunks and single tokens share steps."""
    requests = requests_of(*[{"temperature": 0.0, "max_tokens": 2}] * 4, lengths=(17, 1, 40, 16))
    gpu, cpu = Bench(on_gpu(folder, whole_from=16, max_padded_tokens=0)), Bench(on_cpu(folder))
    gpu.run(requests)
    cpu.run(requests)
    assert gpu.tokens() == cpu.tokens()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_weights_in_8_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of so few tokens that none is rounded: then float32 shows that the weights are the CPU's."""
    requests = requests_of(*[{"temperature": 0.0, "max_tokens": 3}] * 3, lengths=(17, 1, 20))
    cpu = Bench(on_cpu(folder, quantization="fp8"))
    monkeypatch.setattr(Weights, "factor", lambda self, *named: quantize(self.merge(*named)))
    gpu = Bench(on_gpu(folder, max_num_batched_tokens=FEW_TOKENS))
    gpu.run(requests)
    cpu.run(requests)
    assert gpu.tokens() == cpu.tokens()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_a_small_pool_changes_nothing(folder: Path) -> None:
    """Sequences are preempted, and found again in the prefix cache."""
    requests = requests_of(*[{"temperature": 0.0, "max_tokens": 8}] * 3, lengths=(29, 30, 28))
    gpu, cpu = Bench(on_gpu(folder, kv_cache_bytes=6 * BLOCK_BYTES)), Bench(on_cpu(folder))
    gpu.run(requests)
    cpu.run(requests)
    assert gpu.engine.scheduler.num_preemptions > 0
    assert gpu.tokens() == cpu.tokens()


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_choices_part_beside_a_chunk_of_one_token(folder: Path) -> None:
    """As many tokens are sampled as are computed, and not one after each."""
    requests = requests_of({"n": 2, "seed": 5, "max_tokens": 2}, {"temperature": 0.0, "max_tokens": 1}, lengths=(1, 2))
    gpu, cpu = (Bench(made(folder, max_num_batched_tokens=2)) for made in (on_gpu, on_cpu))
    gpu.run(requests)
    cpu.run(requests)
    assert gpu.tokens() == cpu.tokens()


def test_sizes_of_graphs() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(5) == [1, 2, 4, 5]
    assert sizes_up_to(80)[-3:] == [56, 64, 80]
    for most in (3, 64, 256, 700, 2000):
        sizes = sizes_up_to(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


@pytest.mark.parametrize("size", [1, 5])
def test_inputs_are_unpacked_as_by_torch(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = DeviceRows(7, 300, torch.device(DEVICE))
    rows.tables.copy_(torch.randint(0, 1000, rows.tables.shape, generator=generator))
    rows.tokens.copy_(torch.randint(0, 1000, rows.tokens.shape, generator=generator))
    words = torch.randint(0, 2**40, (DECODE_WORDS, size), generator=generator)
    words[0] = torch.randperm(8, generator=generator)[:size]
    words[1] = torch.randint(0, 300 * 16, (size,), generator=generator)
    words[2] = torch.where(torch.rand(size, generator=generator) < 0.5, -1, words[2])
    words[4] %= 2**31
    words[6] %= 2**31
    words[8:] = torch.rand(3, size, generator=generator, dtype=torch.float64).view(torch.int64)
    words[1, -1] = -1
    words = words.to(DEVICE)
    found, expected = TritonUnpack(16)(words, rows), unpack_decodes(words, rows)
    for name in DeviceInputs.__dataclass_fields__.keys() - {
        "block_tables",
        "last",
        "sampling",
        "num_decodes",
        "prompts",
    }:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in expected.sampling.__dataclass_fields__:
        assert torch.equal(getattr(found.sampling, name), getattr(expected.sampling, name)), name
    for row, length in enumerate(expected.context_lens.tolist()):
        blocks = -(-length // 16)
        assert torch.equal(found.block_tables[row, :blocks], expected.block_tables[row, :blocks])
