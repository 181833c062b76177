"""Prefill and decode pods in virtual time.

The router's queue is one: a prompt goes to the prefill pod that is free first, a sequence to the decode pod that has the fewest.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvrelay.cli.plan.demand import Request
from kvrelay.cli.plan.profile import Profile


class Served(NamedTuple):
    ttft: float
    """Seconds from the arrival to the first token."""
    tpot: float
    """Seconds a token after the first, the wait for a place on a decode pod with them; 0 where there is one token."""


class Load(NamedTuple):
    """Of all pods of a kind, over the time from the first arrival to the last end."""

    busy: float
    """Share of the time."""
    sequences: float
    """Of a decode pod, on average while it has any."""
    kv_tokens: float
    """The same."""


def prefill(requests: Sequence[Request], profile: Profile, num_pods: int) -> tuple[list[float], float]:
    """When each request's prompt is computed, and how busy the pods were."""
    free = [0.0] * num_pods
    computed, busy = [], 0.0
    for request in requests:
        seconds = profile.prefill_seconds(request.num_prompt, request.num_cached)
        end = max(request.arrival, heapq.heappop(free)) + seconds
        heapq.heappush(free, end)
        computed.append(end)
        busy += seconds
    return computed, busy / (num_pods * max(max(computed) - requests[0].arrival, 1e-9))


class _DecodePod:
    """All sequences get a token in each step, so they share one count of steps, and the next to end is the one with the lowest."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.now = 0.0
        self.steps = 0.0
        self.context = 0.0
        """Tokens of all sequences."""
        self.ends: list[tuple[float, int, int]] = []
        """(steps at its end, its number, tokens of its context then), a heap."""
        self.reserved = 0
        """KV tokens, of all sequences at their ends."""
        self.busy = self.sequence_seconds = self.token_seconds = 0.0

    def fits(self, num_tokens: int) -> bool:
        return not self.ends or (
            len(self.ends) < self._profile.max_sequences and self.reserved + num_tokens <= self._profile.max_kv_tokens
        )

    def add(self, number: int, num_prompt: int, num_steps: int) -> None:
        heapq.heappush(self.ends, (self.steps + num_steps, number, num_prompt + num_steps))
        self.reserved += num_prompt + num_steps
        self.context += num_prompt

    def next_end(self) -> float:
        """When the next sequence ends, if none is added."""
        return self.now + self._seconds(self.ends[0][0] - self.steps) if self.ends else math.inf

    def end_one(self) -> int:
        """The sequence that ends next, at `next_end`."""
        steps, number, context = heapq.heappop(self.ends)
        self._pass(self._seconds(steps - self.steps), steps - self.steps, len(self.ends) + 1)
        self.reserved -= context
        self.context -= context
        return number

    def advance(self, until: float) -> None:
        """To a time before `next_end`."""
        seconds = until - self.now
        if self.ends and seconds > 0:
            # `_seconds` solved for the steps, of which each is a little longer than the one before.
            step = self._profile.step_seconds(len(self.ends), self.context)
            growth = self._profile.step_seconds_per_context_token * len(self.ends)
            steps = seconds / step if not growth else (math.sqrt(step**2 + 2 * growth * seconds) - step) / growth
            self._pass(seconds, steps, len(self.ends))
        self.now = max(self.now, until)

    def _pass(self, seconds: float, steps: float, count: int) -> None:
        self.now += seconds
        self.steps += steps
        self.busy += seconds
        self.sequence_seconds += seconds * count
        self.token_seconds += seconds * (self.context + steps * count / 2)
        self.context += steps * count

    def _seconds(self, steps: float) -> float:
        count = len(self.ends)
        step = self._profile.step_seconds(count, self.context)
        return steps * step + self._profile.step_seconds_per_context_token * count * steps**2 / 2


def decode(
    requests: Sequence[Request], computed: Sequence[float], profile: Profile, num_pods: int
) -> tuple[list[Served], Load]:
    """`computed`: when the first tokens are there."""
    pods = [_DecodePod(profile) for _ in range(num_pods)]
    order = sorted(range(len(requests)), key=computed.__getitem__)
    arrivals = deque(
        (computed[i] + requests[i].num_prompt * profile.transfer_seconds_per_token, i)
        for i in order
        if requests[i].num_output > 1
    )
    waiting: deque[int] = deque()
    ends = dict(zip(order, (computed[i] for i in order), strict=True))

    def admit() -> None:
        while waiting:
            request = requests[waiting[0]]
            num_tokens = request.num_prompt + request.num_output - 1
            pod = min((pod for pod in pods if pod.fits(num_tokens)), key=lambda pod: len(pod.ends), default=None)
            if pod is None:
                return
            pod.advance(now)
            pod.add(waiting.popleft(), request.num_prompt, request.num_output - 1)

    while arrivals or any(pod.ends for pod in pods):
        first = min(pods, key=_DecodePod.next_end)
        end = first.next_end()
        if arrivals and arrivals[0][0] <= end:
            now, number = arrivals.popleft()
            waiting.append(number)
        else:
            now = end
            ends[first.end_one()] = now
        admit()

    served = [
        Served(
            first - request.arrival,
            (ends[i] - first) / (request.num_output - 1) if request.num_output > 1 else 0.0,
        )
        for i, (request, first) in enumerate(zip(requests, computed, strict=True))
    ]
    span = max(max(ends.values()) - requests[0].arrival, 1e-9)
    busy = sum(pod.busy for pod in pods)
    return served, Load(
        busy / (num_pods * span),
        sum(pod.sequence_seconds for pod in pods) / max(busy, 1e-9),
        sum(pod.token_seconds for pod in pods) / max(busy, 1e-9),
    )
