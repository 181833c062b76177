"""The router's metrics: `kvrelay_router_*`, and under vLLM's names what existing dashboards look for."""

import functools
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvrelay.common.errors import BY_CODE, KvrelayError
from kvrelay.common.request import ChoiceDelta, FinishReason
from kvrelay.common.tracing import NO_SPAN, Span
from kvrelay.router.console.timeline import Record
from kvrelay.router.job import ChoiceEvent, Event, PreparedRequest, PromptEvent, UsageEvent
from kvrelay.router.placement import Placement
from kvrelay.router.recovery import Culprit

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_BETWEEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class Metrics:
    """One a router, in the registry that `/metrics` shows."""

    def __init__(self, registry: CollectorRegistry, model: str, policy: str = "") -> None:
        self._policy = policy
        self.registry = registry
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=registry)

        self._requests = Counter(
            "kvrelay_router_requests", "Requests that ended, by error code or ok", ["status"], registry=registry
        )
        self._retries = Counter(
            "kvrelay_router_retries", "Attempts that failed and were followed by another", ["reason"], registry=registry
        )
        self._stale = Counter(
            "kvrelay_router_stale_tokens", "Tokens of attempts that were given up, not taken", registry=registry
        )
        self._ended = functools.cache(self._requests.labels)
        for status in ("ok", *BY_CODE):
            self._ended(status)  # an error's first occurrence is an increase as well
        for culprit in Culprit:
            self._retries.labels(culprit.value)
        self._decisions = Counter(
            "kvrelay_router_decisions",
            "Choices of pods, by policy and by the part that computes the prompt",
            ["policy", "prefill"],
            registry=registry,
        )
        self._predicted = Counter(
            "kvrelay_router_predicted_cached_tokens",
            "Prompt tokens of finished requests that the policy believed to be cached where it sent them",
            registry=registry,
        )
        self._mispredicted = Counter(
            "kvrelay_router_mispredicted_tokens",
            "Of those, the ones that were not; and cached ones that it did not know of",
            ["kind"],
            registry=registry,
        )
        success = Counter(
            "vllm:request_success", "Choices that finished", ["model_name", "finished_reason"], registry=registry
        )
        self._finished = functools.cache(lambda reason: success.labels(model, reason))
        for reason in FinishReason:
            self._finished(reason)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens sent to clients")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens that no pod computed")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token").labels(
            model
        )
        self.between = histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a choice", _BETWEEN_SECONDS
        ).labels(model)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token").labels(model)
        self.queued = histogram("vllm:request_queue_time_seconds", "From arrival to the choice of pods").labels(model)
        self.prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the choice of pods to the first token"
        ).labels(model)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last").labels(model)
        self._prompt_length = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", _TOKENS).labels(
            model
        )
        self._output_length = histogram(
            "vllm:request_generation_tokens", "Tokens of a request's choices together", _TOKENS
        ).labels(model)
        self._running = Gauge(
            "vllm:num_requests_running", "Requests that are not finished", ["model_name"], registry=registry
        ).labels(model)
        self._waiting = Gauge(
            "vllm:num_requests_waiting", "Requests in the router's queue", ["model_name"], registry=registry
        ).labels(model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def watch(
        self,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
        num_pods: Mapping[str, Callable[[], int]],
        *,
        max_waiting: int,
    ) -> None:
        """Asked whenever the metrics are read; `num_pods`: the usable ones, by role."""

        def gauge(name: str, text: str, source: Callable[[], int]) -> None:
            Gauge(name, text, registry=self.registry).set_function(source)

        self._running.set_function(num_running)
        self._waiting.set_function(num_waiting)
        # Pods have the same under vLLM's names: by these the router's alone can be asked for.
        gauge("kvrelay_router_running", "Requests that are not finished, waiting ones included", num_running)
        gauge("kvrelay_router_waiting", "Requests in the queue", num_waiting)
        gauge("kvrelay_router_queue_limit", "Requests that may wait; more are refused", lambda: max_waiting)
        pods = Gauge("kvrelay_router_pods", "Pods that this router can use", ["role"], registry=self.registry)
        for role, source in num_pods.items():
            pods.labels(role).set_function(source)

    def count_retry(self, culprit: Culprit) -> None:
        self._retries.labels(culprit.value).inc()

    def count_stale(self, num_tokens: int) -> None:
        self._stale.inc(num_tokens)

    def count_end(self, status: str) -> None:
        self._ended(status).inc()

    def count_choice(self, reason: FinishReason) -> None:
        self._finished(reason).inc()

    def count_tokens(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def count_decision(self, place: Placement) -> None:
        self._decisions.labels(self._policy, "decode" if place.prefill is None else "prefill").inc()

    def count_prediction(self, predicted: int, actual: int) -> None:
        """Tokens of one request."""
        self._predicted.inc(predicted)
        self._mispredicted.labels("missing").inc(max(0, predicted - actual))
        self._mispredicted.labels("unknown").inc(max(0, actual - predicted))

    def count_usage(self, usage: UsageEvent) -> None:
        self._prompt_length.observe(usage.prompt_tokens)
        self._output_length.observe(usage.completion_tokens)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)


class Observer:
    """Sees one request go by."""

    def __init__(self, metrics: Metrics, prepared: PreparedRequest, record: Record, span: Span = NO_SPAN) -> None:
        self.span = span
        """Of the whole request."""
        self._metrics = metrics
        self._record = record
        self._arrival = prepared.arrival
        self._placed_at = 0.0
        self._first_at = 0.0
        self._predicted = 0
        self._last: dict[int, float] = {}
        """Of each choice: when its last token passed."""
        self.status = "cancelled"
        """Unless something else becomes of it: its client leaves."""
        self._error: KvrelayError | None = None

    def placed(self, place: Placement) -> None:
        self._record.placed(place.times)
        self._metrics.count_decision(place)
        self._predicted = place.num_predicted_tokens
        if not self._placed_at:
            self._placed_at = time.monotonic()
            self._metrics.queued.observe(self._placed_at - self._arrival)

    def retried(self, culprit: Culprit) -> None:
        self._metrics.count_retry(culprit)

    def ignored(self, delta: ChoiceDelta) -> None:
        """A pod spoke for an attempt that is over."""
        self._metrics.count_stale(len(delta.token_ids))

    def failed(self, error: KvrelayError) -> None:
        self.status = error.code
        self._error = error

    def ended(self) -> None:
        self._metrics.count_end(self.status)
        self._record.ended(self.status)
        self.span.note(status=self.status)
        self.span.end(self._error)

    def see(self, event: Event) -> None:
        match event:
            case ChoiceEvent():
                self._see_choice(event)
            case UsageEvent():
                self.status = "ok"
                self._metrics.count_usage(event)
                self.span.note(
                    gen_ai__usage__input_tokens=event.prompt_tokens,
                    gen_ai__usage__output_tokens=event.completion_tokens,
                    cached_tokens=event.cached_tokens,
                )
                self._metrics.count_prediction(self._predicted, event.cached_tokens)
                now = time.monotonic()
                self._metrics.whole.observe(now - self._arrival)
                if self._first_at:
                    self._metrics.decode.observe(now - self._first_at)
            case PromptEvent():
                pass

    def _see_choice(self, event: ChoiceEvent) -> None:
        now = time.monotonic()
        count = len(event.token_ids)
        if count:
            self._metrics.count_tokens(count)
            if not self._last:
                self._first_at = now
                self.span.event("first token")
                self._metrics.first_token.observe(now - self._arrival)
                self._metrics.prefill.observe(now - self._placed_at)
            last = self._last.get(event.choice)
            if last is not None:
                self._metrics.between.observe((now - last) / count)
            self._last[event.choice] = now
        if event.finish_reason is not None:
            self._metrics.count_choice(event.finish_reason)
