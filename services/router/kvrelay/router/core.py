"""The router: takes a request from a front, prepares it, runs it on pods, and hands its events back.

prepare:  validate ──▶ chat template ──▶ tokenize ──▶ bound by the model's length        no pod is touched
generate: queue ──▶ policy ──▶ attempts on pods ──▶ tokens once, in order ──▶ text        `kvrelay.router.attempt`
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator

from prometheus_client import CollectorRegistry

from kvrelay.common.errors import Cancelled, Draining, InvalidRequest, KvrelayError, ModelNotFound
from kvrelay.common.ids import Fingerprint, RequestId, RouterId
from kvrelay.common.logs import about
from kvrelay.common.telemetry import SpanCollector
from kvrelay.common.text import ChoiceText, StopPatterns
from kvrelay.common.tracing import Span, make_tracer
from kvrelay.router.attempt import Run
from kvrelay.router.background import Background
from kvrelay.router.console.state import Console, RouterRow
from kvrelay.router.console.timeline import NoTimeline, Timeline
from kvrelay.router.costs import Costs
from kvrelay.router.delivery import Delivery
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.entries import Entries
from kvrelay.router.job import Chat, Event, GenerateInput, ModelInfo, PreparedRequest, Readiness
from kvrelay.router.kvevents import EventReader, KvEventMetrics
from kvrelay.router.metrics import Metrics, Observer
from kvrelay.router.model import ServedModel
from kvrelay.router.policies import make_policy
from kvrelay.router.policy import PodsView
from kvrelay.router.pool import Directory
from kvrelay.router.prefixindex import PrefixIndex
from kvrelay.router.prepare import Preparer
from kvrelay.router.recovery import Retries
from kvrelay.router.settings import RouterSettings
from kvrelay.router.snapshots import Snapshots

log = logging.getLogger(__name__)

SERVICE = "kvrelay-router"
MAX_NAME_CHARS = 200
"""Of a client's own words in a message."""
INLINE_TOKENS = 1000
"""Fewer are decoded in less time than a thread takes to answer."""


