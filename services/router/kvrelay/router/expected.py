"""What pods will have soon: the prompts that this router sent there, which no event tells of yet."""

import heapq
from collections.abc import Iterable, Sequence

from kvrelay.common.blocks import SPAN
from kvrelay.common.ids import BlockId
from kvrelay.router.prefixindex import Hits, PrefixIndex

STRIDE = 16
"""Only every so many spans are noted, 256 tokens: what is expected need not be exact."""


class Expected:
    """A prefix index whose entries end at a time. Prompts are noted from their beginning on, so they have no holes."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._until: dict[tuple[str, BlockId], float] = {}
        self._ends: list[tuple[float, str, tuple[BlockId, ...]]] = []

    def follow(self, sources: Iterable[str]) -> None:
        """These sources and no others are noted."""
        wanted = set(sources)
        for name in self.index.names() - wanted:
            self.index.remove_pod(name)
        for name in wanted:
            self.index.add_pod(name, STRIDE * SPAN)

    def add(self, source: str, ids: Sequence[BlockId], until: float) -> None:
        """The pod will have these until then; by that time its events say so, or it will not. Others than followed ones are
        left out."""
        keys = tuple(ids[STRIDE - 1 :: STRIDE])
        if not keys or source not in self.index:
            return
        self.index.stored(source, keys)
        for key in keys:
            self._until[source, key] = max(until, self._until.get((source, key), until))
        heapq.heappush(self._ends, (until, source, keys))

    def hits(self, ids: Sequence[BlockId], now: float) -> Hits:
        """As `PrefixIndex.hits`, of what is still expected."""
        while self._ends and self._ends[0][0] <= now:
            _, source, keys = heapq.heappop(self._ends)
            over = [key for key in keys if self._until.get((source, key), now) <= now]
            for key in over:
                self._until.pop((source, key), None)
            self.index.removed(source, over)
        return self.index.hits(ids)
