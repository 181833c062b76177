"""Padded steps: of random mixes they say what steps as they are say, with attention in plain torch; on a GPU as graphs, too."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.attention.base import Heads
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.draw import Truncation, draw
from kvrelay.engine.gpu.graphs import Graphs, StepGraphs
from kvrelay.engine.gpu.inputs import DeviceInputs, Draw
from kvrelay.engine.gpu.padded import MAX_PROMPTS, MAX_TOKENS, Size, sizes_up_to
from kvrelay.engine.gpu.runner import GpuRunner
from kvrelay.engine.loader import LoadedModel, load_model
from kvrelay.engine.rng import Purpose, uniforms
from kvrelay.engine.sampler import Sampler
from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.reference import paged_decode, paged_prefill
from tests.engine.test_gpu import BLOCK_BYTES, SHAPE, Bench, config_of, on_gpu
from tests.engine.tiny import make, tokens_of
from tests.kernels.triton_device import ON_GPU

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("padded")
    make(path, "qwen3", **SHAPE)
    return path


class TwinAttention:
    name = "twins"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prepare(self, inputs: DeviceInputs) -> "TwinStep":
        return TwinStep(inputs, self._block_size)


class TwinStep:
    def __init__(self, inputs: DeviceInputs, block_size: int) -> None:
        self._inputs = inputs
        self._block_size = block_size

    def mix(self, layer: int, heads: Heads, kv: KvCache) -> torch.Tensor:
        inputs, nd = self._inputs, self._inputs.num_decodes
        q, k, v = heads.rotated()
        real = inputs.slots >= 0
        for side, rows in ((kv.keys[layer], k), (kv.values[layer], v)):
            side[inputs.slots[real]] = rows[real]
        blocks = [side.unflatten(0, (-1, self._block_size)) for side in (kv.keys[layer], kv.values[layer])]
        tables, lens = inputs.block_tables, inputs.context_lens
        mixed = paged_prefill(q, *blocks, tables[nd:], inputs.query_starts[nd:], lens[nd:])
        decodes = lens[:nd] > 0
        mixed[:nd][decodes] = paged_decode(q[:nd], *blocks, tables[:nd], lens[:nd])[decodes]
        return mixed


def sampler(logits: torch.Tensor, params: SampleParams, kind: Draw) -> torch.Tensor:
    """The engine's draws on a CPU, of the rows' own parameters."""
    largest, best = logits.max(1)
    cut = Truncation(*(column.tolist() for column in (params.temperature, params.top_k, params.top_p, params.min_p)))
    numbers = uniforms(params.seed.tolist(), params.choice.tolist(), params.position.tolist(), Purpose.TOKEN)
    drawn = draw(logits, largest, cut, torch.from_numpy(numbers))
    return torch.where((params.temperature > 0) & (kind is not Draw.GREEDY), drawn, best)


def on_twins(folder: Path, max_padded_tokens: int) -> tuple[GpuRunner, LoadedModel, EngineConfig]:
    config = config_of(folder, "cpu", **OPTIONS)
    loaded = load_model(config, lambda what, done, total: None)
    assert config.kv_cache_bytes is not None
    runner = GpuRunner(
        loaded,
        config,
        TwinAttention(config.block_size),
        sampler,
        Sampler(loaded.vocab_size, loaded.eos_token_ids),
        config.kv_cache_bytes,
        max_padded_tokens=max_padded_tokens,
    )
    return runner, loaded, config


OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 80, "max_num_seqs": 20, "kv_cache_bytes": 90 * BLOCK_BYTES}
PADDED_TOKENS = 64
"""Fewer than a step may have."""


def random_requests(seed: int) -> list[EngineRequest]:
    """Many short prompts among longer ones, some of which begin alike."""
    rng = random.Random(seed)
    alike = tokens_of(90, seed=seed)

    def prompt(i: int) -> list[int]:
        length = rng.choice([1, 2, 3, rng.randint(1, 20), rng.randint(1, 90)])
        return alike[:length] if rng.random() < 0.3 else tokens_of(length, seed=1000 * seed + i)

    def sampling() -> SamplingParams:
        options = rng.choice([{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"n": 3}])
        return SamplingParams(
            max_tokens=rng.randint(1, 6), ignore_eos=True, seed=rng.randrange(-(2**63), 2**63), **options
        )

    return [
        EngineRequest(request_id=RequestId(f"r{i}"), prompt_token_ids=tuple(prompt(i)), sampling=sampling())
        for i in range(40)
    ]


def run(bench: Bench, requests: list[EngineRequest]) -> None:
    """A prompt alone, then all, most of them late."""
    alone, sampling = tuple(tokens_of(20, seed=99)), SamplingParams(temperature=0.0, max_tokens=2)
    bench.run([EngineRequest(request_id=RequestId("alone"), prompt_token_ids=alone, sampling=sampling)])
    bench.run(requests, late=30)


@pytest.fixture
def sizes_seen(monkeypatch: pytest.MonkeyPatch) -> list[Size | None]:
    """Of steps that are not single tokens alone."""
    seen: list[Size | None] = []
    fitting = StepGraphs.fitting

    def watched(self: StepGraphs[Any], *counts: int) -> Size | None:
        seen.append(fitting(self, *counts))
        return seen[-1]

    monkeypatch.setattr(StepGraphs, "fitting", watched)
    return seen


@pytest.mark.skipif(ON_GPU, reason="the runner of a CPU is shown where there is no other")
@pytest.mark.parametrize("seed", range(4))
def test_padding_changes_nothing(folder: Path, seed: int, sizes_seen: list[Size | None]) -> None:
    requests = random_requests(seed)
    plain = Bench(on_twins(folder, 0))
    run(plain, requests)
    assert set(sizes_seen) == {None}
    sizes_seen.clear()
    padded = Bench(on_twins(folder, PADDED_TOKENS))
    run(padded, requests)
    assert padded.tokens() == plain.tokens()
    held = [size for size in sizes_seen if size is not None]
    assert len({size.tokens for size in held}) > 1
    assert {size.decodes > 0 for size in held} == {False, True}
    assert None in sizes_seen, "larger ones were steps as they are"


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="only a GPU captures")
@pytest.mark.parametrize("seed", range(4))
def test_replayed_steps_say_what_launched_ones_say(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(seed)
    plain, graphs = (Bench(on_gpu(folder, max_padded_tokens=most, **OPTIONS)) for most in (0, PADDED_TOKENS))
    replayed: list[Size] = []
    call = Graphs.__call__

    def watched(self: Graphs[Any, Any], key: Any) -> Any:
        if isinstance(key, Size):
            assert key in self._captured
            replayed.append(key)
        return call(self, key)

    monkeypatch.setattr(Graphs, "__call__", watched)
    for bench in (plain, graphs):
        run(bench, requests)
    assert graphs.tokens() == plain.tokens()
    assert {bool(size.decodes) for size in replayed} == {False, True}


def test_sizes() -> None:
    assert sizes_up_to(0, 8) == []
    assert sizes_up_to(20, 5) == [
        Size(tokens, decodes, 5, 5) for tokens, decodes in itertools.product((16, 20), (0, 5))
    ]
    sizes = sizes_up_to(MAX_TOKENS, 256)
    assert {size.tokens for size in sizes[-2:]} == {MAX_TOKENS}
    assert len(set(sizes)) == 24
    for size in sizes:
        assert size.prompts <= MAX_PROMPTS
        assert size.sampled <= 256
        assert sum(piece.numel() for piece in size.divide(torch.arange(size.num_words))) == size.num_words