class Router:
    """See `kvrelay.router.job.Inference`. `start` once, then anything in any number at once, `close` once."""

    def __init__(self, settings: RouterSettings, directory: Directory, registry: CollectorRegistry) -> None:
        """Raises Internal where the model's folder, or a certificate, cannot be read, and where OpenTelemetry is missing."""
        self.router_id = RouterId(f"router-{secrets.token_hex(6)}")
        self._model = ServedModel(settings.model, settings.model_name)
        self._policy_name = settings.policy
        self._created = int(time.time())
        self._info: ModelInfo | None = None
        """With `_info_of`, the pods that it is true of: asked for by each request."""
        self._info_of: PodsView | None = None
        self._preparer = Preparer(
            self._model.tokenizer,
            vocab_size=self._model.vocab_size,
            default_timeout_ms=settings.default_timeout_ms,
            max_timeout_ms=settings.max_timeout_ms,
        )
        self._entries = Entries(self._model.tokenizer)
        costs = Costs()
        self.index = PrefixIndex()
        """Of the pods' blocks; empty where the policy does not ask for it."""
        policy = make_policy(settings.policy, settings.local_prefill_tokens, self.index, costs)
        access = settings.pod_access()
        self._dispatcher = Dispatcher(
            policy,
            costs,
            directory,
            self.router_id,
            access,
            tokenizer=self._model.tokenizer_digest,
            max_waiting=settings.max_queue,
            patience_seconds=settings.unavailable_after_ms / 1000,
        )
        self._retries = Retries(settings.max_failures)
        self._background = Background()
        self._metrics = Metrics(registry, self._model.name, settings.policy)
        self._tracer = make_tracer(settings.otlp_endpoint, SERVICE, self.router_id, settings.trace_sample_ratio)
        registry.register(SpanCollector(self._tracer))
        self._runs: dict[RequestId, Run] = {}
        pods = self._dispatcher.pods
        self._metrics.watch(
            lambda: len(self._runs),
            lambda: len(self._dispatcher.queue),
            {"prefill": lambda: pods.view.num_prefill, "decode": lambda: len(pods.view.decode)},
            max_waiting=settings.max_queue,
        )
        self._kv_events: EventReader | None = None
        if policy.reads_prompts:
            self._kv_events = EventReader(
                settings.redis_url,
                settings.cluster,
                directory,
                self.index,
                Snapshots(access),
                KvEventMetrics(registry),
            )
        self._timeline = Timeline() if settings.console else NoTimeline()
        self.console: Console | None = None
        """None: not wanted."""
        if settings.console:
            self.console = Console(settings, access, self._dispatcher.pods, self._timeline, self._row)
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def start(self) -> None:
        await self._dispatcher.start()
        if self._kv_events is not None:
            self._kv_events.start()

    async def drain(self, timeout_seconds: float) -> None:
        """Takes no more; returns when the last request ended, or after the timeout."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()

    async def close(self) -> None:
        """Ends what still runs; bounded in time."""
        self._draining = True
        for run in list(self._runs.values()):
            run.interrupt(Draining("the router is closing"))
        await self._background.close()
        if self.console is not None:
            await self.console.close()
        if self._kv_events is not None:
            await self._kv_events.stop()
        await self._dispatcher.close()
        await self._tracer.close()

    def models(self) -> tuple[ModelInfo, ...]:
        return (self.model_info(),)

    def model_info(self, model: str = "") -> ModelInfo:
        """Raises ModelNotFound."""
        if model not in ("", self._model.name):
            raise ModelNotFound(f"the model {model[:MAX_NAME_CHARS]!r} does not exist", "model")
        pods = self._dispatcher.pods.view
        if self._info is None or self._info_of is not pods:
            self._info, self._info_of = self._make_info(), pods
        return self._info

    def _make_info(self) -> ModelInfo:
        decoding = self._dispatcher.pods.decoding()
        limits = [pod.record.max_model_len for pod in decoding]
        if decoding:  # a request's KV must fit one pod
            limits.append(max(pod.num_kv_tokens for pod in decoding))
        return ModelInfo(
            name=self._model.name,
            max_model_len=min([self._model.max_model_len, *limits]),
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.tokenizer.eos_token_ids,
            has_chat_template=self._model.tokenizer.has_chat_template,
            fingerprint=decoding[0].record.fingerprint if decoding else Fingerprint(""),
            created=self._created,
        )

    def ready(self) -> Readiness:
        if self._draining:
            return Readiness(ready=False, reason="the router is draining")
        view = self._dispatcher.pods.view
        num_prefill = view.num_prefill
        num_decode = len(view.decode)
        return Readiness(
            ready=bool(view.decode),
            reason=f"{num_prefill} prefill and {num_decode} decode pods",
            num_prefill=num_prefill,
            num_decode=num_decode,
        )

    def _row(self) -> RouterRow:
        readiness = self.ready()
        return RouterRow(
            id=self.router_id,
            model=self._model.name,
            policy=self._policy_name,
            ready=readiness.ready,
            reason=readiness.reason,
            running=len(self._runs),
            waiting=len(self._dispatcher.queue),
            uptime_seconds=int(time.time()) - self._created,
        )

    async def prepare(self, source: GenerateInput) -> PreparedRequest:
        """Raises InvalidRequest, ModelNotFound, Draining."""
        if self._draining:
            raise Draining("the router takes no more requests")
        return await self._preparer.prepare(source, self.model_info(source.model).max_model_len)

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[Event, None]:
        """Raises KvrelayError."""
        request_id = prepared.request_id
        if request_id in self._runs:
            raise InvalidRequest(f"a request {request_id!r} is running already", "request_id")
        span = self._span(prepared)
        delivery = self._delivery(prepared)
        observer = Observer(self._metrics, prepared, self._timeline.begin(prepared, delivery.usage), span)
        whose = about(prepared.request.request_id, span.trace_id)
        log.debug("%s: %d prompt tokens", request_id, len(prepared.request.prompt_token_ids), extra=whose)
        run = self._runs[request_id] = Run(
            prepared, delivery, self._dispatcher, self._retries, self._background, observer
        )
        self._idle.clear()
        try:
            async with contextlib.aclosing(run.events()) as events:
                async for event in events:
                    observer.see(event)
                    yield event
        except KvrelayError as error:
            observer.failed(error)
            raise
        finally:
            observer.ended()
            log.debug("%s ended: %s", request_id, observer.status, extra=whose)
            del self._runs[request_id]
            if not self._runs:
                self._idle.set()

    def _span(self, prepared: PreparedRequest) -> Span:
        """Of the whole request, from its arrival on; what went before this call was its preparation."""
        arrival = prepared.arrival
        span = self._tracer.parent(prepared.input.traceparent).child(
            "request",
            "server",
            arrival,
            request_id=prepared.request.request_id,
            client_request_id=prepared.request_id,
            gen_ai__request__model=self._model.name,
        )
        span.child("prepare", start=arrival, end=time.monotonic())
        return span

    def _delivery(self, prepared: PreparedRequest) -> Delivery:
        sampling = prepared.request.sampling
        stops = StopPatterns(sampling.stop)
        texts = [
            ChoiceText(
                self._model.tokenizer,
                sampling,
                prompt_token_ids=prepared.request.prompt_token_ids,
                stops=stops,
                align=sampling.logprobs is not None,
            )
            for _ in range(sampling.n)
        ]
        return Delivery(prepared, self._entries, texts)

    async def abort(self, request_id: RequestId) -> bool:
        """The request's iterator raises Cancelled. False: there is none."""
        run = self._runs.get(request_id)
        if run is None:
            return False
        run.interrupt(Cancelled("the request was aborted"))
        return True

    async def tokenize(
        self, model: str, prompt: str | Chat, *, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Raises InvalidRequest, ModelNotFound."""
        self.model_info(model)
        return await self._preparer.tokens(prompt, add_special_tokens)

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """Raises InvalidRequest for ids outside the vocabulary, ModelNotFound."""
        self.model_info(model)
        self._preparer.check_ids(token_ids, "tokens")
        if len(token_ids) <= INLINE_TOKENS:
            return self._entries.text(token_ids)
        return await asyncio.to_thread(self._entries.text, token_ids)  # the event loop goes on
