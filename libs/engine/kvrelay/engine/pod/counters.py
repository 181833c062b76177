"""What a pod's front counts from its start on: what went wrong with requests, and who left."""

import collections
import contextlib
from collections.abc import Iterator

from kvrelay.common.errors import KvrelayError
from kvrelay.engine import messages as m


class Counters:
    def __init__(self) -> None:
        self.dropped_deltas = 0
        self.slow_streams = 0
        self.lost_routers = 0
        self.revoked_tickets = 0
        self.recomputed = 0
        self.failures: collections.Counter[str] = collections.Counter()
        """Of requests that were taken, by the error's code."""
        self.refusals: collections.Counter[str] = collections.Counter()
        """Of requests that were not, likewise."""

    def note(self, kind: m.NoticeKind) -> None:
        match kind:
            case m.TicketRevoked():
                self.revoked_tickets += 1
            case m.RecomputeStarted():
                self.recomputed += 1
            case m.RequestFailed(code=code) | m.PushFailed(code=code):
                self.failures[code] += 1
            case _:
                pass

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Around what may refuse a request."""
        try:
            yield
        except KvrelayError as error:
            self.refusals[error.code] += 1
            raise
