"""Text completions: a body to one input a prompt, and the events to OpenAI's `text_completion`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.ids import RequestId
from kvrelay.router.front import check_model
from kvrelay.router.http.logprobs import CompletionLogprobs, prompt_logprobs
from kvrelay.router.http.output import Choice, Output
from kvrelay.router.http.refusals import COMPLETION, refuse, refuse_best_of
from kvrelay.router.http.sampling import completion_sampling
from kvrelay.router.http.schemas import CompletionBody
from kvrelay.router.job import ChoiceEvent, Event, GenerateInput, PromptEvent

MAX_PROMPTS = 256


class Completion:
    """One request for text completions. Choices count across its prompts."""

    id_prefix = "cmpl"
    names: Mapping[str, str] = {}

    def __init__(self, body: CompletionBody) -> None:
        self.body = body
        self.n = 1 if body.n is None else body.n
        self._sent: dict[int, int] = {}

    def inputs(self, answer_id: str, timeout_ms: int | None, session: str) -> list[GenerateInput]:
        """Raises InvalidRequest, Unsupported."""
        body = self.body
        model = check_model(body.model or "")
        refuse(body, COMPLETION)
        refuse_best_of(body.best_of, self.n)
        prompts = _prompts(body.prompt)
        sampling = completion_sampling(body)
        return [
            GenerateInput(
                request_id=RequestId(answer_id if len(prompts) == 1 else f"{answer_id}-{index}"),
                model=model,
                prompt=prompt,
                sampling=sampling,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                session=session,
                timeout_ms=timeout_ms,
                add_special_tokens=body.add_special_tokens is not False,
                echo=bool(body.echo),
            )
            for index, prompt in enumerate(prompts)
        ]

    def head(self, *, stream: bool) -> dict[str, object]:
        return {"object": "text_completion"}

    def chunks(self, job: int, event: Event) -> Iterator[dict[str, object]]:
        """The `choices` entries that an event of prompt `job` adds to a stream."""
        if isinstance(event, ChoiceEvent):
            if chunk := self._choice_chunk(job, event):
                yield chunk
        elif isinstance(event, PromptEvent):
            self._sent[job] = len(event.text)
            if self._shows_prompt():
                for choice in range(self.n):
                    yield self._prompt_chunk(job * self.n + choice, event)

    def whole(self, outputs: Sequence[Output]) -> dict[str, object]:
        """`choices`, and whatever else stands beside them."""
        return {
            "choices": [
                self._whole_choice(job * self.n + number, output, choice)
                for job, output in enumerate(outputs)
                for number, choice in enumerate(output.choices)
            ]
        }

    def extra(self, event: Event) -> dict[str, object]:
        """What an event adds beside `choices` in a stream: nothing here."""
        return {}

    def _shows_prompt(self) -> bool:
        body = self.body
        return bool(body.echo or body.return_token_ids or body.prompt_logprobs is not None)

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(with_top=bool(self.body.logprobs))

    def _prompt_chunk(self, index: int, event: PromptEvent) -> dict[str, object]:
        chunk: dict[str, object] = {"index": index, "text": event.text, "logprobs": None, "finish_reason": None}
        if self.body.echo and self.body.logprobs is not None:
            logprobs = self._logprobs()
            logprobs.add_prompt(event)
            chunk["logprobs"] = logprobs.shape()
        self._add_prompt(chunk, event)
        if self.body.return_token_ids:
            chunk["token_ids"] = []
        return chunk

    def _add_prompt(self, choice: dict[str, object], event: PromptEvent) -> None:
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(event)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = event.token_ids

    def _choice_chunk(self, job: int, event: ChoiceEvent) -> dict[str, object] | None:
        body = self.body
        shows_tokens = bool(event.token_ids) and (body.logprobs is not None or bool(body.return_token_ids))
        if not event.text and event.finish_reason is None and not shows_tokens:
            return None
        chunk: dict[str, object] = {
            "index": job * self.n + event.choice,
            "text": event.text,
            "logprobs": None,
            "finish_reason": event.finish_reason,
        }
        if body.logprobs is not None and event.logprobs:
            logprobs = self._logprobs()
            logprobs.add(event.logprobs, self._sent[job])
            chunk["logprobs"] = logprobs.shape()
        if event.stop_reason is not None:
            chunk["stop_reason"] = event.stop_reason
        if body.return_token_ids:
            chunk["token_ids"] = event.token_ids
        return chunk

    def _whole_choice(self, index: int, output: Output, choice: Choice) -> dict[str, object]:
        body = self.body
        text = "".join(choice.text)
        shape: dict[str, object] = {
            "index": index,
            "text": output.prompt.text + text if body.echo else text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if body.logprobs is not None:
            logprobs = self._logprobs()
            if body.echo:
                logprobs.add_prompt(output.prompt)
            logprobs.add(choice.logprobs, len(output.prompt.text) if body.echo else 0)
            shape["logprobs"] = logprobs.shape()
        if choice.stop_reason is not None:
            shape["stop_reason"] = choice.stop_reason
        if body.return_token_ids:
            shape["token_ids"] = choice.token_ids
        self._add_prompt(shape, output.prompt)
        return shape


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | tuple[int, ...]]:
    """A text, token ids, or a list of either. Raises InvalidRequest for an empty or a mixed list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list", "prompt")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [tuple(cast(list[int], prompt))]
    if int in kinds or len(kinds) > 1:
        raise InvalidRequest("prompt must be a string, token ids, or a list of strings or of lists of ids", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has over {MAX_PROMPTS} entries", "prompt")
    return [entry if isinstance(entry, str) else tuple(entry) for entry in prompt if not isinstance(entry, int)]
