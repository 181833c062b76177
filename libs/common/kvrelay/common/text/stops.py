"""Stop strings in a text that comes in parts.

Knuth, Morris, Pratt: Fast pattern matching in strings (1977), one automaton a stop string: the time is linear in the text,
whatever the stop strings are, and each automaton knows how much of the text's end could still become its string.
"""

from array import array
from collections.abc import Sequence


class StopPatterns:
    """Compiled stop strings, shared by a request's choices. Empty strings are refused with ValueError."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty")
        self.stops = tuple(dict.fromkeys(stops))
        self.borders = [_borders(stop) for stop in self.stops]
        self.firsts = frozenset(stop[0] for stop in self.stops)


def _borders(stop: str) -> "array[int]":
    """Entry k: the length of the longest proper prefix of stop[:k] that ends it as well."""
    borders = array("l", [0, 0])
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders


class StopStrings:
    """Finds the stop string that is complete first; of several that end together, the longest.

    Text is held back only as long as it could still become a stop string.
    """

    def __init__(self, stops: Sequence[str] | StopPatterns, include: bool = False) -> None:
        self._patterns = stops if isinstance(stops, StopPatterns) else StopPatterns(stops)
        self._include = include
        self._states = [0] * len(self._patterns.stops)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """What may be shown, and the stop string if one is complete: the text ends before it, or with it if `include`.

        While not `armed`, strings that are completed do not count; one that is completed later may have begun here.
        """
        if not self._held and self._patterns.firsts.isdisjoint(text):
            return text, None
        pending = self._held + text
        for at in range(len(self._held), len(pending)):
            stop = self._advance(pending[at])
            if stop is not None and armed:
                self._held = ""
                self._states = [0] * len(self._states)
                return pending[: at + 1 if self._include else at + 1 - len(stop)], stop
        shown = len(pending) - max(self._states)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._states)
        return held

    def _advance(self, character: str) -> str | None:
        longest: str | None = None
        for index, stop in enumerate(self._patterns.stops):
            length = self._states[index]
            if not length and stop[0] != character:
                continue
            borders = self._patterns.borders[index]
            while length and stop[length] != character:
                length = borders[length]
            length += stop[length] == character
            if length == len(stop):
                length = borders[length]
                longest = stop if longest is None or len(stop) > len(longest) else longest
            self._states[index] = length
        return longest
