"""Puts requests on pods: the policy's answer on the pods of now, or a wait in the queue."""

from kvrelay.common.access import PodAccess
from kvrelay.common.ids import RouterId
from kvrelay.router.costs import Costs
from kvrelay.router.placement import Placement
from kvrelay.router.pods import Pod
from kvrelay.router.policy import Policy, Route, RouteRequest
from kvrelay.router.pool import Directory, Pods
from kvrelay.router.queue import Queue


class Dispatcher:
    """Owns pods and queue."""

    def __init__(
        self,
        policy: Policy,
        costs: Costs,
        directory: Directory,
        router_id: RouterId,
        access: PodAccess,
        *,
        tokenizer: str,
        max_waiting: int,
        patience_seconds: float,
    ) -> None:
        self.queue = Queue(self._claim, max_waiting=max_waiting)
        self.pods = Pods(directory, router_id, access, self.queue.dispatch, tokenizer=tokenizer)
        self.reads_prompts = policy.reads_prompts
        self._policy = policy
        self._costs = costs
        self._patience_seconds = patience_seconds

    async def start(self) -> None:
        await self.pods.start()

    async def close(self) -> None:
        self.queue.close()
        await self.pods.close()

    async def place(self, request: RouteRequest, *, priority: int, readmitted: bool) -> Placement:
        """Waits for room. Raises Overloaded where too many wait already, Unavailable where no pod lives for a while."""
        return await self.queue.place(
            request,
            priority=priority,
            readmitted=readmitted,
            serving=lambda: bool(self.pods.decoding(request.group)),
            patience_seconds=self._patience_seconds,
        )

    def beside(self, decode: Pod, request: RouteRequest) -> Placement:
        """With `request.decode` kept. It waits for no prefill pod: where none can start now, the decode pod computes."""
        return self._placement(
            decode, request, self._policy.choose(request, self.pods.view) or Route(None, decode.load)
        )

    def _claim(self, request: RouteRequest) -> Placement | None:
        route = self._policy.choose(request, self.pods.view)
        if route is None:
            return None
        return self._placement(self.pods[route.decode], request, route)

    def _placement(self, decode: Pod, request: RouteRequest, route: Route) -> Placement:
        prefill = self.pods[route.prefill] if route.prefill is not None else None
        self._policy.placed(request, route)
        return Placement(prefill, decode, request, route, self._costs, self.queue.dispatch)
