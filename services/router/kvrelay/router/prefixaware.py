"""Routing by what a request will cost where: seconds until its first token, prefixes that pods have taken into account.

    on a prefill pod    its queue  +  computing what it has not got of the prompt
    on a decode pod     moving what it has not got  +  what one more request costs those that it streams
    or                  the decode pod's own queue  +  computing the rest there, which holds up its streams

What pods have is what their events said, and what this router has just sent them (`kvrelay.router.expected`). Where nothing is
known of prefixes, what is left is load: the pods with the shortest queues.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvrelay.common.blocks import SPAN
from kvrelay.router.board import Board, Group, among
from kvrelay.router.costs import Costs, Floats
from kvrelay.router.expected import Expected
from kvrelay.router.load import (
    BACKLOG,
    BEGUN,
    BEGUN_AT,
    FREE_AT,
    MEMORY_SECONDS,
    REQUESTS,
    ROOM,
    SLOWNESS,
    STARTABLE,
    Load,
)
from kvrelay.router.policy import PodsView, Route, RouteRequest
from kvrelay.router.prefixindex import PrefixIndex


@dataclass(frozen=True, slots=True)
class Weights:
    """Found with `benchmarks.sim`, docs/design/routing.md."""

    computing: float = 4.0
    """A second of computing, to a second of waiting: the pod is lost to others for as long."""
    evenness: float = 12.0
    """Times the whole prompt's computing, for a pod that computed all of the last minute, to one that was idle."""
    decode_request_seconds: float = 0.02
    """What one more request costs those that a decode pod streams, all of their tokens together."""
    disturbance: float = 0.25
    """Of the time of a prompt on a decode pod, for each request that it streams."""
    longest_wait_seconds: float = 10.0
    """For which a prefix is worth queueing behind a pod that can start nothing soon."""
    event_lag_seconds: float = 2.0
    """After a prompt is computed, until when events have told of it."""


DEFAULT_WEIGHTS: Final = Weights()


@dataclass(frozen=True, slots=True)
class _Option:
    """What one group offers."""

    cost: float
    route: Route


