"""Caches for the tests of eviction policies: simulations straight from the paper, and one that a policy of ours runs."""

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.policy import Policy


class Reference(Protocol):
    """A cache of `capacity` pages, in the words of the paper."""

    def request(self, x: int) -> bool:
        """Whether it is a hit."""
        ...

    def contents(self) -> set[int]: ...


class ReferenceLru:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pages: OrderedDict[int, None] = OrderedDict()

    def request(self, x: int) -> bool:
        hit = x in self.pages
        if hit:
            del self.pages[x]
        elif len(self.pages) == self.capacity:
            self.pages.popitem(last=False)
        self.pages[x] = None
        return hit

    def contents(self) -> set[int]:
        return set(self.pages)


class ReferenceArc:
    """ARC(c) of Megiddo and Modha, FAST 2003, figure 4, line by line. Lists have the LRU page first."""

    def __init__(self, capacity: int, start: float = 0.5) -> None:
        """`start`: p at first, as a share of the capacity; in the paper 0."""
        self.c = capacity
        self.p = start * capacity
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()
        self.met: Counter[str] = Counter()
        """Branches that were taken."""

    def request(self, x: int) -> bool:
        if x in self.t1 or x in self.t2:
            self.met["I"] += 1
            (self.t1 if x in self.t1 else self.t2).pop(x)
            self.t2[x] = None
            return True
        if x in self.b1:
            self.met["II"] += 1
            self.p = min(self.p + (1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)), self.c)
            self.replace(x)
            del self.b1[x]
            self.t2[x] = None
        elif x in self.b2:
            self.met["III"] += 1
            self.p = max(self.p - (1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)), 0)
            self.replace(x)
            del self.b2[x]
            self.t2[x] = None
        else:
            self.case_iv(x)
            self.t1[x] = None
        return False

    def case_iv(self, x: int) -> None:
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.met["IV.A, ghosts"] += 1
                self.b1.popitem(last=False)
                self.replace(x)
            else:
                self.met["IV.A, no ghosts"] += 1
                self.t1.popitem(last=False)
            return
        total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
        if total >= self.c:
            self.met["IV.B, full" if total == 2 * self.c else "IV.B"] += 1
            if total == 2 * self.c:
                self.b2.popitem(last=False)
            self.replace(x)

    def replace(self, x: int) -> None:
        tie = x in self.b2 and len(self.t1) == self.p
        if self.t1 and (len(self.t1) > self.p or tie):
            self.met["REPLACE, tie"] += tie
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def contents(self) -> set[int]:
        return {*self.t1, *self.t2}


REFERENCES: dict[str, Callable[[int], Reference]] = {"lru": ReferenceLru, "arc": ReferenceArc}


@functools.cache
def key(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "little"))


class Cache:
    """What a tier does with its policy, in one go."""

    def __init__(self, policy: Policy, limit_bytes: int) -> None:
        self.policy = policy
        self.limit_bytes = limit_bytes
        self.sizes: dict[BlockId, int] = {}
        self.used_bytes = 0
        self.pinned: set[BlockId] = set()

    def evictable(self, block_id: BlockId) -> bool:
        return block_id not in self.pinned

    def request(self, number: int, size: int = 1) -> bool:
        """Whether it is a hit; if not, it is stored, for which enough is evicted if enough is not pinned."""
        block_id = key(number)
        if block_id in self.sizes:
            self.policy.used(block_id)
            return True
        while self.used_bytes + size > self.limit_bytes:
            victim = self.policy.victim(block_id, self.evictable)
            assert victim == self.policy.victim(block_id, self.evictable), "asking again changes nothing"
            if victim is None:
                assert self.pinned.issuperset(self.sizes), "something could have gone"
                return False
            assert self.evictable(victim)
            self.used_bytes -= self.sizes.pop(victim)  # KeyError: a block that is not here
            self.policy.evicted(victim)
        self.policy.stored(block_id, size)
        self.sizes[block_id] = size
        self.used_bytes += size
        return False

    def remove(self, number: int) -> None:
        self.policy.removed(key(number))
        self.used_bytes -= self.sizes.pop(key(number), 0)
