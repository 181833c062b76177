"""Computes steps on a GPU: launched without waiting, so that the host prepares the next one meanwhile.

    launch   inputs to the device ─▶ forward ─▶ sample ─▶ tokens to the sequences' rows, and on their way to the host
    result   waits for those tokens

A step of single tokens is a CUDA graph (see `graphs`). What needs the host to sample (penalties, log-probabilities, a bias)
waits for the device within `launch`.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.errors import Internal
from kvrelay.engine.batch import Batch, Done, LayerHook, Running, Scheduled, StepResult, no_hook
from kvrelay.engine.cache import kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.attention import DeviceAttention
from kvrelay.engine.gpu.cache import DeviceKvCache
from kvrelay.engine.gpu.crew import Crew
from kvrelay.engine.gpu.graphs import Capture, DecodeGraphs, StepGraphs
from kvrelay.engine.gpu.inputs import (
    NOWHERE,
    DeviceInputs,
    DeviceRows,
    Draw,
    HostRows,
    Prompt,
    prompts_of,
    step_words,
    unpack_decodes,
    unpack_step,
)
from kvrelay.engine.gpu.kernels import TWINS, CopyKernels
from kvrelay.engine.gpu.padded import MAX_TOKENS, Size, padded_words, sizes_up_to
from kvrelay.engine.gpu.staging import Staging
from kvrelay.engine.loader import LoadedModel
from kvrelay.engine.penalties import adjusts
from kvrelay.engine.runner import prompt_logprobs_of
from kvrelay.engine.sampler import Drawn, Sampler
from kvrelay.engine.sequence import Sequence
from kvrelay.kernels.ops import SampleParams

log = logging.getLogger(__name__)


class DeviceSampler(Protocol):
    def __call__(self, logits: torch.Tensor, params: SampleParams, draw: Draw) -> torch.Tensor:
        """[R, V] → int64 [R], -1 where a row's logits are not finite."""
        ...


Unpack = Callable[[torch.Tensor, DeviceRows], DeviceInputs]
"""The words of a step of single tokens (see `crew`), on the device, into a step's inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """What a step has come to, of the R rows that are sampled."""

    hidden: torch.Tensor
    """[R, H]"""
    feed_rows: torch.Tensor
    params: SampleParams

    def first(self, count: int) -> "Sampled":
        """`count` rows, where there are more."""
        return Sampled(self.hidden[:count], self.feed_rows[:count], self.params.first(count))


@dataclasses.dataclass(slots=True)
class Flight:
    """A step that the device computes."""

    tokens: torch.Tensor
    """On the host, when the step is over; -1, which is NO_TOKEN, where a row's logits are not finite."""
    over: torch.cuda.Event | None
    after: Callable[[], float]
    """Called once, when it is over: its seconds."""

    @property
    def done(self) -> bool:
        return self.over is None or self.over.query()

    def result(self) -> StepResult:
        if self.over is not None:
            self.over.synchronize()
        return StepResult(self.tokens.tolist(), seconds=self.after())


