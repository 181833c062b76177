"""Which tokens of a layer have come: each exactly once, in any order."""

import bisect


class Coverage:
    """A set of disjoint half-open spans, merged where they touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> bool:
        """False, and nothing changes, where some of [start, end) is there already."""
        at = bisect.bisect_left(self._starts, start)
        if (at > 0 and self._ends[at - 1] > start) or (at < len(self._starts) and self._starts[at] < end):
            return False
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        if at + 1 < len(self._starts) and self._starts[at + 1] == end:
            self._ends[at] = self._ends.pop(at + 1)
            self._starts.pop(at + 1)
        if at > 0 and self._ends[at - 1] == start:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        return True
