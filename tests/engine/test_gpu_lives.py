"""The random lives of `test_life` by the numbers that a GPU is sent: a device that knows nothing else of rows, block tables,
slots and positions computes and samples what it should. No kernel runs."""

import random
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.common.ids import Fingerprint
from kvrelay.common.request import PositionLogprobs
from kvrelay.engine.batch import Batch, Done, LayerHook, no_hook
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.inputs import NOWHERE, DeviceInputs, Draw
from kvrelay.engine.gpu.runner import GpuRunner
from kvrelay.engine.loader import LoadedModel
from kvrelay.engine.models.config import ModelConfig, RopeSettings
from kvrelay.engine.sampler import Drawn
from kvrelay.engine.sequence import Sequence
from kvrelay.kernels.ops import SampleParams
from tests.engine.conftest import EOS, VOCAB, CheckingRunner, Harness, next_token
from tests.engine.test_life import Lives

pytestmark = pytest.mark.unit

MAX_MODEL_LEN = 512
MODEL = ModelConfig(
    architecture="none",
    vocab_size=VOCAB,
    hidden_size=2,
    intermediate_size=1,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    rms_norm_eps=1e-5,
    max_positions=MAX_MODEL_LEN,
    tie_embeddings=True,
    rope=RopeSettings(theta=10_000.0),
)


class Device:
    """Model, attention and samplers in one. Its KV is the checking runner's, by block and offset: that of a token follows from
    the one before it, which is looked for where the block table says. Hidden states and logits are the KV."""

    def __init__(self, kv: dict[tuple[int, int], int], block_size: int) -> None:
        self._kv = kv
        self._block_size = block_size
        self.num_on_host = 0
        """Steps that the host has sampled."""

    def prepare(self, inputs: DeviceInputs) -> DeviceInputs:
        return inputs

    def forward(self, token_ids: Any, positions: Any, kv: Any, inputs: Any, on_layer: Any, wanted: Any) -> torch.Tensor:
        nd, lens, tables = inputs.num_decodes, inputs.context_lens.tolist(), inputs.block_tables.tolist()
        tokens = list(zip(token_ids.tolist(), positions.tolist(), inputs.slots.tolist(), strict=True))
        spans = [*pairwise(range(nd + 1)), *pairwise(inputs.query_starts[nd:].tolist())]
        values: dict[int, int] = {}
        for (start, end), length, table in zip(spans, lens, tables, strict=True):
            for at in range(start, end) if length else ():
                token, position, slot = tokens[at]
                assert position < length
                values[at] = self._value(token, position, slot, table)
        assert values.keys() == {at for at, (_, _, slot) in enumerate(tokens) if slot != NOWHERE}
        hidden = torch.tensor([values.get(at, 0) for at in range(len(tokens))])
        return hidden if wanted is None else hidden[wanted]

    def _value(self, token: int, position: int, slot: int, table: list[int]) -> int:
        def place(position: int) -> tuple[int, int]:
            return table[position // self._block_size], position % self._block_size

        assert divmod(slot, self._block_size) == place(position)
        value = hash((self._kv[place(position - 1)] if position else 0, token))
        assert self._kv[place(position)] == value, "another token, or after another one"
        return value

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def __call__(self, logits: torch.Tensor, params: SampleParams, draw: Draw) -> torch.Tensor:
        choices = params.choice.tolist()
        return torch.tensor([next_token(kv, choice) for kv, choice in zip(logits.tolist(), choices, strict=True)])

    def sample(self, logits: torch.Tensor, rows: list[tuple[Sequence, int]]) -> Drawn:
        self.num_on_host += 1
        return Drawn([next_token(kv, choice) for kv, (_, choice) in zip(logits.tolist(), rows, strict=True)], {})

    def prompt_logprobs(self, logits: torch.Tensor, targets: list[int], count: int) -> list[PositionLogprobs]:
        return []


class BothRunners(CheckingRunner):
    """The checking runner, whose every step the GPU's takes as well."""

    def __init__(self, config: EngineConfig, num_blocks: int, depth: int) -> None:
        super().__init__(config.block_size, config.max_num_seqs, depth)
        self.device = device = cast("Any", Device(self.kv, config.block_size))
        loaded = LoadedModel(device, torch.float32, MODEL, Fingerprint("none"), (EOS,), MAX_MODEL_LEN, VOCAB)
        kv_bytes = num_blocks * config.block_size * 2 * 2 * 4
        self.gpu = GpuRunner(loaded, config, device, device, device, kv_bytes)
        self.num_kept = 0
        """Steps whose inputs were mostly the last one's."""

    def launch(self, batch: Batch, on_layer: LayerHook) -> Done:
        done = super().launch(batch, on_layer)
        crew = self.gpu._crew
        assert self.gpu.launch(batch, no_hook).result().tokens == done.step.tokens
        self.num_kept += crew is not None and crew is self.gpu._crew
        return done

    def _give_row(self, seq: Sequence) -> None:
        """The GPU's runner gives them."""

    def forget(self, seq: Sequence) -> None:
        self.gpu.forget(seq)
        self.free_rows = self.gpu._host.tables._free


class BothHarness(Harness):
    def make_runner(self, num_blocks: int) -> CheckingRunner:
        return BothRunners(self.config, num_blocks, self.depth)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_lives(depth: int, seed: int) -> None:
    Lives(BothHarness, random.Random(seed), depth).live(150)


def test_what_a_step_is_sent_is_kept_while_the_sequences_are_the_same() -> None:
    h = BothHarness(depth=2)
    requests = [
        h.request("a", 20, max_tokens=40),
        h.request("b", 17, max_tokens=40, min_tokens=5),
        h.request("c", 30, max_tokens=12),
    ]
    for request in requests:
        h.engine.add(request)
    h.run()
    for request in requests:
        h.check_output(request)
    h.check_empty()
    assert isinstance(h.runner, BothRunners)
    assert h.runner.num_kept > 25
    assert h.runner.device.num_on_host == 5, "until b may end"


def test_rows_may_change_while_the_sequences_are_the_same() -> None:
    h = BothHarness()
    requests = [h.request("a", 20, max_tokens=9), h.request("b", 17, max_tokens=9)]
    for request in requests:
        h.engine.add(request)
    for _ in range(4):
        h.step()
    seqs = list(h.engine.scheduler.running)
    rows = [seq.row for seq in seqs]
    for seq in seqs:
        h.runner.forget(seq)
    h.step()
    assert [seq.row for seq in seqs] == rows[::-1]
    h.run()
    for request in requests:
        h.check_output(request)