class GpuRunner:
    """Not for concurrent use, `kv`'s row access aside. Runs on a CPU as well, for tests."""

    depth = 2

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        attention: DeviceAttention,
        sampler: DeviceSampler,
        host_sampler: Sampler,
        kv_cache_bytes: int,
        unpack: Unpack = unpack_decodes,
        copy_kernels: CopyKernels = TWINS,
        max_padded_tokens: int = MAX_TOKENS,
    ) -> None:
        """Makes the KV cache. Raises Unsupported where there is no memory for it. Steps of up to `max_padded_tokens` are graphs."""
        device = torch.device(config.device)
        self.device = device
        kv_dtype = kv_dtype_of(config.kv_dtype, loaded.dtype)
        self.kv = DeviceKvCache(loaded.model_config, kv_dtype, config.block_size, kv_cache_bytes, device, copy_kernels)
        self._num_layers = loaded.model_config.num_layers
        self._vocab_size = loaded.vocab_size
        self._model = loaded.model
        self._attention = attention
        self._sampler = sampler
        self._host_sampler = host_sampler
        self._unpack_decodes = unpack
        self._max_tokens = config.max_num_batched_tokens
        self._max_model_len = loaded.max_model_len
        max_blocks = -(-loaded.max_model_len // config.block_size)
        self._host = HostRows(config.max_num_seqs, max_blocks, config.block_size)
        self._rows = DeviceRows(config.max_num_seqs, max_blocks, device)
        self._staging = Staging(device)
        self._crew: Crew | None = None
        """Of the last step of single tokens."""
        self._over = 0.0
        """When the last step was over."""
        self._max_sampled = config.max_num_seqs
        self._decodes = DecodeGraphs(config.max_num_seqs, self._decode, self._staging, device)
        sizes = sizes_up_to(min(max_padded_tokens, self._max_tokens), config.max_num_seqs)
        self._steps = StepGraphs(sizes, self._padded, self._staging, device)

    @torch.inference_mode()
    def capture(self) -> None:
        """All graphs, after `rehearse`. A CPU has none, and computes what they would."""
        if self.device.type != "cuda":
            return
        begun = time.perf_counter()
        capture = Capture()
        self._steps.capture(capture)
        self._decodes.capture(capture)
        torch.cuda.synchronize(self.device)
        log.info("%d CUDA graphs after %.1f s", capture.count, time.perf_counter() - begun)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """The largest step, which writes no KV, and the KV's copies, so that kernels are compiled and memory is taken before the
        first request."""
        self.kv.rehearse()
        num_tokens = self._max_tokens
        lengths = [min(self._max_model_len, num_tokens - at) for at in range(0, num_tokens, self._max_model_len)]
        count, rows = self._max_sampled, self._rows

        def full(*shape: int, value: float = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        lens = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        ends = itertools.accumulate(lengths)
        self._sample(
            DeviceInputs(
                token_ids=full(num_tokens),
                positions=full(num_tokens),
                slots=full(num_tokens, value=NOWHERE),
                query_starts=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
                context_lens=lens,
                block_tables=rows.tables[[rows.nobody] * len(lengths)],
                last=full(count),
                feed_rows=full(count, value=rows.nobody),
                sampling=SampleParams(
                    full(count, value=1.0, dtype=torch.float32),
                    full(count, value=2, dtype=torch.int32),
                    full(count, value=0.5, dtype=torch.float32),
                    full(count, dtype=torch.float32),
                    full(count),
                    full(count, dtype=torch.int32),
                    full(count),
                ),
                num_decodes=0,
                prompts=tuple(Prompt(end - n, end, n) for n, end in zip(lengths, ends, strict=True)),
            ),
            Draw.CUT,
        )

    def forget(self, seq: Sequence) -> None:
        """The sequence left the running ones: its row is another's. It may come back."""
        self._host.tables.forget(seq)
        self._crew = None

    @torch.inference_mode()
    def launch(self, batch: Batch, on_layer: LayerHook) -> Running:
        """Copies blocks, computes the batch's KV, samples. `on_layer` is called for all layers at the end. Raises Internal."""
        launched = time.perf_counter()
        if batch.num_tokens > self._max_tokens:
            raise Internal(f"a step of {batch.num_tokens} tokens is over max_num_batched_tokens {self._max_tokens}")
        parts = batch.parts
        seqs = [part.seq for part in parts]
        self._host.update(seqs)
        self._send_changes()
        self.kv.copy_blocks(batch.copies)

        def after() -> float:
            for layer in range(self._num_layers):
                on_layer(layer)
            now = time.perf_counter()
            seconds, self._over = now - max(launched, self._over), now
            return seconds

        if batch.num_tokens == len(parts) == [part.samples for part in parts].count(1):
            crew, starts = self._crew_of(seqs), np.array([part.start for part in parts], np.int64)
            if not crew.needs_host(starts):
                tokens = self._decodes.run(crew.words(starts), crew.draw)
                return Flight(*self._to_host(tokens[: len(parts)]), after)
        sampled = [(part.seq, part.seq.choice + branch) for part in parts for branch in range(part.samples)]
        if len(sampled) > self._max_sampled or any(_needs_host(part) for part in parts):
            inputs = self._unpack(parts)
            return Done(self._sample_on_host(parts, sampled, inputs, self._forward(inputs, None), after))
        tokens = self._launch_any(parts, len(sampled), Draw.of(seq.request.sampling for seq, _ in sampled))
        return Flight(*self._to_host(tokens[: len(sampled)]), after)

    def _launch_any(self, parts: list[Scheduled], num_sampled: int, draw: Draw) -> torch.Tensor:
        """Of a step of any parts, its tokens [≥ num_sampled]."""
        nd = _num_decodes(parts)
        size = self._steps.fitting(sum(part.num_tokens for part in parts), nd, len(parts) - nd, num_sampled)
        if size is None:
            return self._sample(self._unpack(parts), draw)
        found = self._steps.run(padded_words(parts, nd, _rows_of(parts), self._host, size), size)
        # Of few sizes, since kernels differ by them.
        return self._choose(found.first(self._decodes.size_for(num_sampled) if num_sampled else 0), draw)

    def _crew_of(self, seqs: list[Sequence]) -> Crew:
        if self._crew is None or self._crew.seqs != seqs:
            self._crew = Crew(seqs, self._host, self._decodes.size_for(len(seqs)))
        return self._crew

    def _unpack(self, parts: list[Scheduled]) -> DeviceInputs:
        num_decodes, rows = _num_decodes(parts), _rows_of(parts)
        words = self._staging.send(step_words(parts, rows, self._host))
        return unpack_step(words, self._rows, num_decodes, prompts_of(parts, num_decodes))

    def _send_changes(self) -> None:
        """Of block tables."""
        if self._host.changes:
            at, values = self._staging.send(list(self._host.take_changes()))
            self._rows.tables.view(-1).index_copy_(0, at, values.to(torch.int32))

    def _decode(self, words: torch.Tensor, draw: Draw) -> torch.Tensor:
        """A step of single tokens, out of its words on the device."""
        return self._sample(self._unpack_decodes(words, self._rows), draw)

    def _padded(self, words: list[torch.Tensor], size: Size) -> Sampled:
        """A step of any parts, out of `padded_words` on the device: all but the choice of tokens."""
        inputs = unpack_step(words, self._rows, size.decodes, None)
        return Sampled(self._forward(inputs, inputs.last), inputs.feed_rows, inputs.sampling)

    def _forward(self, inputs: DeviceInputs, wanted: torch.Tensor | None) -> torch.Tensor:
        return self._model.forward(
            inputs.token_ids, inputs.positions, self.kv, self._attention.prepare(inputs), no_hook, wanted
        )

    def _sample(self, inputs: DeviceInputs, draw: Draw) -> torch.Tensor:
        return self._choose(Sampled(self._forward(inputs, inputs.last), inputs.feed_rows, inputs.sampling), draw)

    def _choose(self, sampled: Sampled, draw: Draw) -> torch.Tensor:
        """Tokens [R], in the sequences' rows too."""
        if not len(sampled.hidden):
            return sampled.feed_rows
        tokens = self._sampler(self._model.logits(sampled.hidden), sampled.params, draw)
        self._rows.tokens.index_copy_(0, sampled.feed_rows, tokens.clamp(min=0))
        return tokens

    def _to_host(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self.device.type != "cuda":
            return tokens.clone(), None
        host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        over = torch.cuda.Event()
        over.record()
        return host, over

    def _sample_on_host(
        self,
        parts: list[Scheduled],
        sampled: list[tuple[Sequence, int]],
        inputs: DeviceInputs,
        hidden: torch.Tensor,
        after: Callable[[], float],
    ) -> StepResult:
        """By what serves a CPU as well, on tensors of the device."""
        prompts = prompt_logprobs_of(parts, hidden, self._model.logits, self._host_sampler, self._vocab_size)
        drawn = Drawn([], {})
        assert inputs.last is not None, "not of a graph"
        if sampled:
            logits = self._model.logits(hidden[inputs.last])
            drawn = self._host_sampler.sample(logits, sampled)
            tokens = torch.tensor(drawn.tokens, device=self.device)
            self._rows.tokens.index_copy_(0, inputs.feed_rows, tokens.clamp(min=0))
        return StepResult(*drawn, prompts, after())


def _rows_of(parts: list[Scheduled]) -> NDArray[np.int64]:
    return np.array([part.seq.row for part in parts], np.int64)


def _num_decodes(parts: list[Scheduled]) -> int:
    """How many parts of one token come first."""
    return next((i for i, part in enumerate(parts) if part.num_tokens > 1), len(parts))


def _needs_host(part: Scheduled) -> bool:
    params = part.seq.request.sampling
    if params.prompt_logprobs is not None and part.start < part.seq.num_prompt - 1:
        return True
    return part.samples > 0 and (params.logprobs is not None or adjusts(part.seq))
