"""Who leaves a full tier next. A policy knows ids and sizes in bytes, and does no I/O; the tier asks it and tells it what came of it:

    while used_bytes + info.size > limit_bytes:
        block_id = policy.victim(info.id, evictable)   # None: nothing can go
        …                                              # out of the index and off the medium
        policy.evicted(block_id)
    …                                                  # onto the medium
    policy.stored(info.id, info.size)

A lookup that finds nothing is no call of its own: what a policy learns from it, it learns when the block is stored again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

from kvrelay.common.ids import BlockId

Evictable = Callable[[BlockId], bool]
"""False for a block that must stay for now: pinned, or already on its way out."""


class Policy(Protocol):
    """Holds exactly the ids that were stored and have neither been evicted nor removed since. Each call is O(1), `victim` but
    for the blocks it passes over."""

    name: str

    def stored(self, block_id: BlockId, size: int) -> None:
        """The block, which was not in the tier, is in it, with `size` bytes, at least one."""
        ...

    def used(self, block_id: BlockId) -> None:
        """A hit. Raises KeyError for a block that is not in the tier."""
        ...

    def victim(self, incoming: BlockId, evictable: Evictable) -> BlockId | None:
        """Who goes next so that `incoming`, which is not in the tier, gets room; None where no block is evictable.

        It may be asked again, and nothing need come of it. It gives a block again until that is evicted, removed or no longer evictable.
        """
        ...

    def evicted(self, block_id: BlockId) -> None:
        """The block has left as a victim. Raises KeyError for a block that is not in the tier."""
        ...

    def removed(self, block_id: BlockId) -> None:
        """The block has left otherwise (deleted, corrupt), if it was there: nothing of it is remembered."""
        ...


class Lru:
    """The least recently stored or used first."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[BlockId, None] = OrderedDict()

    def stored(self, block_id: BlockId, size: int) -> None:
        assert block_id not in self._order, "a block is stored once"
        self._order[block_id] = None

    def used(self, block_id: BlockId) -> None:
        self._order.move_to_end(block_id)

    def victim(self, incoming: BlockId, evictable: Evictable) -> BlockId | None:
        return next(filter(evictable, self._order), None)

    def evicted(self, block_id: BlockId) -> None:
        del self._order[block_id]

    def removed(self, block_id: BlockId) -> None:
        self._order.pop(block_id, None)


class SizedList:
    """Ids with the sizes of their blocks, the oldest first."""

    def __init__(self) -> None:
        self.sizes: OrderedDict[BlockId, int] = OrderedDict()
        self.num_bytes = 0
        """The sum of the sizes."""

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self.sizes

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def add(self, block_id: BlockId, size: int) -> None:
        self.sizes[block_id] = size
        self.num_bytes += size

    def take(self, block_id: BlockId) -> int:
        """Takes it out and gives its size. Raises KeyError."""
        size = self.sizes.pop(block_id)
        self.num_bytes -= size
        return size

    def renew(self, block_id: BlockId) -> int:
        """Makes it the newest and gives its size."""
        self.sizes.move_to_end(block_id)
        return self.sizes[block_id]


