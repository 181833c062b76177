"""When traced requests did what in this engine. What is said of each, once, when it is over: `messages.Timeline`.

    queue ──▶ compute ──▶ (push)          prefill side            load: within the queue, blocks out of the KV store
    receive ──▶ decode                    decode side             receive ──▶ compute: no push came in time
    queue ──▶ compute ──▶ decode          all here

Nothing is noted of requests that are not traced. Times are of the monotonic clock, in seconds.
"""

import dataclasses
import time
from collections.abc import Container

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest
from kvrelay.engine.batch import Batch
from kvrelay.engine.messages import Chunk, Notice, Phase, Timeline


@dataclasses.dataclass(slots=True)
class _Line:
    """Of one attempt; `name` is the phase that it is in, since `since`."""

    attempt: int
    name: str
    since: float
    pushes: bool
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    phases: list[Phase] = dataclasses.field(default_factory=list)

    def enter(self, name: str) -> None:
        """Another phase; none: it waits for its end."""
        now = time.monotonic()
        if self.name:
            self.phases.append(Phase(name=self.name, start=self.since, end=now, chunks=tuple(self.chunks)))
            self.chunks.clear()
        self.name, self.since = name, now

    def notice(self, request_id: RequestId) -> Notice:
        self.enter("")
        return Notice(request_id=request_id, attempt=self.attempt, kind=Timeline(phases=tuple(self.phases)))


class Timelines:
    """Of the traced requests that are here. Each call is cheap where there are none."""

    def __init__(self) -> None:
        self._lines: dict[RequestId, _Line] = {}
        self._over: list[Notice] = []

    def begin(self, request: EngineRequest, attempt: int, *, receives: bool = False, pushes: bool = False) -> None:
        """Also of a request that is refused a moment later. A higher attempt ends what a lower one has."""
        if not request.traced:
            return
        request_id, known = request.request_id, self._lines.get(request.request_id)
        if known is not None and known.attempt == attempt:
            return
        line = _Line(attempt, "receive" if receives else "queue", time.monotonic(), pushes)
        if known is not None:
            former, line = sorted((known, line), key=lambda each: each.attempt)
            self._over.append(former.notice(request_id))
        self._lines[request_id] = line

    def loaded(self, request_id: RequestId, since: float, num_tokens: int) -> None:
        """Out of the KV store, ready now."""
        if (line := self._lines.get(request_id)) is not None:
            chunk = Chunk(at=time.monotonic(), num_tokens=num_tokens)
            line.phases.append(Phase(name="load", start=since, end=chunk.at, chunks=(chunk,)))

    def scheduled(self, batch: Batch) -> None:
        """It is about to be launched."""
        if self._lines:
            for part in batch.parts:
                self.computing(part.seq.request.request_id)

    def computing(self, request_id: RequestId) -> None:
        line = self._lines.get(request_id)
        if line is not None and line.name in ("queue", "receive"):
            line.enter("compute")

    def updated(self, batch: Batch) -> None:
        """It has been computed."""
        if self._lines:
            for part in batch.parts:
                self.computed(part.seq.request.request_id, part.num_tokens, last=part.samples > 0)

    def computed(self, request_id: RequestId, num_tokens: int, *, last: bool) -> None:
        """A chunk of the prompt, or in another phase anything."""
        line = self._lines.get(request_id)
        if line is not None and line.name == "compute":
            line.chunks.append(Chunk(at=time.monotonic(), num_tokens=num_tokens))
            if last:
                line.enter("" if line.pushes else "decode")

    def received(self, request_id: RequestId) -> None:
        """All of its KV."""
        if (line := self._lines.get(request_id)) is not None:
            line.enter("decode")

    def pushed(self, request_id: RequestId, seconds: float) -> None:
        """The push, which took so long, has ended."""
        if (line := self._lines.get(request_id)) is not None:
            now = time.monotonic()
            line.phases.append(Phase(name="push", start=now - seconds, end=now))

    def over(self, living: Container[RequestId]) -> list[Notice]:
        """Of all that are not among the living any more, or were superseded."""
        if not (self._lines or self._over):
            return []
        ended = [request_id for request_id in self._lines if request_id not in living]
        told = [*self._over, *(self._lines.pop(request_id).notice(request_id) for request_id in ended)]
        self._over.clear()
        return told
