"""What is computed and not yet sent: in rectangles of layers and tokens, so that a message may hold several of either."""

import collections
from typing import NamedTuple


class Rectangle(NamedTuple):
    """Of layers [layer, end_layer), the tokens [start, end)."""

    layer: int
    end_layer: int
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        return (self.end_layer - self.layer) * (self.end - self.start)


class Pending:
    """First come, first taken."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Rectangle] = collections.deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, layer: int, start: int, end: int) -> None:
        """Joins what waits: the layer before it of the same tokens, then the tokens before these of the same layers."""
        added, waiting = Rectangle(layer, layer + 1, start, end), self._waiting
        if waiting and waiting[-1][1:] == (layer, start, end):
            added = waiting.pop()._replace(end_layer=layer + 1)
        if waiting and waiting[-1][:2] == added[:2] and waiting[-1].end == added.start:
            added = waiting.pop()._replace(end=added.end)
        waiting.append(added)

    def take(self, max_rows: int) -> Rectangle:
        """The first, or what of it has at most `max_rows` (a token's in a layer each): whole layers, or tokens of one."""
        layer, end_layer, start, end = self._waiting.popleft()
        num_layers = min(max_rows // (end - start), end_layer - layer)
        if num_layers:
            taken = Rectangle(layer, layer + num_layers, start, end)
        else:
            taken = Rectangle(layer, layer + 1, start, start + max_rows)
            self._waiting.appendleft(Rectangle(layer, layer + 1, taken.end, end))
        if taken.end_layer < end_layer:
            # Behind the rest of the layer that was cut, if one was.
            self._waiting.insert(0 if num_layers else 1, Rectangle(taken.end_layer, end_layer, start, end))
        return taken
