"""What weights in 8 bits change: logits of a model with `quantization` fp8 against those of the same model without, on real text.

    python -m benchmarks.quality --out benchmarks/results/quality.json
    python -m benchmarks.quality --device cuda --out quality-gpu.json

The text is this repository's documentation, in pieces. Of each position: the Kullback-Leibler divergence of the logits from the
reference's (the model in `--dtype`), in nats, and whether the most likely token is the same. Perplexity is that of the text.

On a CPU products take activations as they are; a GPU rounds those of more than a few tokens to 8 bits as well. Here the rows
`activations too` do that with what each product of a layer takes, whatever the device; on a GPU, `steps of 16` and `steps of 512` are what
its kernels give.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import commit, machine
from kvrelay.cli.model import DEFAULT_DIR
from kvrelay.common.request import PositionLogprobs, SamplingParams
from kvrelay.common.tokenizer import Tokenizer
from kvrelay.engine.llm import LLM
from kvrelay.engine.models import decoder, layers
from kvrelay.engine.sampler import Sampler
from kvrelay.kernels.ops import Ops
from kvrelay.kernels.reference import FEW_TOKENS
from kvrelay.kernels.scaled import quantize

TEXT = Path(__file__).parent.parent / "docs" / "benchmarks.md"
PIECE = 512
"""Tokens of a prompt."""
ONE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    name: str
    options: dict[str, Any]
    """Of the engine, beside the reference's."""
    change: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """What the model is built under."""


class RoundedInput(layers.Linear):
    """A product of a layer whose input is rounded to 8 bits first."""

    def __init__(self, inner: layers.Linear) -> None:
        self._inner = inner

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner(quantize(x).wide(x.dtype))

    def added(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._inner.added(quantize(x).wide(x.dtype), hidden)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.gated(quantize(x).wide(x.dtype))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.wide(x)


def rounded_inputs() -> contextlib.AbstractContextManager[object]:
    return patch.object(decoder, "linear", lambda *arguments: RoundedInput(layers.linear(*arguments)))


def rounded_head() -> contextlib.AbstractContextManager[object]:
    """Of models whose output layer is the embedding, as the bundled one's."""

    def tied_head(ops: Ops, embedding: torch.Tensor) -> layers.Linear:
        return layers.linear(ops, quantize(embedding).wide(embedding.dtype))

    return patch.object(decoder, "tied_head", tied_head)


def subjects(device: str, dtype: str) -> Iterator[Subject]:
    fp8 = {"quantization": "fp8"}
    other = "float32" if dtype != "float32" else "bfloat16"
    yield Subject(other, {"dtype": other})
    if device == "cpu":
        yield Subject("fp8", fp8)
        yield Subject("fp8, activations too", fp8, rounded_inputs)
        yield Subject("fp8, output layer too", fp8, rounded_head)
    else:
        yield Subject(f"fp8, steps of {FEW_TOKENS}", {**fp8, "max_num_batched_tokens": FEW_TOKENS})
        yield Subject(f"fp8, steps of {PIECE}", {**fp8, "max_num_batched_tokens": PIECE})


def text_tokens(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Pieces of a page of the documentation, `count` tokens in all."""
    ids = tokenizer.encode(TEXT.read_text())[:count]
    return [ids[first : first + PIECE] for first in range(0, len(ids), PIECE)]


class Logits:
    """Of a model's prompts: a model is made, asked, and gone."""

    def __init__(self, model: Path, subject: Subject, **options: Any) -> None:
        with subject.change():
            # A prompt is one step however slow the machine is: what is rounded depends on it.
            fixed = {"prefix_caching": False, "max_model_len": PIECE + 1, "max_step_ms": 60_000.0}
            self._llm = LLM(model, **{**fixed, **options, **subject.options})

    def __call__(self, prompt: list[int]) -> torch.Tensor:
        """After each token but the last, float32 [len(prompt) - 1, V]."""
        kept: list[torch.Tensor] = []
        plain = Sampler.prompt_logprobs

        def keep(self: Sampler, logits: torch.Tensor, targets: list[int], count: int) -> list[PositionLogprobs]:
            kept.append(logits[: len(targets)].float().clone())
            return plain(self, logits, targets, count)

        with patch.object(Sampler, "prompt_logprobs", keep):
            self._llm.generate([prompt], ONE)
        found = torch.cat(kept)
        assert len(found) == len(prompt) - 1
        return found


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Over all positions; nats."""

    kl_mean: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    perplexity: float


def compare(reference: Iterable[torch.Tensor], found: Iterable[torch.Tensor], prompts: list[list[int]]) -> Figures:
    """Logits [T - 1, V] of each prompt."""
    divergences, same, surprises = [], [], []
    for ours, theirs, prompt in zip(found, reference, prompts, strict=True):
        got, expected = ours.log_softmax(-1), theirs.log_softmax(-1)
        divergences.append((expected.exp() * (expected - got)).sum(-1, dtype=torch.float64))
        same.append(got.argmax(-1) == expected.argmax(-1))
        surprises.append(-got.gather(1, torch.tensor(prompt[1:], device=got.device)[:, None])[:, 0])
    kl = torch.cat(divergences)
    return Figures(
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        kl_max=kl.max().item(),
        top1_agreement=torch.cat(same).double().mean().item(),
        perplexity=torch.cat(surprises).mean().exp().item(),
    )


def measure(model: Path, device: str, dtype: str, prompts: list[list[int]]) -> dict[str, Figures]:
    def logits(subject: Subject) -> Iterator[torch.Tensor]:
        ask = Logits(model, subject, device=device, dtype=dtype, kv_cache_bytes=64 << 20, max_num_seqs=1)
        return map(ask, prompts)

    reference = list(logits(Subject(dtype, {})))
    found = {dtype: compare(reference, reference, prompts)}
    for subject in subjects(device, dtype):
        found[subject.name] = compare(reference, logits(subject), prompts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEFAULT_DIR, help="[%(default)s]")
    parser.add_argument("--device", default="cpu", help="[%(default)s]")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the reference and of all that is not quantized [%(default)s]"
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the text [%(default)s]")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    prompts = text_tokens(Tokenizer(args.model), args.tokens)
    found = measure(args.model, args.device, args.dtype, prompts)
    shown = Table(title=f"{sum(len(prompt) - 1 for prompt in prompts)} positions against {args.dtype}")
    shown.add_column("model")
    for column in ("KL mean", "KL p99", "KL max", "same top token", "perplexity"):
        shown.add_column(column, justify="right")
    for name, row in found.items():
        divergences = (f"{value:.5f}" for value in (row.kl_mean, row.kl_p99, row.kl_max))
        shown.add_row(name, *divergences, f"{row.top1_agreement:.2%}", f"{row.perplexity:.3f}")
    Console().print(shown)
    if args.out:
        options = {name: str(value) for name, value in vars(args).items() if name != "out"}
        result = {"machine": machine(), "commit": commit(), "options": options, "figures": found}
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")


if __name__ == "__main__":
    main()
