"""Who computes how many tokens in the next step. There are no phases: a sequence is behind its tokens by one, or by more."""

from bisect import insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from kvrelay.engine.batch import Batch, Scheduled
from kvrelay.engine.budget import StepBudget
from kvrelay.engine.manager import KvManager
from kvrelay.engine.sequence import Sequence, State

rank = attrgetter("rank")

Divert = Callable[[Sequence, list[int]], bool]


class _Step:
    """The step being built: what is left of its token budget, and who is in it. Who is in it is not preempted."""

    def __init__(self, num_tokens: int, *, ahead: bool) -> None:
        self.left = self._budget = num_tokens
        self.ahead = ahead
        self.parts: list[Scheduled] = []
        self.preempted = False

    def add(self, seq: Sequence, start: int, count: int) -> None:
        samples = seq.num_branches if start + count == len(seq.tokens) + seq.num_unknown else 0
        self.parts.append(Scheduled(seq, start, count, samples))
        self.left -= count

    def batch(self, number: int, copies: list[tuple[int, int]]) -> Batch:
        num_tokens = self._budget - self.left
        if num_tokens > len(self.parts):
            self.parts.sort(key=_is_long)
        return Batch(number, self.parts, copies, num_tokens)


def _is_long(part: Scheduled) -> bool:
    return part.num_tokens > 1


def _never(seq: Sequence, hits: list[int]) -> bool:
    return False