class PrefixAware:
    """`index` is fed by whoever reads the KV events; `costs` by the requests that went by."""

    reads_prompts: Final = True

    def __init__(
        self,
        local_prefill_tokens: int,
        index: PrefixIndex,
        costs: Costs,
        *,
        weights: Weights = DEFAULT_WEIGHTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local_prefill_tokens = local_prefill_tokens
        self._index = index
        self._costs = costs
        self._weights = weights
        self._clock = clock
        self._expected = Expected()
        self._board = Board(PodsView(), index, self._expected)

    def choose(self, request: RouteRequest, pods: PodsView) -> Route | None:
        if not self._board.stands(pods):
            self._board = Board(pods, self._index, self._expected)
        wanted = request.decode.group if request.decode is not None else request.group
        now = self._clock()
        options = [
            option
            for number, group in self._board.groups.items()
            if wanted in (None, number) and (option := self._best(request, group, now)) is not None
        ]
        return min(options, key=lambda option: option.cost).route if options else None

    def placed(self, request: RouteRequest, route: Route) -> None:
        """Until events tell of it, the pod that computes the prompt is expected to have it: who comes after finds it there. A
        pod that it is pushed to has it only after the push."""
        if request.prompt is not None:
            ids = request.prompt.ids(route.decode.fingerprint)
            weights = self._weights
            until = self._clock() + route.seconds + weights.longest_wait_seconds + weights.event_lag_seconds
            self._expected.add((route.prefill or route.decode).pod_id, ids, until)

    def _best(self, request: RouteRequest, group: Group, now: float) -> _Option | None:
        ids = request.prompt.ids(group.fingerprint) if request.prompt is not None else ()
        hits = group.hits(self._index.hits(ids), self._expected.hits(ids, now))
        if len(ids) * SPAN >= request.num_prompt_tokens:
            hits = np.minimum(hits, request.num_prompt_tokens - 1)  # the last token is always computed
        wait = np.maximum(np.maximum(group.values[FREE_AT] - now, group.values[BACKLOG]), 0.0)
        computing = self._computing(request, group.values, wait, hits, now)
        split = group.split
        prefill, apart = self._prefill(request, group, computing[:split], wait[:split], hits[:split])
        on_decode = hits[split:]
        moved = apart + (request.num_prompt_tokens - on_decode) * self._costs.transfer
        local = self._local(request, group, computing[split:], on_decode)
        requests = group.values[REQUESTS, split:]
        cost = np.minimum(moved, local) + requests * self._weights.decode_request_seconds
        row = self._row(request, group, cost)
        if row is None or not math.isfinite(cost[row]):
            return None
        if prefill is None or local[row] <= moved[row]:
            route = self._route(request, None, group.decode[row], int(on_decode[row]))
        else:
            route = self._route(request, group.prefill[prefill], group.decode[row], int(hits[prefill]))
        return _Option(float(cost[row]), route)

    def _computing(self, request: RouteRequest, values: Floats, wait: Floats, hits: Floats, now: float) -> Floats:
        """The costs of computing on each pod what is not a hit there, after all that it has to compute already."""
        weights = self._weights
        rest = self._costs.seconds_by_pod(request.num_prompt_tokens - hits, hits, values[SLOWNESS])
        age = np.minimum(1.0, (now - values[BEGUN_AT]) / MEMORY_SECONDS)
        evenness = weights.evenness * self._costs.seconds(request.num_prompt_tokens, 0) / MEMORY_SECONDS
        cost: Floats = wait + weights.computing * rest + evenness * values[BEGUN] * (1.0 - age)
        return cost

    def _prefill(
        self, request: RouteRequest, group: Group, computing: Floats, wait: Floats, hits: Floats
    ) -> tuple[int | None, float]:
        """The cheapest prefill pod's row, and its cost; infinite where none is to be had now."""
        if not group.prefill:
            return None, math.inf
        cost = computing
        startable = group.values[STARTABLE, : group.split] > 0
        if not startable.all():
            longest = self._weights.longest_wait_seconds
            worth_a_queue = (2 * hits >= request.num_prompt_tokens) & (wait <= longest)
            cost = np.where(startable | worth_a_queue, cost, math.inf)
        if request.excluded:
            cost = np.where(among(group.prefill, request.excluded), math.inf, cost)
        row = int(cost.argmin())
        return (row, float(cost[row])) if math.isfinite(cost[row]) else (None, math.inf)

    def _local(self, request: RouteRequest, group: Group, computing: Floats, hits: Floats) -> Floats:
        """What it costs that each decode pod computes the prompt itself; infinitely much where it should not."""
        cost: Floats = computing * (1.0 + self._weights.disturbance * group.values[REQUESTS, group.split :])
        living = any(pod not in request.excluded for pod in group.prefill)
        if living and request.num_prompt_tokens >= self._local_prefill_tokens:
            # Half of it must be there: a pod without a prefix leaves prompts to those whose part they are.
            able = (2 * hits >= request.num_prompt_tokens) | group.self_sufficient
            cost = np.where(able, cost, math.inf)
        return cost

    def _row(self, request: RouteRequest, group: Group, cost: Floats) -> int | None:
        """Of the cheapest decode pod with room."""
        if request.decode is not None:
            return next((row for row, load in enumerate(group.decode) if load is request.decode), None)
        room = group.values[ROOM, group.split :]
        need = request.num_prompt_tokens + request.num_choices
        able = room >= need
        if not able.any():
            # Several choices may need more than any pod has: the largest one takes them when it is empty, and preempts.
            able = room >= min(need, max(load.num_tokens for load in group.decode))
        if request.excluded:
            fresh = able & ~among(group.decode, request.excluded)
            able = fresh if fresh.any() else able
        if not able.any():
            return None
        return int(np.where(able, cost, math.inf).argmin())

    def _route(self, request: RouteRequest, prefill: Load | None, decode: Load, num_cached: int) -> Route:
        computing = prefill or decode
        seconds = self._costs.seconds(request.num_prompt_tokens - num_cached, num_cached, computing.slowness)
        return Route(prefill, decode, num_cached, seconds)
