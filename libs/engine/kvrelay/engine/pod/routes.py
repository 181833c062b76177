"""Which of an engine's outputs goes to which open stream.

engine.outputs() ──▶ Routes ──▶ one outbox a router     all of a decode step's tokens for its requests, in one message
                           ├──▶ one outbox a prefill    the events of that request
                           └──▶ the log of KV events
"""

import asyncio
import dataclasses
import logging

from kvrelay.common.errors import Cancelled, KvrelayError, Unavailable, error_from
from kvrelay.common.ids import RequestId, RouterId
from kvrelay.common.pod.state import PodState
from kvrelay.common.request import ChoiceDelta, EngineRequest, FinishReason, PositionLogprobs
from kvrelay.engine import messages as m
from kvrelay.engine.api import EngineClient
from kvrelay.engine.pod import steps
from kvrelay.engine.pod.counters import Counters
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.engine.pod.outbox import Outbox
from kvrelay.engine.pod.tracing import Traces
from kvrelay.v1 import decode_pb2, prefill_pb2

log = logging.getLogger(__name__)

ROUTER_GRACE_SECONDS = 2.0
"""Between a router's streams; after it the router counts as gone."""
MAX_STEPS_BEHIND = 1024
MAX_EVENTS_BEHIND = 16

Steps = Outbox[decode_pb2.StepTokens]
Events = Outbox[prefill_pb2.PrefillEvent]


@dataclasses.dataclass(slots=True, eq=False)
class PrefillRoute:
    request_id: RequestId
    attempt: int
    events: Events
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


@dataclasses.dataclass(slots=True, eq=False)
class RouterRoute:
    """`timer` runs while no stream is open."""

    steps: Steps
    timer: asyncio.TimerHandle | None = None


@dataclasses.dataclass(slots=True, eq=False)
class Owned:
    """A request that a router reserved here, until its last choice ends. `lengths`: the next index of each open choice."""

    router_id: RouterId
    attempt: int
    lengths: dict[int, int]