class Scheduler:
    """Owns the queue of waiting sequences and the running ones, at most `max_num_seqs`, both with the best rank first.

    `reclaim` takes back one reservation that no transfer has filled, if there is one, and says whether it did. `divert` is
    offered each sequence that could start, with its prefix hits: what it takes is `loading` until `loaded`, and then waits again.
    """

    def __init__(
        self,
        manager: KvManager,
        budget: StepBudget,
        *,
        max_num_seqs: int,
        watermark: int,
        reclaim: Callable[[], bool],
    ) -> None:
        self.waiting: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.running: list[Sequence] = []
        self.dropped: list[Sequence] = []
        """No longer running: the runner may forget them."""
        self.started: list[Sequence] = []
        """They run since a moment ago; those that have been part of a step since are taken out by the engine."""
        self.num_preemptions = 0
        self.starved = False
        """The last step lacks what there were no blocks for; with no step in flight, the next can preempt for it."""
        self._manager = manager
        self._block_size = manager.block_size
        self._budget = budget
        self._max_num_seqs = max_num_seqs
        self._watermark = watermark
        self._reclaim = reclaim
        self.divert: Divert = _never

    def add(self, seq: Sequence) -> None:
        """Into the queue, at its rank. It may hold blocks already."""
        seq.state = State.WAITING
        insort(self.waiting, seq, key=rank)

    def start(self, seq: Sequence) -> None:
        """A branch of a running sequence: runs at once where there is a place, else waits with its blocks."""
        if len(self.running) < self._max_num_seqs:
            self._run(seq)
        else:
            self.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, whose blocks and state become the caller's business."""
        if seq.state is State.RUNNING:
            self.running.remove(seq)
            self.dropped.append(seq)
        elif seq.state is State.WAITING:
            self.waiting.remove(seq)
        elif seq.state is State.LOADING:
            self.loading.remove(seq)

    def loaded(self, seq: Sequence) -> None:
        """A diverted sequence, with what it holds by now, waits for its turn again."""
        self.loading.remove(seq)
        self.add(seq)

    def schedule(self, number: int, *, ahead: bool = False) -> Batch | None:
        """The next step; None where nothing can run until something else changes (blocks are freed, a sequence is added).

        `ahead`: the step before is in flight, so nothing is preempted.
        """
        step = _Step(self._budget.num_tokens, ahead=ahead)
        self.starved = False
        behind = []
        for seq in list(self.running):
            start, length = seq.num_computed + seq.num_ahead, len(seq.tokens) + seq.num_unknown
            if length - start > 1:
                behind.append(seq)
            else:
                self._continue(step, seq, start, length)
        for seq in behind:
            self._continue(step, seq, seq.position, seq.length)
        if not self.starved and not (step.preempted and step.parts):
            self._admit(step)
        return step.batch(number, self._manager.take_copies()) if step.parts else None

    def _continue(self, step: _Step, seq: Sequence, start: int, length: int) -> None:
        """Its next tokens: `start` is its position. Without properties and small calls: the host pays for it by the sequence."""
        if step.preempted and seq.state is not State.RUNNING:
            return  # a moment ago, for one before it
        # What is being sampled may be followed by what depends on it by its KV alone, unless it is the last.
        if seq.num_unknown and (length >= seq.max_length or seq.remembers or seq.whole or seq.num_branches > 1):
            return
        end = length if length - start <= step.left else start + step.left
        has_room = end <= len(seq.blocks) * self._block_size and not seq.branched
        if start < end and (has_room or self._make_room(step, seq, end)):
            step.parts.append(Scheduled(seq, start, end - start, seq.num_branches if end == length else 0))
            step.left -= end - start

    def _make_room(self, step: _Step, seq: Sequence, end: int) -> bool:
        """Blocks for a running sequence: free ones, else of reservations, else of the worst that is not in the step yet."""
        while not self._manager.grow(seq, end):
            if self._reclaim():
                continue
            if step.ahead:
                self.starved = True
                return False
            victim = max(self._victims(step), key=rank)
            self._preempt(victim)
            step.preempted = True
            if victim is seq:
                return False
        return True

    def _victims(self, step: _Step) -> Iterator[Sequence]:
        members = {part.seq for part in step.parts}
        yield from (seq for seq in self.running if not seq.whole and seq not in members)
        yield from (seq for seq in self.waiting if seq.blocks)

    def _preempt(self, seq: Sequence) -> None:
        """Its blocks go; what it has computed is found again in the prefix cache, or computed again."""
        self.num_preemptions += 1
        self.remove(seq)
        self._manager.free(seq)
        seq.looked_up = False
        self.add(seq)

    def _admit(self, step: _Step) -> None:
        """Waiting sequences, by rank, each only if all its tokens so far fit: none is let in to be preempted at once."""
        while self.waiting and step.left and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            hits = self._hits(seq)
            if not self.fits(seq, hits):
                if step.parts or step.ahead or not self._preempt_waiting(seq):
                    return
                continue
            self.waiting.pop(0)
            if self.divert(seq, hits):
                seq.state = State.LOADING
                self.loading.append(seq)
                continue
            self._run(seq)
            if hits:
                self._manager.pin(seq, hits)
            if not seq.started:
                seq.started = True
                seq.num_cached = min(seq.num_computed, seq.num_prompt)
            count = min(step.left, seq.num_to_compute)
            grown = self._manager.grow(seq, seq.num_prompt if seq.whole else seq.position + count)
            assert grown, "what fits can grow"
            step.add(seq, seq.position, count)

    def _run(self, seq: Sequence) -> None:
        seq.state = State.RUNNING
        insort(self.running, seq, key=rank)
        self.started.append(seq)

    def _preempt_waiting(self, head: Sequence) -> bool:
        """Nothing runs and the best cannot start: of those that wait with blocks, the worst lets go."""
        holders = [seq for seq in self.waiting if seq.blocks and seq is not head]
        if holders:
            self._preempt(max(holders, key=rank))
        return bool(holders)

    def _hits(self, seq: Sequence) -> list[int]:
        """The prefix to pin. Its last token is always computed, for its logits; prompt logprobs need all logits."""
        if seq.blocks or (seq.request.sampling.prompt_logprobs is not None and not seq.num_output):
            return []
        return self._manager.find(seq, len(seq.tokens) - 1)

    def fits(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether a waiting sequence can start, with what the half-computed ones still need and a rest left for growth."""
        return self._manager.cost(seq, len(seq.tokens), hits) + self.reserve_blocks() <= self._manager.num_free

    def reserve_blocks(self) -> int:
        """Free blocks that are not for newcomers. None while nothing runs: else a large prompt might never start."""
        owed = self._owed(self.running) + self._owed(self.loading)
        return self._watermark + owed if self.running else owed

    @property
    def can_load(self) -> bool:
        """Whether what runs and loads could go on to the end of its tokens so far."""
        return self.reserve_blocks() <= self._manager.num_free

    @property
    def spare_blocks(self) -> int:
        """Free blocks that neither who runs nor who waits will need for its tokens so far."""
        return self._manager.num_free - self.reserve_blocks() - self._owed(self.waiting)

    @property
    def seats(self) -> int:
        """Sequences that could start beside those that run and wait."""
        return max(0, self._max_num_seqs - len(self.running) - len(self.waiting) - len(self.loading))

    def admissible(self, seq: Sequence) -> bool:
        """Whether a newcomer would start soon."""
        return self.seats > 0 and self._manager.cost(seq, len(seq.tokens), self._hits(seq)) <= self.spare_blocks

    def _owed(self, sequences: list[Sequence]) -> int:
        wanting = [seq for seq in sequences if seq.branched or seq.length > len(seq.blocks) * self._block_size]
        return sum(self._manager.cost(seq, seq.length, ()) for seq in wanting)
