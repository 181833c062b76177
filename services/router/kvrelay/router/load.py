"""What a router knows of a pod's load: the pod's last report, and what the router itself has begun and ended there since.

Several routers share pods, so a report counts others' work as well; a router's own work is known exactly and at once. The two
meet in the scores, which are kept current on each change: choosing among a thousand pods only compares numbers.
"""

from dataclasses import dataclass

from kvrelay.common.ids import Epoch, PodId


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


class Load:
    """One life of a pod, as the policy sees it. Scores: lower is better."""

    __slots__ = (
        "_own_prefill_tokens",
        "_own_requests",
        "_report",
        "_since_report_requests",
        "_since_report_tokens",
        "block_size",
        "decode_score",
        "epoch",
        "free_tokens",
        "group",
        "num_tokens",
        "pod_id",
        "prefill_score",
        "self_sufficient",
        "startable",
    )

    def __init__(
        self, pod_id: PodId, epoch: Epoch, *, block_size: int, group: int = 0, self_sufficient: bool = False
    ) -> None:
        self.pod_id = pod_id
        self.epoch = epoch
        self.block_size = block_size
        self.group = group
        """Pods of one group can send each other KV."""
        self.self_sufficient = self_sufficient
        """It always computes prompts itself (role both)."""
        self._own_requests = 0
        self._own_prefill_tokens = 0
        self.report(IDLE)

    def report(self, report: Report) -> None:
        self._report = report
        self.num_tokens = report.num_blocks * self.block_size
        self._since_report_requests = 0
        self._since_report_tokens = 0
        self._score()

    def begin(self, prefill_tokens: int, kv_tokens: int) -> None:
        """This router sends a request here: so many tokens to compute, and so many whose KV needs room."""
        self._own_requests += 1
        self._own_prefill_tokens += prefill_tokens
        self._since_report_requests += 1
        self._since_report_tokens += kv_tokens
        self._score()

    def computed(self, prefill_tokens: int) -> None:
        """Of what `begin` announced, so many tokens need no more computing."""
        self._own_prefill_tokens -= prefill_tokens
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

    def _score(self) -> None:
        report = self._report
        told = report.num_running + report.num_waiting + self._since_report_requests
        requests = max(self._own_requests, told)
        self.prefill_score = max(self._own_prefill_tokens, report.waiting_tokens) + requests
        self.free_tokens = min(self.num_tokens, report.free_blocks * self.block_size - self._since_report_tokens)
        # Requests count; the share of blocks taken decides between equal ones.
        self.decode_score = requests + 1.0 - self.free_tokens / max(1, self.num_tokens)
        self.startable = report.credits > self._since_report_requests
