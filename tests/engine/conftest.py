"""A model runner without a model that checks the cache, and engines around it.

Its KV of a token is the hash of all tokens up to it. Each step it looks at every position that a sequence relies on: a block
that was shared, evicted, copied or written wrongly shows as a wrong hash.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pytest

import tests.interpreter  # noqa: F401 - before a kernel is imported
from kvrelay.common.ids import Fingerprint, RequestId
from kvrelay.common.request import (
    ChoiceDelta,
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    ResumedChoice,
    SamplingParams,
    TokenLogprob,
)
from kvrelay.engine.batch import NO_TOKEN, Batch, Done, LayerHook, Scheduled, StepResult
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.core import Engine, Reservation, StepUpdate
from kvrelay.engine.pool import CacheListener
from kvrelay.engine.sequence import Sequence

VOCAB = 97
EOS = 96


def prefixes(tokens: Seq[int]) -> Seq[int]:
    """The KV of each position."""
    return _prefixes(tuple(tokens))


@lru_cache(4096)
def _prefixes(tokens: tuple[int, ...]) -> list[int]:
    return list(accumulate(tokens, lambda value, token: hash((value, token)), initial=0))[1:]


def next_token(kv: int, choice: int) -> int:
    return hash((kv, choice, "next")) % VOCAB


class CheckingRunner:
    """With a `depth` of 2, tokens that the engine does not know yet are those that were sampled last."""

    def __init__(self, block_size: int, max_num_seqs: int, depth: int = 1) -> None:
        self.depth = depth
        self.last: dict[Sequence, int] = {}
        self.block_size = block_size
        self.kv: dict[tuple[int, int], int] = {}
        self.free_rows = list(range(max_num_seqs))
        self.batches: list[list[tuple[RequestId, int, int, int]]] = []
        """Of each step: request, choice, start, tokens."""
        self.seconds = 0.001
        self.spoilt: set[RequestId] = set()
        """Whose logits are not finite."""

    def launch(self, batch: Batch, on_layer: LayerHook) -> Done:
        assert batch.parts
        for part in batch.parts:
            assert part.end - len(part.seq.tokens) <= (self.depth > 1), "more than one token is unknown"
        sizes = [part.num_tokens for part in batch.parts]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "single tokens come first"
        assert min(sizes) > 0
        self._copy(batch.copies)
        for part in batch.parts:
            self._give_row(part.seq)
        self._write(batch.parts)
        for part in batch.parts:
            self.verify(part.seq.blocks, self.tokens(part))
        on_layer(0)
        self.batches.append(
            [(part.seq.request.request_id, part.seq.choice, part.start, part.num_tokens) for part in batch.parts]
        )
        assert batch.num_tokens == sum(sizes)
        tokens: list[int] = []
        chosen: dict[int, PositionLogprobs] = {}
        for part in batch.parts:
            for token in self._sample(part):
                self.last[part.seq] = token
                if part.seq.request.sampling.logprobs is not None:
                    chosen[len(tokens)] = PositionLogprobs(TokenLogprob(token, -0.5, 1), ())
                tokens.append(token)
        logprobs = {
            part.seq: _prompt_logprobs(part)
            for part in batch.parts
            if part.seq.request.sampling.prompt_logprobs is not None and part.start < part.seq.num_prompt - 1
        }
        return Done(StepResult(tokens, chosen, logprobs, self.seconds))

    def tokens(self, part: Scheduled) -> list[int]:
        known = part.seq.tokens[: part.end]
        return known if len(known) == part.end else [*known, self.last[part.seq]]

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = {source for source, _ in copies}, [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets), "copies depend on their order"
        for source, target in copies:
            for offset in range(self.block_size):
                self.kv.pop((target, offset), None)
                if (source, offset) in self.kv:
                    self.kv[target, offset] = self.kv[source, offset]

    def _write(self, parts: list[Scheduled]) -> None:
        written = set()
        for part in parts:
            assert part.end == part.seq.position, "the part is in flight"
            values = prefixes(self.tokens(part))
            for position in range(part.start, part.end):
                slot = self.slot(part.seq.blocks, position)
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.kv[slot] = values[position]

    def slot(self, blocks: Seq[int], position: int) -> tuple[int, int]:
        return blocks[position // self.block_size], position % self.block_size

    def verify(self, blocks: Seq[int], tokens: Seq[int]) -> None:
        for position, value in enumerate(prefixes(tokens)):
            assert self.kv.get(self.slot(blocks, position)) == value, f"wrong KV at {position} of {len(tokens)}"

    def fill(self, reservation: Reservation, tokens: Seq[int]) -> None:
        """What a transfer does."""
        values = prefixes(tokens)
        for position in range(reservation.first_token, reservation.end_token):
            self.kv[self.slot(reservation.blocks, position)] = values[position]

    def _give_row(self, seq: Sequence) -> None:
        if seq.row < 0:
            seq.row = self.free_rows.pop()

    def _sample(self, part: Scheduled) -> list[int]:
        seq = part.seq
        assert part.samples == (seq.num_branches if part.end >= len(seq.tokens) else 0)
        if seq.request.request_id in self.spoilt:
            return [NO_TOKEN] * part.samples
        kv = prefixes(self.tokens(part))[-1]
        return [next_token(kv, choice) for choice in range(seq.choice, seq.choice + part.samples)]

    def forget(self, seq: Sequence) -> None:
        assert seq.row >= 0
        self.free_rows.append(seq.row)
        seq.row = -1


def _prompt_logprobs(part: Scheduled) -> list[PositionLogprobs]:
    last = min(part.end, part.seq.num_prompt - 1)
    return [PositionLogprobs(TokenLogprob(part.seq.tokens[p + 1], -float(p), 1), ()) for p in range(part.start, last)]


class Port:
    """Notes what the engine tells the transfer."""

    def __init__(self) -> None:
        self.aborted: list[RequestId] = []
        self.over: list[RequestId] = []

    def push_aborted(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)

    def reservation_over(self, request_id: RequestId) -> None:
        self.over.append(request_id)


class Harness:
    """An engine with the checking runner, and what its requests were told."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_model_len: int = 512,
        listener: CacheListener | None = None,
        depth: int = 1,
        **options: Any,
    ) -> None:
        options = {"model": "none", "max_num_seqs": 4, "max_num_batched_tokens": 64} | options
        self.config = EngineConfig(**options)
        self.depth = depth
        self.runner = self.make_runner(num_blocks)
        self.port = Port()
        self.engine = Engine(
            self.config,
            self.runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            fingerprint=Fingerprint("fake"),
            listener=listener,
        )
        self.engine.connect(self.port)
        self.tokens: dict[tuple[RequestId, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[RequestId, int], FinishReason] = {}
        self.deltas: list[ChoiceDelta] = []
        self.notices: list[tuple[RequestId, Any]] = []

    def make_runner(self, num_blocks: int) -> CheckingRunner:
        return CheckingRunner(self.config.block_size, self.config.max_num_seqs, self.depth)

    def take(self, update: StepUpdate) -> StepUpdate:
        """Keeps each index once, as a router does; a repeated one must say the same."""
        for delta in update.deltas:
            key = (delta.request_id, delta.choice)
            said = self.tokens[key]
            assert delta.index <= len(said), "a token is missing"
            again = said[delta.index : delta.index + len(delta.token_ids)]
            assert tuple(again) == delta.token_ids[: len(again)], "a repeated token differs"
            said.extend(delta.token_ids[len(again) :])
            if delta.finish_reason is not None:
                self.finished[key] = delta.finish_reason
        self.deltas += update.deltas
        self.notices += [(notice.request_id, notice.kind) for notice in update.notices]
        return update

    def step(self) -> StepUpdate:
        update = self.take(self.engine.step())
        self.check()
        return update

    def run(self, limit: int = 3000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        else:
            pytest.fail(f"work is left after {limit} steps")
        self.take(self.engine.drain())

    def check(self) -> None:
        assert self.engine.inspect().violations == ()

    def check_empty(self) -> None:
        inspection = self.engine.inspect()
        assert inspection.violations == ()
        assert inspection.free_blocks == inspection.num_blocks
        assert inspection.num_requests == 0
        assert len(self.runner.free_rows) == self.config.max_num_seqs

    def kinds(self, request_id: str) -> list[str]:
        return [type(kind).__name__ for key, kind in self.notices if key == request_id]

    def output(self, request_id: str, choice: int = 0) -> list[int]:
        return self.tokens[RequestId(request_id), choice]

    @staticmethod
    def request(
        request_id: str,
        prompt: int | Seq[int],
        *,
        priority: int = 0,
        resume: tuple[ResumedChoice, ...] = (),
        cache_salt: str = "",
        timeout_ms: int = 600_000,
        **sampling: Any,
    ) -> EngineRequest:
        """`prompt`: tokens, or how many of them."""
        tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
        return EngineRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=tokens,
            sampling=SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | sampling)),
            priority=priority,
            resume=resume,
            cache_salt=cache_salt,
            timeout_ms=timeout_ms,
        )

    def expected(self, request: EngineRequest, choice: int = 0) -> tuple[list[int], FinishReason]:
        """What the fake model says, token by token, and why it ends: the plain loop that the engine must equal."""
        sampling = request.sampling
        output = next((list(c.token_ids) for c in request.resume if c.choice == choice), [])
        while True:
            if output:
                if (output[-1] == EOS and not sampling.ignore_eos) or output[-1] in sampling.stop_token_ids:
                    return output, FinishReason.STOP
                if len(output) >= (sampling.max_tokens or 1 << 30):
                    return output, FinishReason.LENGTH
                if len(request.prompt_token_ids) + len(output) >= self.engine.limits.max_model_len:
                    return output, FinishReason.LENGTH
            kv = prefixes([*request.prompt_token_ids, *output])[-1]
            output.append(next_token(kv, choice))

    def check_output(self, request: EngineRequest, choice: int = 0) -> None:
        tokens, reason = self.expected(request, choice)
        resumed = next((len(c.token_ids) for c in request.resume if c.choice == choice), 0)
        assert self.tokens[request.request_id, choice][resumed:] == tokens[resumed:]
        assert self.finished[request.request_id, choice] is reason

    def deliver(self, reservation: Reservation, request: EngineRequest) -> None:
        """The whole of a transfer: KV, first tokens, attach."""
        self.runner.fill(reservation, request.prompt_token_ids)
        self.engine.attach(reservation.request_id, reservation.generation, self.first_tokens(request))

    def first_tokens(self, request: EngineRequest) -> list[ChoiceDelta]:
        deltas = []
        begun = {c.choice for c in request.resume if c.token_ids or c.finished}
        for choice in range(request.sampling.n):
            if choice not in begun:
                tokens, reason = self.expected(request, choice)
                deltas.append(
                    ChoiceDelta(
                        request_id=request.request_id,
                        choice=choice,
                        index=0,
                        token_ids=(tokens[0],),
                        finish_reason=reason if len(tokens) == 1 else None,
                    )
                )
        return deltas


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    return Harness
