"""Which blocks a sequence holds: prefix hits, growth, copy-on-write, and what its computed blocks are worth to others."""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache

from kvrelay.common.blocks import NO_PARENT, SPAN, BlockHasher, extra_keys
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.engine.batch import Scheduled
from kvrelay.engine.pool import BlockPool, CacheListener, NoListener, StoredRun
from kvrelay.engine.sequence import Sequence

OnCached = Callable[[Sequence, int, int, bool], None]
"""Hears of blocks that can be found from now on: a sequence, which of its blocks (from the first to before the second), and
whether they are new, computed or pushed here, and not out of the KV store."""


def _unheard(seq: Sequence, first: int, end: int, new: bool) -> None:
    pass


class KvManager:
    """Hands the pool's blocks to sequences. `seq.blocks` is changed in place only: a push may look at the same list.

    Position p of a sequence lies in `seq.blocks[p // block_size]`. A block is written only by its one holder; a sequence
    that would write into one that others hold gets a copy first (`take_copies`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        fingerprint: Fingerprint,
        *,
        prefix_caching: bool = True,
        listener: CacheListener | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, listener or NoListener())
        self.block_size = block_size
        self.sources: list[int] = []
        """Blocks that the copies of steps read, one reference each, held until the step is done."""
        self.lent: list[int] = []
        """Blocks that a copy to the KV store reads, one reference each."""
        self.on_cached: OnCached = _unheard
        self._copies: list[tuple[int, int]] = []
        self._taken: deque[int] = deque()
        """How many of the sources are those of each step in flight."""
        self.spans = block_size // SPAN
        self._prefix_caching = prefix_caching
        self._hasher = lru_cache(maxsize=256)(lambda salt: BlockHasher(fingerprint, extra_keys(salt)))

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def keys(self, seq: Sequence, first: int, end: int) -> list[BlockId]:
        """The keys of the sequence's blocks `first` … `end` - 1, which its tokens fill."""
        if len(seq.block_ids) < end * self.spans:
            self._hasher(seq.request.cache_salt).extend(seq.block_ids, seq.tokens)
        return seq.block_ids[(first + 1) * self.spans - 1 : end * self.spans : self.spans]

    def find(self, seq: Sequence, limit: int) -> list[int]:
        """The cached blocks, not pinned, of the longest prefix of at most `limit` tokens of the sequence."""
        if not self._prefix_caching:
            return []
        return self.pool.find(self.keys(seq, 0, limit // self.block_size))

    def chain(self, seq: Sequence, limit: int) -> list[BlockId]:
        """The ids of the spans of 16 tokens in the sequence's full blocks within `limit` tokens, from its first on."""
        self.keys(seq, 0, limit // self.block_size)
        return seq.block_ids[: limit // self.block_size * self.spans]

    def lend(self, blocks: Seq[int]) -> None:
        """To a copy, which reads them: they are neither written nor given away until `take_back`."""
        self.pool.share(blocks)
        self.lent.extend(blocks)

    def take_back(self, blocks: Seq[int]) -> None:
        for block in blocks:
            self.lent.remove(block)
        self.pool.release(blocks)

    def cost(self, seq: Sequence, end: int, hits: Seq[int]) -> int:
        """Free blocks that it takes to pin `hits` (of a sequence that holds none) and to grow to `end` tokens."""
        idle = sum(self.pool.refs[block] == 0 for block in hits)
        if hits:
            return self.blocks_for(end) - len(hits) + idle
        return self._missing(seq, end) + len(self._shared(seq, end))

    def pin(self, seq: Sequence, hits: Seq[int]) -> None:
        """Makes the found prefix the sequence's, computed as it is. The sequence holds nothing before."""
        assert not seq.blocks, "a prefix is pinned by a sequence without blocks"
        self.pool.share(hits)
        seq.blocks.extend(hits)
        seq.num_computed = len(hits) * self.block_size

    def extend(self, seq: Sequence, hits: Seq[int]) -> None:
        """As `pin`, of what was found after the blocks that the sequence holds, all of which are computed."""
        assert len(seq.blocks) * self.block_size == seq.num_computed, "hits follow what is computed"
        self.pool.share(hits)
        seq.blocks.extend(hits)
        seq.num_computed += len(hits) * self.block_size

    def grow(self, seq: Sequence, end: int) -> bool:
        """Room to write positions `num_computed` … `end` - 1, none of it shared. False, and no change, where blocks lack."""
        shared = self._shared(seq, end)
        missing = self._missing(seq, end)
        if missing + len(shared) > self.pool.num_free:
            return False
        for index, copy in zip(shared, self.pool.allocate(len(shared)), strict=True):
            # The sequence's reference to the source is the copy's from here on, so that it stays alive until it is read.
            self.sources.append(seq.blocks[index])
            self._copies.append((seq.blocks[index], copy))
            seq.blocks[index] = copy
            seq.num_tabled = 0
        if self.blocks_for(end) >= len(seq.blocks):
            seq.branched = False  # what it may write from here on is its own
        seq.blocks.extend(self.pool.allocate(missing))
        return True

    def _missing(self, seq: Sequence, end: int) -> int:
        return max(0, self.blocks_for(end) - len(seq.blocks))

    def _shared(self, seq: Sequence, end: int) -> list[int]:
        """Indices of blocks that would be written and that other sequences hold. Copies only read, before all writes."""
        if not seq.branched:
            return []
        first, last = seq.num_computed // self.block_size, min(len(seq.blocks), self.blocks_for(end))
        return [i for i in range(first, last) if self._holders(seq.blocks[i]) > 1]

    def _holders(self, block: int) -> int:
        return self.pool.refs[block] - self.sources.count(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) of the step being built; `end_step` lets the sources go."""
        copies, self._copies = self._copies, []
        self._taken.append(len(copies))
        return copies

    def end_step(self) -> None:
        """Of the first of the steps in flight."""
        count = self._taken.popleft()
        self.pool.release(self.sources[:count])
        del self.sources[:count]

    def commit(self, seq: Sequence, num_computed: int) -> None:
        """The KV of positions below `num_computed` lies in the sequence's blocks: full ones can be found from now on."""
        self._take_over(seq, num_computed, new=True)

    def commit_step(self, parts: Iterable[Scheduled]) -> None:
        """As `commit`, of all that a step has computed."""
        for part in parts:
            seq, end = part.seq, part.start + part.num_tokens
            if part.num_tokens == 1 and end % self.block_size and end <= len(seq.tokens):
                seq.num_computed = end  # no block is full that was not
            else:
                # A sequence that has ended meanwhile may lack the last token of its part.
                self.commit(seq, min(end, len(seq.tokens)))

    def adopt(self, seq: Sequence, num_computed: int) -> None:
        """As `commit`, of KV that comes out of the KV store."""
        self._take_over(seq, num_computed, new=False)

    def _take_over(self, seq: Sequence, num_computed: int, *, new: bool) -> None:
        first, end = seq.num_computed // self.block_size, num_computed // self.block_size
        seq.num_computed = num_computed
        if self._prefix_caching and end > first:
            for run in self._cache(seq, first, end):
                self._announce(seq, *run)
                self.on_cached(seq, *run, new)

    def _cache(self, seq: Sequence, first: int, end: int) -> list[tuple[int, int]]:
        """Gives the runs of blocks that are new to the cache."""
        keys = self.keys(seq, first, end)
        new = [self.pool.cache(seq.blocks[first + i], key) for i, key in enumerate(keys)]
        runs, start = [], 0
        while True in new[start:]:
            start = new.index(True, start)
            stop = new.index(False, start) if False in new[start:] else len(new)
            runs.append((first + start, first + stop))
            start = stop
        return runs

    def _announce(self, seq: Sequence, first: int, end: int) -> None:
        spans = slice(first * self.spans, end * self.spans)
        self.pool.announce(
            StoredRun(
                parent=seq.block_ids[spans.start - 1] if spans.start else NO_PARENT,
                ids=tuple(seq.block_ids[spans]),
                token_ids=tuple(seq.tokens[first * self.block_size : end * self.block_size]),
                extra_keys=extra_keys(seq.request.cache_salt),
            )
        )

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, without blocks so far, shares all of the parent's blocks and what is computed in them."""
        assert not child.blocks, "a branch starts without blocks"
        parent.branched = child.branched = True
        self.pool.share(parent.blocks)
        child.blocks.extend(parent.blocks)
        child.block_ids = parent.block_ids[: parent.num_prompt // SPAN]
        child.num_computed = parent.num_computed

    def truncate(self, seq: Sequence, limit: int) -> None:
        """Keeps computed at most `limit` tokens, in whole blocks, and gives back computed blocks beyond them.

        Blocks that come after the computed ones stay with the sequence; those given back are allocated anew by `grow`.
        """
        keep = limit // self.block_size
        computed = seq.num_computed // self.block_size
        if computed > keep:
            self.pool.release(seq.blocks[keep:computed])
            del seq.blocks[keep:computed]
            seq.num_tabled = 0
            seq.num_computed = keep * self.block_size

    def free(self, seq: Sequence) -> None:
        """The sequence holds nothing, and nothing of it is computed."""
        self.pool.release(seq.blocks)
        seq.blocks.clear()
        seq.num_computed = 0
        seq.num_tabled = 0
