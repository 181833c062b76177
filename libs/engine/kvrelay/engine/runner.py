"""Computes a step: a batch of sequences' tokens through the model, and what is sampled of them.

Input buffers live as long as the runner. A sequence gets a row in them when it is first seen; of its block table only what changed
is written.
"""

import itertools
import logging
import time
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.common.errors import Internal
from kvrelay.common.request import PositionLogprobs
from kvrelay.engine.attention.base import AttentionBackend, AttentionBatch
from kvrelay.engine.batch import Batch, Done, LayerHook, Sample, Scheduled, StepResult
from kvrelay.engine.cache import KvCache, kv_dtype_of
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.loader import LoadedModel
from kvrelay.engine.sampler import BadLogits
from kvrelay.engine.sequence import Sequence

log = logging.getLogger(__name__)

LOGIT_BYTES = 32 << 20
"""Of the logits of prompt positions that are in memory at once."""
_EXACT_TOKENS = 16
_STEP = 16


class TokenSampler(Protocol):
    def sample(self, logits: torch.Tensor, rows: list[tuple[Sequence, int]]) -> list[Sample]: ...

    def prompt_logprobs(self, logits: torch.Tensor, targets: list[int], count: int) -> list[PositionLogprobs]: ...


def padded(num_tokens: int) -> int:
    """The size that a step of so many tokens is computed at.

    A CPU kernel is made anew for each size that it meets (some 10 ms and some memory for a model's); beyond small
    batches, sizes are rounded up, so that there are few.
    """
    return num_tokens if num_tokens <= _EXACT_TOKENS else -(-num_tokens // _STEP) * _STEP


class BlockTables:
    """[max_num_seqs, max_blocks]: the blocks of each sequence in its row."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._known: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def update(self, seq: Sequence) -> int:
        """The sequence's row, up to date. Raises Internal where there are more sequences than rows."""
        if seq.row < 0:
            if not self._free:
                raise Internal(f"the batch has more than {len(self._known)} sequences")
            seq.row = self._free.pop()
        known, blocks = self._known[seq.row], seq.blocks
        if known != blocks:
            # Mostly blocks were added; a copied block or a preemption changes those before.
            same = len(known) if blocks[: len(known)] == known else 0
            self.table[seq.row, same : len(blocks)] = blocks[same:]
            known[same:] = blocks[same:]
        return seq.row

    def forget(self, seq: Sequence) -> None:
        if seq.row >= 0:
            self._known[seq.row].clear()
            self._free.append(seq.row)
            seq.row = -1


class ModelRunner:
    """Not for concurrent use, `kv`'s row access aside."""

    depth = 1

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, backend: AttentionBackend, sampler: TokenSampler
    ) -> None:
        """Makes the KV cache. Raises Unsupported where it cannot be made as configured."""
        kv_dtype = kv_dtype_of(config.kv_dtype, loaded.dtype)
        self.kv = KvCache(loaded.model_config, kv_dtype, config.block_size, config.kv_cache_bytes)
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
        prompts = self._prompt_logprobs(batch.parts, hidden)
        samples = self._sample(batch.parts, hidden)
        return StepResult(samples, prompts, time.perf_counter() - started)

    def _prepare(self, parts: list[Scheduled]) -> AttentionBatch:
        """Fills the input buffers."""
        counts = np.array([part.num_tokens for part in parts], np.int64)
        starts = np.array([part.start for part in parts], np.int64)
        rows = np.array([self._blocks.update(part.seq) for part in parts], np.int64)
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

    def _sample(self, parts: list[Scheduled], hidden: torch.Tensor) -> list[Sample]:
        """One row of logits for each sequence that samples; a prompt that branches gives each branch a copy of it.

        Rows without usable logits have no sample: their requests are the ones to fail, not the step.
        """
        last: list[int] = []
        sources: list[int] = []
        rows: list[tuple[Sequence, int]] = []
        end = 0
        for part in parts:
            end += part.num_tokens
            if part.samples:
                branches = part.seq.num_branches if part.seq.num_output == 0 else 1
                rows += [(part.seq, part.seq.choice + branch) for branch in range(branches)]
                sources += [len(last)] * branches
                last.append(end - 1)
        if not rows:
            return []
        logits = self._logits(hidden[last])
        if len(rows) > len(last):
            logits = logits[sources]
        try:
            return self._sampler.sample(logits, rows)
        except BadLogits as error:
            log.error("%s: %s", error.message, {rows[row][0].request.request_id for row in error.rows})
            return error.samples

    def _prompt_logprobs(self, parts: list[Scheduled], hidden: torch.Tensor) -> dict[Sequence, list[PositionLogprobs]]:
        found: dict[Sequence, list[PositionLogprobs]] = {}
        piece = max(1, LOGIT_BYTES // (4 * self._vocab_size))
        first = 0
        for part in parts:
            seq, count = part.seq, part.seq.request.sampling.prompt_logprobs
            targets = seq.tokens[part.start + 1 : min(part.end + 1, seq.num_prompt)]
            if count is not None and targets:
                logprobs = found.setdefault(seq, [])
                for begin in range(0, len(targets), piece):
                    wanted = targets[begin : begin + piece]
                    logits = self._logits(hidden[first + begin : first + begin + len(wanted)])
                    logprobs += self._sampler.prompt_logprobs(logits, wanted, count)
            first += part.num_tokens
        return found

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
