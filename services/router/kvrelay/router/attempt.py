"""One request from the queue to its last token, over as many attempts as that takes.

    place ──▶ D.Reserve ──▶ P.Prefill(ticket) ──▶ first tokens ──▶ D's tokens ──▶ finished
      ▲           │ refused      │ P fails: Reserve again on the same D, another P, what was delivered is forced
      └───────────┴──────────────┴ D fails: the same on another D

Tokens are emitted once, whoever says them first and whatever attempt they come from (`kvrelay.router.delivery`). Each wait here
ends at the deadline, at an abort, or when its pod is lost; leaving in any state frees the request on its pods.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TypeVar

import msgspec

from kvrelay.common.blocks import extra_keys
from kvrelay.common.errors import DeadlineExceeded, KvrelayError, Overloaded, Unavailable, error_from
from kvrelay.common.logs import about
from kvrelay.common.request import ChoiceDelta, EngineRequest, FinishReason
from kvrelay.common.tracing import NO_SPAN, Span
from kvrelay.router import news
from kvrelay.router.background import Background
from kvrelay.router.delivery import Delivery
from kvrelay.router.dispatch import Dispatcher
from kvrelay.router.inbox import Inbox
from kvrelay.router.job import ChoiceEvent, Event, PreparedRequest
from kvrelay.router.load import Load
from kvrelay.router.metrics import Observer
from kvrelay.router.placement import Placement
from kvrelay.router.pods import Pod
from kvrelay.router.policy import RouteRequest
from kvrelay.router.prompt import PromptIds
from kvrelay.router.recovery import AttemptFailed, Culprit, Retries

log = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_SLACK_SECONDS = 0.25
"""A pod that ends a request this shortly before its deadline did so for the deadline."""
PUSH_END_SECONDS = 5.0
"""Within which a push ends whose tokens are streaming already."""


class Run:
    """Iterate `events` once, and close it. `interrupt` ends it with an error, in any state."""

    def __init__(
        self,
        prepared: PreparedRequest,
        delivery: Delivery,
        dispatcher: Dispatcher,
        retries: Retries,
        background: Background,
        observer: Observer,
    ) -> None:
        self._prepared = prepared
        self._id = prepared.request.request_id
        self._delivery = delivery
        self._dispatcher = dispatcher
        self._retries = retries
        self._background = background
        self._observer = observer
        self._span = observer.span
        self._decoding: Span = NO_SPAN
        """From the moment when the decode pod has all it needs."""
        self._about = about(self._id, observer.span.trace_id)
        self._inbox = Inbox()
        self._interruption: KvrelayError | None = None
        self._wait: asyncio.Timeout | None = None
        """Around what an interruption has to end: all waits but that for news."""
        self._prompt: PromptIds | None = None
        self._attempt = 0
        self._failures = 0
        self._group: int | None = None
        self._excluded: frozenset[Load] = frozenset()
        self._placement: Placement | None = None
        self._kept: Pod | None = None
        """Between two attempts: the decode pod that keeps the request."""
        self._prefill: asyncio.Task[None] | None = None
        self._decode_speaks = False
        """The decode pod has all it needs: what still happens to the prefill pod does not matter."""
        self._decode_finished: set[int] = set()
        """Choices that the decode pod itself calls finished."""

    def interrupt(self, error: KvrelayError) -> None:
        if self._interruption is None:
            self._interruption = error
            self._inbox.put(news.Interrupted(error))
            if self._wait is not None:
                self._wait.reschedule(asyncio.get_running_loop().time())

    async def events(self) -> AsyncGenerator[Event, None]:
        """Raises KvrelayError."""
        expiry = DeadlineExceeded("the request's deadline passed")
        timer = asyncio.get_running_loop().call_later(self._remaining(), self.interrupt, expiry)
        try:
            while not self._delivery.finished:
                try:
                    await self._start()
                    while not self._delivery.finished:
                        for event in self._take(await self._inbox.get()):
                            self._end_choice(event)
                            yield event
                except AttemptFailed as failure:
                    await self._recover(failure)
            yield self._delivery.usage()
        finally:
            timer.cancel()
            self._leave()

    async def _start(self) -> None:
        """A place, a reservation, and a prefill under way."""
        with self._span.child("queue", attempt=self._attempt + 1):
            place = self._placement = await self._place()
        self._observer.placed(place)
        self._attempt += 1
        self._decode_speaks = False
        self._decode_finished.clear()
        decode, prefill = place.decode, place.prefill
        self._group = decode.load.group
        decode.listen(self._id, self._inbox)
        request = self._request()
        log.debug("attempt %d: %s and %s", self._attempt, prefill or "no prefill pod", decode, extra=self._about)
        reserve = decode.reserve(
            request,
            self._attempt,
            local_prefill=prefill is None,
            timeout_seconds=self._remaining(),
            traceparent=self._span.traceparent,
        )
        try:
            with self._part("reserve", decode):
                grant = await self._unless_interrupted(reserve)
        except Overloaded as error:
            raise AttemptFailed(error, Culprit.ROOM) from error
        except KvrelayError as error:
            raise AttemptFailed(error, Culprit.DECODE) from error
        if prefill is not None and grant is not None:
            span = self._part("prefill", prefill)
            call = prefill.prefill(grant, self._inbox, timeout_seconds=self._remaining(), span=span)
            self._prefill = asyncio.create_task(call, name=f"prefill {self._id}")
        else:
            self._decoding = self._part("decode", decode)

    def _part(self, name: str, pod: Pod) -> Span:
        return self._span.child(name, "client", attempt=self._attempt, pod=pod.record.pod_id)

    def _hand_over(self) -> None:
        """To the decode pod: it has all it needs."""
        if not self._decode_speaks:
            self._decode_speaks = True
            if self._decoding is NO_SPAN and self._placement is not None:
                self._decoding = self._part("decode", self._placement.decode)

    async def _place(self) -> Placement:
        asked = self._prepared.request
        if self._attempt == 0 and self._dispatcher.reads_prompts:
            self._prompt = PromptIds(asked.prompt_token_ids, extra_keys(asked.cache_salt))
            if self._prompt.takes_long:
                await self._unless_interrupted(self._prompt.prepare(self._dispatcher.pods.fingerprints))
        request = RouteRequest(
            num_prompt_tokens=len(asked.prompt_token_ids) + self._delivery.num_tokens,
            num_choices=asked.sampling.n,
            decode=self._kept.load if self._kept is not None else None,
            group=self._group if self._delivery.num_tokens else None,
            excluded=self._excluded,
            prompt=self._prompt,
            session=self._prepared.input.session,
        )
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return self._dispatcher.beside(kept, request)
        placing = self._dispatcher.place(request, priority=asked.priority, readmitted=self._attempt > 0)
        return await self._unless_interrupted(placing)

    def _request(self) -> EngineRequest:
        """As pods see it now."""
        return msgspec.structs.replace(
            self._prepared.request, timeout_ms=max(1, int(self._remaining() * 1000)), resume=self._delivery.resume()
        )

    def _remaining(self) -> float:
        return max(0.001, self._prepared.deadline - time.monotonic())

    def _take(self, item: news.News) -> Sequence[Event]:
        """What follows from one piece of news: events for the client, or AttemptFailed. Raises KvrelayError when interrupted."""
        match item:
            case ChoiceDelta() if item.attempt == self._attempt:
                return self._take_decoded(item)
            case ChoiceDelta():
                self._observer.ignored(item)
            case news.Interrupted(error=error):
                raise error
            case news.PodLost(pod=pod, error=error):
                if self._placement is not None and pod is self._placement.decode.load:
                    lost = Unavailable(f"the decode pod {pod.pod_id} was lost: {error.message}")
                    raise AttemptFailed(lost, Culprit.DECODE)
            case _ if item.attempt == self._attempt:
                return self._take_current(item)
        return ()

    def _take_current(self, item: news.OfAttempt) -> Sequence[Event]:
        match item:
            case news.PrefillStarted(num_cached_tokens=cached):
                if self._placement is not None:
                    self._placement.prefill_started(cached)
                return self._delivery.note_prompt(cached)
            case news.FirstTokens(deltas=deltas, prompt_logprobs=logprobs):
                self._check(deltas, Culprit.PREFILL)
                if self._placement is not None:
                    self._placement.first_token()
                return [*self._delivery.note_prompt(logprobs=logprobs), *self._deliver(deltas)]
            case news.PromptComputed(num_cached_tokens=cached, prompt_logprobs=logprobs):
                if self._placement is not None:
                    self._placement.computed_here(cached)
                return self._delivery.note_prompt(cached, logprobs)
            case news.PushCompleted():
                self._hand_over()
                if self._placement is not None:
                    self._placement.pushed()
            case news.PrefillFailed(error=error):
                if not (self._decode_speaks and self._delivery.prompt_known):
                    raise AttemptFailed(error, Culprit.PREFILL)
            case news.RecomputeStarted():
                self._hand_over()
                self._end_prefill()
            case news.TicketVoid(error=error):
                raise AttemptFailed(error, Culprit.TICKET)
        return ()

    def _take_decoded(self, delta: ChoiceDelta) -> list[Event]:
        self._hand_over()
        self._note_decoded()
        if delta.finish_reason is not None:
            self._decode_finished.add(delta.choice)
        self._check((delta,), Culprit.DECODE)
        if self._prefill is None and not self._delivery.prompt_known:
            return [*self._delivery.note_prompt(0, ()), *self._delivery.add(delta)]
        return self._delivery.add(delta)

    def _deliver(self, deltas: Sequence[ChoiceDelta]) -> list[Event]:
        return [event for delta in deltas for event in self._delivery.add(delta)]

    def _check(self, deltas: Sequence[ChoiceDelta], source: Culprit) -> None:
        """Before any of them is delivered: what counts as delivered must reach the client."""
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                code, _, message = delta.error.partition(": ")
                raise AttemptFailed(error_from(code, message or delta.error), source)
            if delta.finish_reason is FinishReason.ABORT:
                if self._remaining() < DEADLINE_SLACK_SECONDS:
                    raise DeadlineExceeded("the request's deadline passed")
                raise AttemptFailed(Unavailable("the pod gave the request up"), source)

    def _end_choice(self, event: Event) -> None:
        """A stop string, which no pod knows of, has ended a choice while others go on: it must not run on beside them."""
        match event:
            case ChoiceEvent(choice=choice, stop_reason=str()) if choice not in self._decode_finished:
                if self._placement is not None and not self._delivery.finished:
                    work = self._placement.decode.abort_choice(self._id, choice)
                    self._background.run(work, f"abort choice {choice} of {self._id}")

    def _note_decoded(self) -> None:
        if self._placement is not None:
            self._placement.decoded()

    async def _recover(self, failure: AttemptFailed) -> None:
        """Returns when the next attempt may start. Raises the failure's error where there is to be none."""
        if failure.culprit is Culprit.ROOM:
            pause = self._retries.pause.delay(1)
        else:
            self._failures += 1
            pause = self._retries.pause_seconds(self._failures, failure)
        what = failure.error.message
        log.info("attempt %d of %s: %s: %s", self._attempt, self._id, failure.culprit, what, extra=self._about)
        self._decoding.end(failure.error)
        self._decoding = NO_SPAN
        self._observer.retried(failure.culprit)
        self._give_up_placement(failure.culprit)
        self._delivery.restart()
        await self._unless_interrupted(asyncio.sleep(pause))

    def _give_up_placement(self, culprit: Culprit) -> None:
        place, self._placement = self._placement, None
        if place is None:
            return
        self._end_prefill()
        place.release()
        match culprit:
            case Culprit.PREFILL if place.prefill is not None:
                self._excluded |= {place.prefill.load}
            case Culprit.DECODE:
                self._excluded |= {place.decode.load}
            case Culprit.ROOM:  # after the release, which would make its room look free
                place.decode.load.refused()
        if culprit in (Culprit.PREFILL, Culprit.TICKET):
            self._kept = place.decode
        else:
            self._leave_decode(place.decode)
            # What the pod still says of this request finds no one.
            self._inbox = Inbox()

    def _leave(self) -> None:
        """For good. Where the decode pod did not end the request by itself, both pods are told."""
        self._decoding.end()
        clean = len(self._decode_finished) == self._prepared.request.sampling.n
        decode = self._kept or (self._placement.decode if self._placement is not None else None)
        if clean and self._prefill is not None:
            self._background.adopt(self._prefill, PUSH_END_SECONDS)
        else:
            self._end_prefill()
        if decode is not None:
            self._leave_decode(decode, abort=not clean)
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _leave_decode(self, decode: Pod, *, abort: bool = True) -> None:
        decode.ignore(self._id)
        if abort:
            self._background.run(decode.abort(self._id), f"abort {self._id}")

    def _end_prefill(self) -> None:
        """Cancelling the call aborts the request on its pod."""
        if self._prefill is not None:
            self._prefill.cancel()
            self._background.adopt(self._prefill)
            self._prefill = None

    async def _unless_interrupted(self, work: Coroutine[None, None, T]) -> T:
        """Its result. Raises what the work raises, and the interruption, for which the work is cancelled.

        In this task: to start one for each wait would cost more than most of the waits.
        """
        try:
            async with asyncio.timeout(0 if self._interruption is not None else None) as self._wait:
                return await work
        except TimeoutError:
            if self._interruption is None:
                raise
            raise self._interruption from None
        finally:
            self._wait = None