class Routes:
    """Owned by the pod; `run` is the one consumer of the engine's outputs."""

    def __init__(self, engine: EngineClient, state: PodState, events: EventLog, traces: Traces) -> None:
        self.counters = Counters()
        self._engine = engine
        self._state = state
        self._events = events
        self._traces = traces
        self._prefills: dict[RequestId, PrefillRoute] = {}
        self._routers: dict[RouterId, RouterRoute] = {}
        self._owned: dict[RequestId, Owned] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Some request has not ended."""
        return bool(self._prefills or self._owned)

    @property
    def num_routers(self) -> int:
        return len(self._routers)

    async def run(self) -> None:
        """Until the engine's outputs end: then every stream ends with Unavailable."""
        async for output in self._engine.outputs():
            self._dispatch(output)
            self._events.take(output.cache)
            self._state.touch()
        self.fail(Unavailable("the engine process is gone"))

    def fail(self, error: KvrelayError) -> None:
        """Ends every open stream."""
        for prefill in self._prefills.values():
            prefill.events.fail(error)
        for router in self._routers.values():
            router.steps.fail(error)
            if router.timer is not None:
                router.timer.cancel()
        self._owned.clear()

    # Prefill calls.

    def open_prefill(self, request_id: RequestId, attempt: int) -> PrefillRoute:
        """A call that is still open for the request makes way."""
        known = self._prefills.pop(request_id, None)
        if known is not None:
            known.events.fail(Cancelled("the request was sent again"))
        route = PrefillRoute(request_id, attempt, Outbox(MAX_EVENTS_BEHIND))
        self._prefills[request_id] = route
        return route

    def close_prefill(self, route: PrefillRoute) -> bool:
        """True where the request had not ended, and no other call has taken it over: it must be aborted."""
        if self._prefills.get(route.request_id) is not route:
            return False
        del self._prefills[route.request_id]
        self._state.touch()
        return True

    # Routers and their requests.

    def own(self, request: EngineRequest, attempt: int, router_id: RouterId) -> Owned | None:
        """From now on the router hears of the request. Returns who did before, for `give_back`."""
        self._router(router_id)
        known = self._owned.get(request.request_id)
        if known is not None and (known.router_id, known.attempt) == (router_id, attempt):
            return known
        lengths = dict.fromkeys(range(request.sampling.n), 0)
        for resumed in request.resume:
            lengths[resumed.choice] = len(resumed.token_ids)
            if resumed.finished:
                del lengths[resumed.choice]
        self._owned[request.request_id] = Owned(router_id, attempt, lengths)
        return known

    def give_back(self, request_id: RequestId, former: Owned | None) -> None:
        """The reservation was refused."""
        self._owned.pop(request_id, None)
        if former is not None and former.router_id in self._routers:
            self._owned[request_id] = former

    def disown(self, request_id: RequestId) -> None:
        self._owned.pop(request_id, None)
        self._state.touch()

    def disown_choice(self, request_id: RequestId, choice: int) -> None:
        owned = self._owned.get(request_id)
        if owned is not None:
            self._close(request_id, owned, choice)
            self._state.touch()

    def open_stream(self, router_id: RouterId) -> Steps:
        """The router's former stream ends; what waited there waits here."""
        route = self._router(router_id)
        former, route.steps = route.steps, Outbox(MAX_STEPS_BEHIND)
        former.move_to(route.steps)
        former.fail(Cancelled("another stream of this router took over"))
        if route.timer is not None:
            route.timer.cancel()
            route.timer = None
        return route.steps

    def close_stream(self, router_id: RouterId, stream: Steps) -> None:
        """The router has a short time to open another one, unless it was too slow for this one."""
        route = self._routers.get(router_id)
        if route is None or route.steps is not stream:
            return
        if stream.ended:
            self._lose(router_id)
        else:
            self._start_timer(router_id, route)

    def _router(self, router_id: RouterId) -> RouterRoute:
        route = self._routers.get(router_id)
        if route is None:
            route = self._routers[router_id] = RouterRoute(Outbox(MAX_STEPS_BEHIND))
            self._start_timer(router_id, route)
        return route

    def _start_timer(self, router_id: RouterId, route: RouterRoute) -> None:
        loop = asyncio.get_running_loop()
        route.timer = loop.call_later(ROUTER_GRACE_SECONDS, self._lose, router_id)

    def _lose(self, router_id: RouterId) -> None:
        route = self._routers.pop(router_id)
        if route.timer is not None:
            route.timer.cancel()
        requests = [request_id for request_id, owned in self._owned.items() if owned.router_id == router_id]
        for request_id in requests:
            del self._owned[request_id]
        if requests:
            self.counters.lost_routers += 1
            log.warning("router %s is gone: aborting its %d requests", router_id, len(requests))
        task = asyncio.create_task(self._abort_router(router_id), name=f"abort-{router_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        self._state.touch()

    async def _abort_router(self, router_id: RouterId) -> None:
        try:
            await self._engine.abort_router(router_id)
        except Unavailable:
            log.debug("no engine is left to abort the requests of router %s", router_id)

    # Outputs.

    def _dispatch(self, output: m.StepOutput) -> None:
        deltas: dict[RouterId, list[ChoiceDelta]] = {}
        notices: dict[RouterId, list[m.Notice]] = {}
        first: dict[RequestId, list[ChoiceDelta]] = {}
        for notice in output.notices:
            self.counters.note(notice.kind)
            if isinstance(notice.kind, m.Timeline):
                self._traces.take(notice.request_id, notice.attempt, notice.kind)
                continue
            owned = self._owned.get(notice.request_id)
            if owned is not None and notice.attempt == owned.attempt:
                if isinstance(notice.kind, m.RequestFailed):
                    deltas.setdefault(owned.router_id, []).extend(self._failed(notice.request_id, owned, notice.kind))
                else:
                    notices.setdefault(owned.router_id, []).append(notice)
        for delta in output.deltas:
            owned, prefill = self._owned.get(delta.request_id), self._prefills.get(delta.request_id)
            if owned is not None and delta.attempt == owned.attempt and delta.choice in owned.lengths:
                deltas.setdefault(owned.router_id, []).append(delta)
                self._follow(owned, delta)
            elif prefill is not None and delta.attempt == prefill.attempt:
                first.setdefault(delta.request_id, []).append(delta)
            else:
                self.counters.dropped_deltas += 1
        for router_id in deltas.keys() | notices.keys():
            self._send_step(router_id, steps.step_to_proto(deltas.get(router_id, ()), notices.get(router_id, ())))
        self._dispatch_prefills(output.notices, first)

    def _follow(self, owned: Owned, delta: ChoiceDelta) -> None:
        owned.lengths[delta.choice] = delta.index + len(delta.token_ids)
        if delta.finish_reason is not None:
            self._close(delta.request_id, owned, delta.choice)

    def _close(self, request_id: RequestId, owned: Owned, choice: int) -> None:
        owned.lengths.pop(choice, None)
        if not owned.lengths:
            self._owned.pop(request_id, None)

    def _failed(self, request_id: RequestId, owned: Owned, failure: m.RequestFailed) -> list[ChoiceDelta]:
        """The end of every choice that was still open."""
        self._owned.pop(request_id, None)
        return [
            ChoiceDelta(
                request_id=request_id,
                choice=choice,
                index=length,
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=f"{failure.code}: {failure.message}",
                attempt=owned.attempt,
            )
            for choice, length in owned.lengths.items()
        ]

    def _send_step(self, router_id: RouterId, step: decode_pb2.StepTokens) -> None:
        route = self._routers.get(router_id)
        if route is not None and not route.steps.put(step):
            self.counters.slow_streams += 1
            self._lose(router_id)

    def _dispatch_prefills(self, notices: tuple[m.Notice, ...], first: dict[RequestId, list[ChoiceDelta]]) -> None:
        """Of one request and step in this order: started, first tokens, the push's end."""
        mine = [
            (route, notice.kind)
            for notice in notices
            if (route := self._prefills.get(notice.request_id)) is not None and notice.attempt in (0, route.attempt)
        ]
        for route, kind in mine:
            if isinstance(kind, m.PrefillStarted):
                self._send_event(route, steps.started_to_proto(kind.num_cached_tokens))
            elif isinstance(kind, m.PromptComputed):
                route.prompt_logprobs = kind.prompt_logprobs
        for request_id, deltas in first.items():
            route = self._prefills[request_id]
            self._send_event(route, steps.first_to_proto(deltas, route.prompt_logprobs))
        for route, kind in mine:
            if isinstance(kind, m.PushCompleted):
                self._send_event(route, steps.completed_to_proto(kind))
                self._end_prefill(route)
            elif isinstance(kind, m.PushFailed | m.RequestFailed):
                self._end_prefill(route, error_from(kind.code, kind.message))

    def _send_event(self, route: PrefillRoute, event: prefill_pb2.PrefillEvent) -> None:
        if not route.events.put(event):
            self.counters.slow_streams += 1

    def _end_prefill(self, route: PrefillRoute, error: KvrelayError | None = None) -> None:
        route.events.end(error)
        self._prefills.pop(route.request_id, None)
