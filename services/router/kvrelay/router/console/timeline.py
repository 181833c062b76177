"""The last requests, and where the time of each went.

Told a few times a request, never of single tokens: what a live one has so far is asked of it when somebody looks. Holds no text.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final, Literal

import msgspec

from kvrelay.router.job import PreparedRequest, UsageEvent
from kvrelay.router.placement import Times

KEPT: Final = 200
"""Ended requests that are remembered, and the most that are shown."""
MAX_PLACES: Final = 8
"""Of a request that is placed again and again, the last so many."""
ID_CHARS: Final = 18
"""Of a client's own id: enough to find it in the client's logs, too few for others to end the request by it."""
RUNNING: Final = "running"

Phase = Literal["queue", "prefill", "push", "decode"]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the page shows it. `phases` follow each other from its arrival on, in milliseconds."""

    number: int
    """Of this router's requests, from 1."""
    id: str
    log_id: str
    """Its name in pods' logs."""
    arrived_ms: int
    """Unix time."""
    status: str
    """`running`, `ok`, `cancelled`, or an error's code."""
    attempts: int
    prefill: str
    """The pod that computes the prompt; empty: the decode pod, or none yet."""
    decode: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    phases: tuple[tuple[Phase, float], ...]


class Record:
    """One request, told by the one who watches it go by."""

    __slots__ = ("_arrival", "_attempts", "_ended", "_ids", "_places", "_status", "_timeline", "_usage", "number")

    def __init__(
        self, prepared: PreparedRequest, usage: Callable[[], UsageEvent], number: int, timeline: "Timeline"
    ) -> None:
        """`usage` is asked while the request lives, and let go at its end."""
        self.number = number
        self._ids = (prepared.request_id, prepared.request.request_id)
        self._arrival = prepared.arrival
        self._usage: Callable[[], UsageEvent] | UsageEvent = usage
        self._attempts = 0
        self._places: list[Times] = []
        self._status = RUNNING
        self._ended: float | None = None
        self._timeline = timeline

    def placed(self, times: Times) -> None:
        self._attempts += 1
        self._places.append(times)
        if len(self._places) > MAX_PLACES:
            del self._places[0]

    def ended(self, status: str) -> None:
        self._status = status
        self._ended = time.monotonic()
        self._usage = self._told()
        self._timeline.end(self)

    def row(self, now: float) -> RequestRow:
        """`now`: on the clock of `time.monotonic`."""
        usage = self._told()
        place = self._places[-1] if self._places else None
        return RequestRow(
            number=self.number,
            id=_shortened(self._ids[0]),
            log_id=self._ids[1],
            arrived_ms=int((time.time() - now + self._arrival) * 1000),
            status=self._status,
            attempts=self._attempts,
            prefill=place.prefill if place is not None else "",
            decode=place.decode if place is not None else "",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            phases=tuple(self._phases(now)),
        )

    def _told(self) -> UsageEvent:
        return self._usage if isinstance(self._usage, UsageEvent) else self._usage()

    def _phases(self, now: float) -> Iterator[tuple[Phase, float]]:
        end = self._ended if self._ended is not None else now
        at = self._arrival
        for place in self._places:
            left = place.released if place.released is not None else end
            for phase, until in _marks(place):
                stop = left if until is None else min(until, left)
                yield phase, _ms(stop - at)
                at = stop
                if until is None:
                    break
        if not self._places or (self._ended is None and self._places[-1].released is not None):
            yield "queue", _ms(end - at)


def _marks(place: Times) -> Iterator[tuple[Phase, float | None]]:
    """Each phase with its end; None: it has none yet, or the place was left in it."""
    yield "queue", place.placed
    yield "prefill", place.computed
    if place.prefill:
        yield "push", place.decoding
    yield "decode", place.released


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 1)


def _shortened(request_id: str) -> str:
    return request_id if len(request_id) < ID_CHARS else request_id[: ID_CHARS - 1] + "…"


class Timeline:
    """Live requests, and the last KEPT that ended."""

    def __init__(self) -> None:
        self._live: dict[int, Record] = {}
        self._ended: deque[Record] = deque(maxlen=KEPT)
        self._number = 0

    def begin(self, prepared: PreparedRequest, usage: Callable[[], UsageEvent]) -> Record:
        """`usage`: what the request has used so far."""
        self._number += 1
        record = self._live[self._number] = Record(prepared, usage, self._number, self)
        return record

    def end(self, record: Record) -> None:
        del self._live[record.number]
        self._ended.append(record)

    def rows(self) -> list[RequestRow]:
        """Up to KEPT: live ones first, the latest first."""
        now = time.monotonic()
        return [record.row(now) for record in islice(chain(reversed(self._live.values()), reversed(self._ended)), KEPT)]


class _Nobody(Record):
    __slots__ = ()

    def __init__(self) -> None:
        """It is told everything, and keeps nothing."""

    def placed(self, times: Times) -> None: ...

    def ended(self, status: str) -> None: ...


class NoTimeline(Timeline):
    """Where there is no console: remembers nothing."""

    def begin(self, prepared: PreparedRequest, usage: Callable[[], UsageEvent]) -> Record:
        return NOBODY


NOBODY: Final = _Nobody()
