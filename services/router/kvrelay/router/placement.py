"""A request's place: its pods, its claim on their loads, what happened there when, and what it teaches of costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.router.costs import Costs
from kvrelay.router.pods import Pod
from kvrelay.router.policy import Route, RouteRequest


@dataclass(slots=True)
class Times:
    """When what happened at a place, on the clock of `time.monotonic`; None: not yet, or never. Outlives the place."""

    prefill: str
    """The pod's id; empty: the decode pod computes the prompt."""
    decode: str
    placed: float
    computed: float | None = None
    """The prompt; its first token is sampled."""
    decoding: float | None = None
    """The decode pod has the whole prompt."""
    released: float | None = None


class Placement:
    """Counts in the loads of its pods from now until `release`, which its one owner calls, once.

    `prefill` None: the decode pod computes the prompt itself.
    """

    def __init__(
        self,
        prefill: Pod | None,
        decode: Pod,
        request: RouteRequest,
        route: Route,
        costs: Costs,
        on_release: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.num_predicted_tokens = route.num_cached_tokens
        """That were believed to be cached."""
        self._tokens = request.num_prompt_tokens
        self._to_compute = self._tokens - route.num_cached_tokens
        self._seconds = route.seconds
        self._computing: Pod | None = prefill or decode
        self._costs = costs
        self._on_release = on_release
        self._clock = clock
        self._kv_tokens = self._tokens + request.num_choices
        self._begun_tokens = self._tokens if prefill is not None else self._kv_tokens
        self._started: tuple[float, int] | None = None
        """When, and after how many cached tokens."""
        self._computed_at = 0.0
        self.times = Times(prefill.load.pod_id if prefill is not None else "", decode.load.pod_id, clock())
        if prefill is None and not decode.load.computes:
            # It starts at once: what it takes can be told from when it is done.
            self._started = (self._clock(), 0)
        if prefill is not None:
            prefill.load.begin(self._to_compute, self._tokens, self._seconds)
            decode.load.begin(0, self._kv_tokens)
        else:
            decode.load.begin(self._to_compute, self._kv_tokens, self._seconds)

    def prefill_started(self, num_cached_tokens: int) -> None:
        """On the prefill pod."""
        self._started = (self._clock(), num_cached_tokens)

    def first_token(self) -> None:
        """By the prefill pod."""
        if self._started is not None and self.prefill is not None and self._computing is not None:
            self._computed_at = self._clock()
            self._measured(self.prefill, *self._started)
        self.prefill_done()

    def computed_here(self, num_cached_tokens: int) -> None:
        """By the decode pod, all but so many tokens."""
        if self._started is not None and self.prefill is None and self._computing is not None:
            self._measured(self.decode, self._started[0], num_cached_tokens)
        self.prefill_done()

    def _measured(self, pod: Pod, started: float, num_cached: int) -> None:
        self._costs.prefilled(pod.load, self._tokens - num_cached, num_cached, self._clock() - started)

    def pushed(self) -> None:
        """All of it is on the decode pod."""
        if self._computed_at:
            self._costs.transferred(self._tokens, self._clock() - self._computed_at)
        self._note_decoding()

    def decoded(self) -> None:
        """The decode pod streams: once, or more often."""
        self.prefill_done()
        self._note_decoding()

    def _note_decoding(self) -> None:
        if self.times.decoding is None:
            self.times.decoding = self._clock()

    def prefill_done(self) -> None:
        """The prompt is computed, or never will be."""
        if self._computing is not None:
            if self.times.released is None:
                self.times.computed = self._clock()
            self._computing.load.computed(self._to_compute, self._begun_tokens, self._seconds)
            self._computing = None
            if self.prefill is not None:
                self.prefill.load.end(self._tokens)

    def release(self) -> None:
        self.times.released = self._clock()
        self.prefill_done()
        self.decode.load.end(self._kv_tokens)
        self._on_release()
