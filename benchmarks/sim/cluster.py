"""The simulation: arrivals, a router's queue, policy and index as they are, pods, in virtual time."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.sim.pods import Cache, DecodePod, PrefillPod, Profile
from benchmarks.sim.trace import BLOCK, Request
from kvrelay.common.ids import BlockId
from kvrelay.router.costs import Costs
from kvrelay.router.load import Load
from kvrelay.router.placement import Placement
from kvrelay.router.policies import PolicyName, make_policy
from kvrelay.router.policy import PodsView, RouteRequest
from kvrelay.router.prefixaware import DEFAULT_WEIGHTS, Weights
from kvrelay.router.prefixindex import PrefixIndex

NUM_DECODE = 8


class Cluster:
    """Prefill pods, some decode pods, which bound nothing, and one router. Run once."""

    def __init__(
        self,
        num_pods: int,
        policy: PolicyName,
        profile: Profile,
        *,
        capacity: int | None,
        reports: bool = True,
        events: bool = True,
        weights: Weights = DEFAULT_WEIGHTS,
    ) -> None:
        """`capacity`: blocks of each prefill pod's cache; None: no limit. Without `reports` each pod says once that it is idle,
        and nothing more; without `events` the index knows the pods, and none of their blocks."""
        self.now = 0.0
        self._reports = reports
        self._events = events
        self._profile = profile
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._queue: deque[Request] = deque()
        self._index = PrefixIndex()
        self._costs = Costs()
        self._policy = make_policy(policy, 0, self._index, self._costs, weights=weights, clock=lambda: self.now)
        self.prefill = [PrefillPod(f"p{i}", profile, Cache(capacity), lambda: self.now) for i in range(num_pods)]
        decode = [DecodePod(f"d{i}", lambda: self.now) for i in range(NUM_DECODE)]
        for pod in self.prefill:
            self._index.add_pod(pod.load.pod_id, BLOCK)
        self._prefill_of: dict[Load, PrefillPod] = {pod.load: pod for pod in self.prefill}
        self._decode_of: dict[Load, DecodePod] = {pod.load: pod for pod in decode}
        self._view = PodsView([pod.load for pod in decode], {0: [pod.load for pod in self.prefill]})

    def run(self, requests: Sequence[Request]) -> None:
        """Each request gets its first token's time."""
        arrivals = iter(requests)
        self._arrive(arrivals)
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), action))

    def _arrive(self, arrivals: "itertools.Iterator[Request]") -> None:
        request = next(arrivals, None)
        if request is None:
            return

        def arrived() -> None:
            self._queue.append(request)
            self._dispatch()
            self._arrive(arrivals)

        self._at(request.arrival, arrived)

    def _dispatch(self) -> None:
        """In order, as the router's queue: one that has to wait holds up those behind it."""
        while self._queue and self._place(self._queue[0]):
            self._queue.popleft()

    def _place(self, request: Request) -> bool:
        asked = RouteRequest(request.num_prompt, prompt=request, session=request.session)
        route = self._policy.choose(asked, self._view)
        if route is None:
            return False
        assert route.prefill is not None
        self._policy.placed(asked, route)
        request.forget_ids()
        pod = self._prefill_of[route.prefill]
        placement = Placement(
            pod, self._decode_of[route.decode], asked, route, self._costs, lambda: None, lambda: self.now
        )
        pod.waiting.append((request, placement))
        self._work(pod)
        return True

    def _work(self, pod: PrefillPod) -> None:
        if pod.idle_with_work:
            self._at(pod.begin(), lambda: self._finish(pod))
        if self._reports and not pod.reporting:
            pod.reporting = True
            self._at(self.now + self._profile.status_seconds, lambda: self._report(pod))

    def _finish(self, pod: PrefillPod) -> None:
        request, placement, stored, removed = pod.finish()
        if self._events:
            self._at(self.now + self._profile.event_seconds, lambda: self._tell(pod, stored, removed))
        transfer = request.num_prompt * self._profile.transfer_seconds_per_token
        self._at(self.now + transfer, placement.pushed)
        decoding = transfer + request.num_output * self._profile.decode_seconds_per_token
        self._at(self.now + decoding, placement.release)
        self._work(pod)
        self._dispatch()

    def _tell(self, pod: PrefillPod, stored: list[BlockId], removed: list[BlockId]) -> None:
        self._index.stored(pod.load.pod_id, stored)
        self._index.removed(pod.load.pod_id, removed)

    def _report(self, pod: PrefillPod) -> None:
        was_startable = pod.load.startable
        pod.report()
        pod.reporting = pod.busy
        if pod.busy:
            self._at(self.now + self._profile.status_seconds, lambda: self._report(pod))
        if pod.load.startable and not was_startable:
            self._dispatch()
