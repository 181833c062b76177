"""The pods as the page lists them, those that were lost while somebody looked among them."""

import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kvrelay.common.discovery import PodRole
from kvrelay.common.ids import PodId
from kvrelay.router.pods import Pod

GONE_SECONDS: Final = 600.0
"""For which a pod that left is still listed."""
MAX_ROWS: Final = 200
"""Of pods that are there, and again of those that are gone."""
_ROLES: Final = {"prefill": 0, "decode": 1, "both": 2}


class PodRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    role: PodRole
    state: str
    """`ready`, `starting`, `draining`, `unreachable`, or `gone`: its lease has ended."""
    gone_seconds: int = 0
    transport: str
    running: int
    waiting: int
    waiting_tokens: int
    """Of prompts, still to be computed."""
    credits: int
    num_blocks: int
    free_blocks: int


class Roll:
    """Called over again by whoever looks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[PodId, PodRow] = {}
        self._gone: dict[PodId, tuple[float, PodRow]] = {}

    def rows(self, pods: Iterable[Pod]) -> list[PodRow]:
        """By role and name; those that are gone behind the others of their role. A pod that is back is gone no more."""
        now = self._clock()
        # Of two lives of a pod the one that answers counts.
        present = {pod.record.pod_id: _row(pod) for pod in sorted(pods, key=lambda pod: pod.state != "unreachable")}
        for pod_id, row in self._last.items():
            if pod_id not in present:
                self._gone.setdefault(pod_id, (now, row))
        self._gone = {
            pod_id: (since, row)
            for pod_id, (since, row) in self._gone.items()
            if pod_id not in present and now - since < GONE_SECONDS
        }
        while len(self._gone) > MAX_ROWS:
            del self._gone[next(iter(self._gone))]
        self._last = present
        gone = [_gone(row, int(now - since)) for since, row in self._gone.values()]
        return sorted([*sorted(present.values(), key=_order)[:MAX_ROWS], *gone], key=_order)


def _order(row: PodRow) -> tuple[int, bool, int, str]:
    """`decode-2` before `decode-10`."""
    return _ROLES[row.role], row.state == "gone", len(row.id), row.id


def _row(pod: Pod) -> PodRow:
    said = pod.load.reported
    heard = pod.state != "unreachable"
    return PodRow(
        id=pod.record.pod_id,
        role=pod.record.role,
        state=pod.state,
        transport=pod.record.transport,
        running=said.num_running,
        waiting=said.num_waiting,
        waiting_tokens=said.waiting_tokens,
        credits=said.credits if heard else 0,
        num_blocks=said.num_blocks if heard else pod.record.num_blocks,
        free_blocks=said.free_blocks if heard else pod.record.num_blocks,
    )


def _gone(row: PodRow, seconds: int) -> PodRow:
    return msgspec.structs.replace(
        row, state="gone", gone_seconds=seconds, running=0, waiting=0, waiting_tokens=0, credits=0
    )
