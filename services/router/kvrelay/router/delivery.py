"""What a client has of a request: each token of each choice once, in order, whoever says it first; and its text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.common.errors import Internal
from kvrelay.common.request import ChoiceDelta, FinishReason, PositionLogprobs, ResumedChoice
from kvrelay.common.text import ChoiceText, TokenText
from kvrelay.router.entries import Entries
from kvrelay.router.job import ChoiceEvent, Event, PositionEntry, PreparedRequest, PromptEvent, UsageEvent


@dataclass(slots=True)
class _Choice:
    text: ChoiceText
    tokens: list[int] = field(default_factory=list)
    finished: bool = False


class Delivery:
    """Turns pods' deltas into events. Tokens wait until what is said of the prompt before them is known.

    `restart` is called between attempts: what was not delivered is forgotten, what was stays.
    """

    def __init__(self, prepared: PreparedRequest, entries: Entries, texts: Sequence[ChoiceText]) -> None:
        self._prepared = prepared
        self._entries = entries
        self._choices = [_Choice(text) for text in texts]
        self._wants_prompt_logprobs = prepared.request.sampling.prompt_logprobs is not None
        self._prompt_sent = False
        self._num_cached: int | None = None
        self._prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
        self._waiting: list[ChoiceDelta] = []

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        """Delivered, of all choices."""
        return sum(len(choice.tokens) for choice in self._choices)

    @property
    def prompt_known(self) -> bool:
        """All that is to be said of the prompt."""
        told = self._prompt_logprobs is not None or not self._wants_prompt_logprobs
        return self._prompt_sent or (self._num_cached is not None and told)

    def resume(self) -> tuple[ResumedChoice, ...]:
        """What the next attempt must not sample again."""
        return tuple(
            ResumedChoice(choice=number, token_ids=tuple(choice.tokens), finished=choice.finished)
            for number, choice in enumerate(self._choices)
            if choice.tokens
        )

    def restart(self) -> None:
        self._waiting.clear()
        if not self._prompt_sent:
            self._num_cached = None
            self._prompt_logprobs = None

    def note_prompt(
        self, num_cached: int | None = None, logprobs: tuple[PositionLogprobs, ...] | None = None
    ) -> list[Event]:
        """What a pod said of the prompt; None: nothing. May set tokens free that waited for it."""
        if self._prompt_sent:
            return []
        self._num_cached = num_cached if num_cached is not None else self._num_cached
        self._prompt_logprobs = logprobs if logprobs is not None else self._prompt_logprobs
        if not self.prompt_known:
            return []
        waiting, self._waiting = self._waiting, []
        return [event for delta in waiting for event in self.add(delta)]

    def add(self, delta: ChoiceDelta) -> list[Event]:
        """Raises Internal for a delta that cannot be of this request."""
        if not self._prompt_sent and not self.prompt_known:
            self._waiting.append(delta)
            return []
        if delta.choice >= len(self._choices):
            raise Internal(f"a pod speaks of choice {delta.choice} of {len(self._choices)}")
        choice = self._choices[delta.choice]
        num_old = len(choice.tokens) - delta.index
        if num_old < 0:
            raise Internal(f"a pod left out tokens {len(choice.tokens)} to {delta.index} of choice {delta.choice}")
        num_new = len(delta.token_ids) - num_old
        if choice.finished or num_new < 0 or (num_new == 0 and delta.finish_reason is None):
            return []
        if self._prompt_sent:
            return [self._extend(delta, choice, num_old)]
        return [self._prompt_event(), self._extend(delta, choice, num_old)]

    def _prompt_event(self) -> PromptEvent:
        self._prompt_sent = True
        source, tokens = self._prepared.input, self._prepared.request.prompt_token_ids
        told = source.prompt if isinstance(source.prompt, str) else None
        text = (told if told is not None else self._entries.text(tokens)) if source.echo else ""
        return PromptEvent(
            token_ids=tokens,
            num_cached_tokens=self._num_cached or 0,
            text=text,
            prompt_logprobs=self._entries.of_prompt(tokens, self._prompt_logprobs or ()),
        )

    def _extend(self, delta: ChoiceDelta, choice: _Choice, num_old: int) -> ChoiceEvent:
        """The delta's new tokens, up to a stop string."""
        tokens, logprobs = delta.token_ids[num_old:], delta.logprobs[num_old:]
        told = choice.text.push(tokens, finished=delta.finish_reason is not None, stop_token_id=delta.stop_token_id)
        tokens, logprobs = tokens[: told.num_tokens], logprobs[: told.num_tokens]
        choice.tokens.extend(tokens)
        choice.finished = told.finished
        reason = delta.finish_reason
        if told.finished and (isinstance(told.stop_reason, str) or reason is None):
            reason = FinishReason.STOP  # by a stop string, which no pod knows of
        return ChoiceEvent(
            choice=delta.choice,
            text=told.text,
            token_ids=tokens,
            logprobs=self._positions(logprobs, told.tokens) if logprobs else (),
            finish_reason=reason if told.finished else None,
            stop_reason=told.stop_reason,
        )

    def _positions(
        self, logprobs: Sequence[PositionLogprobs], tokens: Sequence[TokenText]
    ) -> tuple[PositionEntry, ...]:
        return tuple(self._entries.at(at, token.offset) for at, token in zip(logprobs, tokens, strict=True))

    def usage(self) -> UsageEvent:
        return UsageEvent(
            prompt_tokens=len(self._prepared.request.prompt_token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=self._num_cached or 0,
        )
