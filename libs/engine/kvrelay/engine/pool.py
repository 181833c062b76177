"""The physical KV blocks of one rank: who counts them as theirs, which are free, and which free ones are still worth finding."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from kvrelay.common.errors import NoCapacity
from kvrelay.common.ids import BlockId


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of 16 tokens that follow one another after the span `parent` and whose KV has come into the cache."""

    parent: BlockId
    ids: tuple[BlockId, ...]
    token_ids: tuple[int, ...]
    """Of all the spans."""
    extra_keys: tuple[str, ...]
    """What separates equal tokens, such as the cache salt."""


class CacheListener(Protocol):
    """Hears what the prefix cache gains and loses, in order."""

    def stored(self, runs: Sequence[StoredRun]) -> None: ...

    def removed(self, ids: Sequence[BlockId]) -> None:
        """Each id is that of a block's last span; the block's other spans went with it."""
        ...


class NoListener:
    def stored(self, runs: Sequence[StoredRun]) -> None:
        pass

    def removed(self, ids: Sequence[BlockId]) -> None:
        pass


class BlockPool:
    """Blocks 0 … num_blocks - 1. A block with references is its holders'; one without is the pool's.

    A cached block's KV is full and computed, and its key (the id of its last span of 16 tokens, which covers all that come
    before) leads to it. Without references it keeps its content until the pool needs it: the longest unused goes first.
    """

    def __init__(self, num_blocks: int, listener: CacheListener) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.keys: list[BlockId | None] = [None] * num_blocks
        self.cached: dict[BlockId, int] = {}
        self.blank = deque(range(num_blocks))
        """Free blocks of no content."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Free cached blocks, the longest unused first."""
        self._listener = listener

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self.blank) + len(self.idle)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, the caller's. Raises NoCapacity, and takes none, where fewer are free."""
        if count > self.num_free:
            raise NoCapacity(f"{count} blocks are needed, {self.num_free} are free")
        if count > len(self.blank):
            self._evict(count - len(self.blank))
        blocks = [self.blank.popleft() for _ in range(count)]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def _evict(self, count: int) -> None:
        evicted = [self.idle.popitem(last=False)[0] for _ in range(count)]
        ids = []
        for block in evicted:
            key = self.keys[block]
            assert key is not None, "an idle block is cached"
            self.keys[block] = None
            del self.cached[key]
            ids.append(key)
        self.blank.extend(evicted)
        self._listener.removed(ids)

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each, which are held or idle."""
        for block in blocks:
            if self.refs[block] == 0:
                del self.idle[block]
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Gives back one reference to each. Of a prefix, the tail becomes evictable before the head: it is of no use alone."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self.keys[block] is None:
                    self.blank.append(block)
                else:
                    self.idle[block] = None

    def find(self, keys: Iterable[BlockId]) -> list[int]:
        """The cached blocks of `keys`, in order, up to the first that is not here. They are not pinned."""
        found = []
        for key in keys:
            block = self.cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def cache(self, block: int, key: BlockId) -> bool:
        """Makes a held block, now full and computed, findable by `key`. False where `key` leads to a block already."""
        if key in self.cached or self.keys[block] is not None:
            return False
        self.cached[key] = block
        self.keys[block] = key
        return True

    def announce(self, run: StoredRun) -> None:
        self._listener.stored((run,))
