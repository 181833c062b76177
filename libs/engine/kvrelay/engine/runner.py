"""Computes a step: a batch of sequences' tokens through the model, and what is sampled of them.

Input buffers live as long as the runner. A sequence gets a row in them when it is first seen; of its block table only what changed
is written.
"""

import itertools
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.errors import Internal
from kvrelay.common.request import PositionLogprobs
from kvrelay.engine.attention.base import AttentionBackend, AttentionBatch
from kvrelay.engine.batch import Batch, Done, LayerHook, Scheduled, StepResult
from kvrelay.engine.cache import KvCache, kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.loader import LoadedModel
from kvrelay.engine.sampler import Drawn
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.tables import BlockTables

KV_CACHE_BYTES = 512 << 20
LOGIT_BYTES = 32 << 20
"""Of the logits of prompt positions that are in memory at once."""
_EXACT_TOKENS = 16
_STEP = 16


class TokenSampler(Protocol):
    def sample(self, logits: torch.Tensor, rows: list[tuple[Sequence, int]]) -> Drawn: ...

    def prompt_logprobs(self, logits: torch.Tensor, targets: list[int], count: int) -> list[PositionLogprobs]: ...


def padded(num_tokens: int) -> int:
    """The size that a step of so many tokens is computed at.

    A CPU kernel is made anew for each size that it meets (some 10 ms and some memory for a model's); beyond small
    batches, sizes are rounded up, so that there are few.
    """
    return num_tokens if num_tokens <= _EXACT_TOKENS else -(-num_tokens // _STEP) * _STEP


class ModelRunner:
    """Not for concurrent use, `kv`'s row access aside."""

    depth = 1

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, backend: AttentionBackend, sampler: TokenSampler
    ) -> None:
        """Makes the KV cache. Raises Unsupported where it cannot be made as configured."""
        kv_dtype = kv_dtype_of(config.kv_dtype, loaded.dtype)
        self.kv = KvCache(loaded.model_config, kv_dtype, config.block_size, config.kv_cache_bytes or KV_CACHE_BYTES)
        self._model = loaded.model
        self._vocab_size = loaded.vocab_size
        self._backend = backend
        self._sampler = sampler
        self._max_tokens = config.max_num_batched_tokens
        size = padded(self._max_tokens)
        self._token_ids = np.zeros(size, np.int64)
        self._positions = np.zeros(size, np.int64)
        self._blocks = BlockTables(config.max_num_seqs, -(-loaded.max_model_len // config.block_size))

    def forget(self, seq: Sequence) -> None:
        """The sequence left the running ones: its row is another's. It may come back."""
        self._blocks.forget(seq)

    def launch(self, batch: Batch, on_layer: LayerHook) -> Done:
        return Done(self.execute(batch, on_layer))

    @torch.inference_mode()
    def execute(self, batch: Batch, on_layer: LayerHook) -> StepResult:
        """Copies blocks, computes the batch's KV (`on_layer` as each layer's is there), samples. Raises Internal."""
        started = time.perf_counter()
        if batch.num_tokens > self._max_tokens:
            raise Internal(f"a step of {batch.num_tokens} tokens is over max_num_batched_tokens {self._max_tokens}")
        self.kv.copy_blocks(batch.copies)
        attention = self._backend.prepare(self._prepare(batch.parts), self.kv)
        size = padded(batch.num_tokens)
        hidden = self._model.forward(
            torch.from_numpy(self._token_ids[:size]),
            torch.from_numpy(self._positions[:size]),
            self.kv,
            attention,
            on_layer,
        )
        prompts = prompt_logprobs_of(batch.parts, hidden, self._logits, self._sampler, self._vocab_size)
        tokens, logprobs = self._sample(batch.parts, hidden)
        return StepResult(tokens, logprobs, prompts, time.perf_counter() - started)

    def _prepare(self, parts: list[Scheduled]) -> AttentionBatch:
        """Fills the input buffers."""
        counts = np.array([part.num_tokens for part in parts], np.int64)
        starts = np.array([part.start for part in parts], np.int64)
        for part in parts:
            self._blocks.update(part.seq)
        rows = np.array([part.seq.row for part in parts], np.int64)
        ends = counts.cumsum()
        total, firsts = int(ends[-1]), ends - counts
        ids = [part.seq.tokens[part.start : part.end] for part in parts]
        self._token_ids[:total] = np.fromiter(itertools.chain.from_iterable(ids), np.int64, total)
        positions = np.arange(total) + np.repeat(starts - firsts, counts)
        self._positions[:total] = positions
        end = padded(total)
        self._token_ids[total:end] = self._positions[total:end] = 0
        block_size = self.kv.block_size
        blocks = self._blocks.table[np.repeat(rows, counts), positions // block_size].astype(np.int64)
        width = -(-int((starts + counts).max()) // block_size)
        return AttentionBatch(
            query_starts=np.concatenate(([0], ends)),
            context_lens=starts + counts,
            block_tables=self._blocks.table[rows, :width],
            slots=blocks * block_size + positions % block_size,
            num_decodes=_num_decodes(counts),
        )

    def _sample(self, parts: list[Scheduled], hidden: torch.Tensor) -> Drawn:
        """One row of logits for each sequence that samples; a prompt that branches gives each branch a copy of it."""
        last: list[int] = []
        sources: list[int] = []
        rows: list[tuple[Sequence, int]] = []
        end = 0
        for part in parts:
            end += part.num_tokens
            if part.samples:
                rows += [(part.seq, part.seq.choice + branch) for branch in range(part.samples)]
                sources += [len(last)] * part.samples
                last.append(end - 1)
        if not rows:
            return Drawn([], {})
        logits = self._logits(hidden[last])
        if len(rows) > len(last):
            logits = logits[sources]
        return self._sampler.sample(logits, rows)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [R, V], at one of few sizes of R."""
        count = len(hidden)
        extra = padded(count) - count
        if extra:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, extra))
        return self._model.logits(hidden)[:count]


def _num_decodes(counts: NDArray[np.int64]) -> int:
    """How many parts of one token come first."""
    longer = np.flatnonzero(counts > 1)
    return int(longer[0]) if len(longer) else len(counts)


def prompt_logprobs_of(
    parts: list[Scheduled],
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    sampler: TokenSampler,
    vocab_size: int,
) -> dict[Sequence, list[PositionLogprobs]]:
    """Of the parts that ask for them, out of the hidden states [T, H]; a piece of the logits at a time."""
    found: dict[Sequence, list[PositionLogprobs]] = {}
    piece = max(1, LOGIT_BYTES // (4 * vocab_size))
    first = 0
    for part in parts:
        seq, count = part.seq, part.seq.request.sampling.prompt_logprobs
        targets = seq.tokens[part.start + 1 : min(part.end + 1, seq.num_prompt)]
        if count is not None and targets:
            logprobs = found.setdefault(seq, [])
            for begin in range(0, len(targets), piece):
                wanted = targets[begin : begin + piece]
                logits = logits_of(hidden[first + begin : first + begin + len(wanted)])
                logprobs += sampler.prompt_logprobs(logits, wanted, count)
        first += part.num_tokens
    return found
