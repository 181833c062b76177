"""Puts requests on pods: the policy's answer on the pods of now, or a wait in the queue."""

from kvrelay.common.access import PodAccess
from kvrelay.common.ids import RouterId
from kvrelay.router.placement import Placement
from kvrelay.router.pods import Pod
from kvrelay.router.policy import Policy, RouteRequest
from kvrelay.router.pool import Directory, Pods
from kvrelay.router.queue import Queue


class Dispatcher:
    """Owns pods and queue."""

    def __init__(
        self,
        policy: Policy,
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
        self._policy = policy
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
        route = self._policy.choose(request, self.pods.view)
        prefill = self.pods[route.prefill] if route is not None and route.prefill is not None else None
        return Placement(prefill, decode, request, self.queue.dispatch)

    def _claim(self, request: RouteRequest) -> Placement | None:
        route = self._policy.choose(request, self.pods.view)
        if route is None:
            return None
        prefill = self.pods[route.prefill] if route.prefill is not None else None
        return Placement(prefill, self.pods[route.decode], request, self.queue.dispatch)
