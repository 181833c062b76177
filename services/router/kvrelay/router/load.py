"""What a router knows of a pod's load: the pod's last report, and what the router itself has begun and ended there since.

Several routers share pods, so a report counts others' work as well; a router's own work is known exactly and at once. The two
meet in the scores, which are kept current on each change: choosing among a thousand pods only compares numbers.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import xxhash

from kvrelay.common.ids import Epoch, Fingerprint, PodId


@dataclass(frozen=True, slots=True)
class Report:
    """The part of a `PodStatus` that counts for routing."""

    credits: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    free_blocks: int
    num_blocks: int


IDLE = Report(credits=1, num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=1, num_blocks=1)

# What a load writes of itself into a table, one column each (`kvrelay.router.board`).
FREE_AT: Final = 0
"""Clock time at which all prompts that it has will be computed."""
BACKLOG: Final = 1
"""Seconds of work that it cannot have done yet, whatever the clock says."""
SLOWNESS: Final = 2
STARTABLE: Final = 3
ROOM: Final = 4
"""Tokens; negative where it can start nothing."""
REQUESTS: Final = 5
BEGUN: Final = 6
"""Seconds of work begun, the older the less."""
BEGUN_AT: Final = 7
"""The time for which BEGUN holds."""
COLUMNS: Final = 8

MEMORY_SECONDS: Final = 60.0
"""After which work begun counts a third."""
DEFAULT_SECONDS_PER_TOKEN: Final = 25e-6
NO_MODEL: Final = Fingerprint("")


class Load:
    """One life of a pod, as the policy sees it. Scores: lower is better."""

    __slots__ = (
        "_backlog",
        "_begun",
        "_begun_at",
        "_cells",
        "_clock",
        "_free_at",
        "_own_prefill_tokens",
        "_own_prefills",
        "_own_prompt_tokens",
        "_own_requests",
        "_report",
        "_row",
        "_since_report_requests",
        "_since_report_tokens",
        "_stride",
        "block_size",
        "decode_score",
        "epoch",
        "fingerprint",
        "free_tokens",
        "group",
        "name_hash",
        "num_tokens",
        "pod_id",
        "prefill_score",
        "seconds_per_token",
        "self_sufficient",
        "slowness",
        "startable",
    )

    def __init__(
        self,
        pod_id: PodId,
        epoch: Epoch,
        *,
        block_size: int,
        group: int = 0,
        self_sufficient: bool = False,
        fingerprint: Fingerprint = NO_MODEL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pod_id = pod_id
        self.name_hash = xxhash.xxh3_64_intdigest(pod_id.encode())
        self.epoch = epoch
        self.block_size = block_size
        self.group = group
        """Pods of one group can send each other KV."""
        self.self_sufficient = self_sufficient
        """It always computes prompts itself (role both)."""
        self.fingerprint = fingerprint
        self.slowness = 1.0
        """How much longer prompts take here than elsewhere; measured, see `kvrelay.router.costs`."""
        self.seconds_per_token = DEFAULT_SECONDS_PER_TOKEN
        """Of prompts; measured."""
        self._clock = clock
        self._cells: array[float] | None = None
        self._row = self._stride = 0
        self._own_requests = 0
        self._own_prefills = 0
        self._own_prefill_tokens = 0
        self._own_prompt_tokens = 0
        self._backlog = 0.0
        self._free_at = self._begun_at = clock()
        self._begun = 0.0
        self.report(IDLE)

    def report(self, report: Report) -> None:
        self._report = report
        self.num_tokens = report.num_blocks * self.block_size
        self._since_report_requests = 0
        self._since_report_tokens = 0
        now = self._clock()
        others = now + self._others_seconds()
        # Of its own work the router knows more than tokens: what is cached of it, and how long the prompts are.
        self._free_at = max(self._free_at, others) if self._own_prefills else others
        self._score()

    def begin(self, prefill_tokens: int, kv_tokens: int, seconds: float = 0.0) -> None:
        """This router sends a request here: so many tokens to compute, in about so many seconds, and so many whose KV needs
        room."""
        self._own_requests += 1
        if prefill_tokens:
            now = self._clock()
            self._own_prefills += 1
            self._own_prefill_tokens += prefill_tokens
            self._own_prompt_tokens += kv_tokens
            self._backlog += seconds
            self._free_at = max(self._free_at, now) + seconds
            self._begun = self._begun * max(0.0, 1.0 - (now - self._begun_at) / MEMORY_SECONDS) + seconds
            self._begun_at = now
        self._since_report_requests += 1
        self._since_report_tokens += kv_tokens
        self._score()

    def computed(self, prefill_tokens: int, kv_tokens: int, seconds: float = 0.0) -> None:
        """What `begin` announced needs no more computing."""
        if prefill_tokens:
            self._own_prefills -= 1
            self._own_prefill_tokens -= prefill_tokens
            self._own_prompt_tokens -= kv_tokens
            self._backlog = self._backlog - seconds if self._own_prefills else 0.0
            # Prompts are computed in order: what is left is not begun.
            self._free_at = self._clock() + self._backlog + self._others_seconds()
        self._score()

    def end(self, kv_tokens: int) -> None:
        """The pod is believed to have the room again; if it has not, it refuses, and its next report says so."""
        self._own_requests -= 1
        self._since_report_requests -= 1
        self._since_report_tokens -= kv_tokens
        self._score()

    def refused(self) -> None:
        """The pod said that it has no room: nothing more until it reports again."""
        self._since_report_tokens = self._report.free_blocks * self.block_size
        self._since_report_requests = max(self._since_report_requests, self._report.credits)
        self._score()

    @property
    def reported(self) -> Report:
        """What the pod said last."""
        return self._report

    @property
    def computes(self) -> bool:
        """Prompts, as far as is known here."""
        return self._own_prefills > 0 or self._report.waiting_tokens > 0

    def write_to(self, cells: "array[float]", row: int, stride: int) -> None:
        """From now on its columns in a table of `stride` rows are kept current; those of a former table no more."""
        self._cells, self._row, self._stride = cells, row, stride
        self._score()

    def _others_seconds(self) -> float:
        """Of work that was reported and is not this router's. A pod counts a waiting prompt whole."""
        return max(0, self._report.waiting_tokens - self._own_prompt_tokens) * self.seconds_per_token

    def _score(self) -> None:
        report = self._report
        told = report.num_running + report.num_waiting + self._since_report_requests
        requests = max(self._own_requests, told)
        self.prefill_score = max(self._own_prefill_tokens, report.waiting_tokens) + requests
        self.free_tokens = min(self.num_tokens, report.free_blocks * self.block_size - self._since_report_tokens)
        # Requests count; the share of blocks taken decides between equal ones.
        self.decode_score = requests + 1.0 - self.free_tokens / max(1, self.num_tokens)
        self.startable = report.credits > self._since_report_requests
        if self._cells is not None:
            self._write(self._cells)

    def _write(self, cells: "array[float]") -> None:
        row, stride = self._row, self._stride
        # Of several prompts all but one are certainly not begun: an estimate that ran ahead of the pod ends there.
        unbegun = 1.0 - 1.0 / self._own_prefills if self._own_prefills else 0.0
        cells[row + FREE_AT * stride] = self._free_at
        cells[row + BACKLOG * stride] = self._backlog * unbegun
        cells[row + SLOWNESS * stride] = self.slowness
        cells[row + STARTABLE * stride] = self.startable
        cells[row + ROOM * stride] = self.free_tokens if self.startable else -1.0
        cells[row + REQUESTS * stride] = self.decode_score
        cells[row + BEGUN * stride] = self._begun
        cells[row + BEGUN_AT * stride] = self._begun_at
