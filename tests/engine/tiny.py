"""Small random checkpoints, the reference's logits for them, and a model runner that shows its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, PositionLogprobs, SamplingParams
from kvrelay.engine.attention.registry import choose
from kvrelay.engine.batch import Batch, LayerHook, Scheduled, StepResult
from kvrelay.engine.cache import TORCH_DTYPES, kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.loader import LoadedModel, load_model
from kvrelay.engine.runner import ModelRunner
from kvrelay.engine.sampler import Drawn, Sampler
from kvrelay.engine.sequence import Sequence

VOCAB = 131
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
CONFIGS: dict[str, type[transformers.PreTrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}


def make(folder: Path, family: str, **options: Any) -> transformers.PreTrainedModel:
    """Saves a random model to `folder`, and gives it. All of its weights differ from what they start as: norms and biases too."""
    torch.manual_seed(len(family))
    if family == "mistral":
        options = {"sliding_window": None} | options
    config = CONFIGS[family](**(SHAPE | options))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def reference(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits at every position, [T, V]."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def tokens_of(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=folder, **options), lambda what, done, total: None)


class LogitSampler(Sampler):
    """Keeps what it was given; draws greedily."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, ())
        self.logits = torch.empty(0)
        self.pieces: list[int] = []

    def sample(self, logits: torch.Tensor, rows: list[tuple[Sequence, int]]) -> Drawn:
        self.logits = logits.clone()
        return super().sample(logits, rows)

    def prompt_logprobs(self, logits: torch.Tensor, targets: list[int], count: int) -> list[PositionLogprobs]:
        self.pieces.append(len(targets))
        return super().prompt_logprobs(logits, targets, count)


class Host:
    """A runner, and blocks handed out in an order that is not ascending."""

    def __init__(self, folder: Path, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "model": folder,
            "kv_cache_bytes": 4 << 20,
            "max_num_seqs": 12,
            "max_num_batched_tokens": 600,
        }
        self.config = EngineConfig(**(defaults | options))
        self.loaded = load_model(self.config, lambda what, done, total: None)
        self.sampler = LogitSampler(self.loaded.vocab_size)
        kv_dtype = TORCH_DTYPES[kv_dtype_of(self.config.kv_dtype, self.loaded.dtype)]
        backend, _ = choose(self.config, self.loaded.model_config, self.loaded.model.dtype, kv_dtype)
        self.runner = ModelRunner(self.loaded, self.config, backend, self.sampler)
        generator = torch.Generator().manual_seed(0)
        self._free: list[int] = torch.randperm(self.runner.kv.num_blocks, generator=generator).tolist()
        self._steps = 0

    def sequence(self, tokens: list[int], num_branches: int = 1, choice: int = 0, **sampling: Any) -> Sequence:
        request = EngineRequest(
            request_id=RequestId("r"),
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
        )
        return Sequence(request, choice, list(tokens), len(tokens), 0, num_branches=num_branches)

    def step(
        self,
        *parts: tuple[Sequence, int],
        copies: tuple[tuple[int, int], ...] = (),
        on_layer: LayerHook = lambda layer: None,
    ) -> StepResult:
        """Computes so many more tokens of each sequence."""
        scheduled = []
        for seq, count in parts:
            samples = seq.num_branches if count == seq.num_to_compute else 0
            part = Scheduled(seq, seq.num_computed, count, samples)
            while len(seq.blocks) * self.config.block_size < part.end:
                seq.blocks.append(self._free.pop())
            scheduled.append(part)
        self._steps += 1
        result = self.runner.execute(
            Batch(self._steps, scheduled, list(copies), sum(count for _, count in parts)), on_layer
        )
        for part in scheduled:
            part.seq.num_computed = part.end
        return result

    def prefill(self, seq: Sequence, chunk: int) -> torch.Tensor:
        """In chunks; the last one's logits [V]."""
        while seq.num_to_compute:
            self.step((seq, min(chunk, seq.num_to_compute)))
        return self.sampler.logits[-1]

    def take_block(self) -> int:
        return self._free.pop()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


Maker = Callable[..., transformers.PreTrainedModel]
