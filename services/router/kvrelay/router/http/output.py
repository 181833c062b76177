"""A request's events, gathered: what an answer that is not streamed is made of."""

import dataclasses

from kvrelay.router.job import ChoiceEvent, Event, PositionEntry, PromptEvent, UsageEvent


@dataclasses.dataclass(slots=True)
class Choice:
    text: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[PositionEntry] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, event: ChoiceEvent) -> None:
        self.text.append(event.text)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason.value
            self.stop_reason = event.stop_reason


class Output:
    """Of one prompt, with `n` choices."""

    def __init__(self, n: int) -> None:
        self.prompt = PromptEvent(token_ids=(), num_cached_tokens=0)
        self.choices = [Choice() for _ in range(n)]

    def add(self, event: Event) -> None:
        if isinstance(event, ChoiceEvent):
            self.choices[event.choice].add(event)
        elif isinstance(event, PromptEvent):
            self.prompt = event


class Usage:
    """Token counts over all prompts of a request."""

    def __init__(self) -> None:
        self._prompt = 0
        self._completion = 0
        self._cached = 0

    def count(self, event: Event) -> None:
        """What was seen so far: for usage within a stream."""
        if isinstance(event, ChoiceEvent):
            self._completion += len(event.token_ids)
        elif isinstance(event, PromptEvent):
            self._prompt += len(event.token_ids)
            self._cached += event.num_cached_tokens

    def add(self, event: Event) -> None:
        """What the router says at a prompt's end: for the whole."""
        if isinstance(event, UsageEvent):
            self._prompt += event.prompt_tokens
            self._completion += event.completion_tokens
            self._cached += event.cached_tokens

    def shape(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