class Arc:
    """The adaptive replacement cache of N. Megiddo and D. S. Modha (FAST 2003, figure 4), in bytes instead of pages.

    The names are the paper's: T1 holds blocks that came once, T2 those that came or were used again; B1 and B2 are their
    ghosts, ids without data of what was evicted from them. The target p is how much T1 is to have. A block that comes while
    its ghost is in B1 shows that T1 was too small, in B2 that T2 was: it moves p by its size, times the other ghosts' bytes
    over those of its own kind where that is more than one. Always |T1| + |B1| ≤ c and |T1| + |T2| + |B1| + |B2| ≤ 2c, c being
    the tier's limit, if the tier keeps it. The paper starts with p = 0; here it is c / 2: ghosts of T1 come late to a large cache, and
    until they do p = 0 gives up what came once and is about to come again (`benchmarks.evictions`). Apart from that, with blocks of one
    size, of which c is a multiple, each answer is the paper's:

    - It adapts p before REPLACE, with the ghost still in its list. So a ghost moves p when `victim` is first asked for it, or
      when it is stored without need of a victim; `_counted` says that it did, however often it is asked, and even if the
      store fails. It stays a ghost until the block is stored, so that `victim` knows whether the incoming block is in B2.
    - It drops ghosts (case IV) before REPLACE, and `stored` does after: the same ones, as what REPLACE adds is the newest.
      Case IV.A with |T1| = c leaves no ghost of the victim; here there is one, which goes again at once, B1 having no other.
    - In that case T2 is empty and T1 gives the victim even where p = c: a list without an evictable block is passed over.
    """

    name = "arc"

    def __init__(self, limit_bytes: int, start: float = 0.5) -> None:
        """`start`: p at first, as a share of the limit."""
        self.limit_bytes = limit_bytes
        self._start = start
        self.t1, self.t2, self.b1, self.b2 = SizedList(), SizedList(), SizedList(), SizedList()
        self._target = 0.0
        """The paper's p, in pages."""
        self._page_bytes = 0
        """The size of the first block that came, whatever others have. It makes p, with blocks of one size, round as a count of
        pages does; in bytes, steps that sum up to |T1| in pages might miss it by a rounding."""
        self._counted: set[BlockId] = set()
        """Ghosts that have moved the target and whose block has not come yet."""

    @property
    def target_bytes(self) -> float:
        return self._target * self._page_bytes

    def stored(self, block_id: BlockId, size: int) -> None:
        ghosts = self._find(block_id)
        assert ghosts not in (self.t1, self.t2), "a block is stored once"
        if not self._page_bytes:
            self._page_bytes = size
            self._target = self._start * self._pages(self.limit_bytes)
        if ghosts is None:
            self.t1.add(block_id, size)
        else:
            self._adapt(block_id)
            self._drop(ghosts, block_id)
            self.t2.add(block_id, size)
        self._trim()

    def used(self, block_id: BlockId) -> None:
        holder = self.t1 if block_id in self.t1.sizes else self.t2
        self.t2.add(block_id, holder.take(block_id))

    def victim(self, incoming: BlockId, evictable: Evictable) -> BlockId | None:
        """The paper's REPLACE."""
        self._adapt(incoming)
        over = self._pages(self.t1.num_bytes) - self._target
        from_t1 = over > 0 or (over == 0 and incoming in self.b2)
        order = chain(self.t1, self.t2) if from_t1 else chain(self.t2, self.t1)
        return next(filter(evictable, order), None)

    def evicted(self, block_id: BlockId) -> None:
        holder, ghosts = (self.t1, self.b1) if block_id in self.t1 else (self.t2, self.b2)
        ghosts.add(block_id, holder.take(block_id))

    def removed(self, block_id: BlockId) -> None:
        blocks = self._find(block_id)
        if blocks is not None:
            self._drop(blocks, block_id)

    def _adapt(self, block_id: BlockId) -> None:
        """Moves the target if the block is a ghost that has not moved it yet."""
        own = self._find(block_id)
        if own not in (self.b1, self.b2) or block_id in self._counted:
            return
        self._counted.add(block_id)
        # The newest ghost is the last to be dropped if others are stored before this one.
        size = own.renew(block_id)
        other = self.b2 if own is self.b1 else self.b1
        step = self._pages(size) * max(1.0, other.num_bytes / own.num_bytes)
        if own is self.b1:
            self._target = min(self._target + step, self._pages(self.limit_bytes))
        else:
            self._target = max(self._target - step, 0.0)

    def _trim(self) -> None:
        """Drops the oldest ghosts until both bounds hold."""
        while self.b1.sizes and self.t1.num_bytes + self.b1.num_bytes > self.limit_bytes:
            self._drop(self.b1, next(iter(self.b1)))
        while self.b2.sizes and sum(blocks.num_bytes for blocks in self._lists()) > 2 * self.limit_bytes:
            self._drop(self.b2, next(iter(self.b2)))

    def _pages(self, num_bytes: int) -> float:
        return num_bytes / (self._page_bytes or 1)

    def _lists(self) -> tuple[SizedList, ...]:
        return self.t1, self.t2, self.b1, self.b2

    def _find(self, block_id: BlockId) -> SizedList | None:
        for blocks in self._lists():
            if block_id in blocks.sizes:
                return blocks
        return None

    def _drop(self, blocks: SizedList, block_id: BlockId) -> None:
        blocks.take(block_id)
        self._counted.discard(block_id)


_POLICIES: dict[str, Callable[[int], Policy]] = {Lru.name: lambda limit_bytes: Lru(), Arc.name: Arc}


def make_policy(name: str, limit_bytes: int) -> Policy:
    """For a tier of `limit_bytes`. Raises ValueError for a name that is not known."""
    if name not in _POLICIES:
        raise ValueError(f"there is no eviction policy {name!r}; known are {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name](limit_bytes)
