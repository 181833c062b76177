"""Chat completions: a body to one input, and the events to OpenAI's `chat.completion` and its chunks."""

from collections.abc import Iterator, Mapping, Sequence

from kvrelay.common.errors import InvalidRequest, Unsupported
from kvrelay.common.ids import RequestId
from kvrelay.router.front import chat_message, check_model
from kvrelay.router.http.logprobs import chat_logprobs, prompt_logprobs
from kvrelay.router.http.output import Choice, Output
from kvrelay.router.http.refusals import CHAT, MESSAGE, refuse
from kvrelay.router.http.sampling import chat_names, chat_sampling
from kvrelay.router.http.schemas import ChatBody, ContentPart, Message
from kvrelay.router.job import Chat, ChatMessage, ChoiceEvent, Event, GenerateInput, PromptEvent


class ChatCompletion:
    """One request for a chat completion."""

    id_prefix = "chatcmpl"

    def __init__(self, body: ChatBody) -> None:
        self.body = body
        self.n = 1 if body.n is None else body.n
        self.names: Mapping[str, str] = chat_names(body)

    def inputs(self, answer_id: str, timeout_ms: int | None, session: str) -> list[GenerateInput]:
        """Raises InvalidRequest, Unsupported."""
        body = self.body
        model = check_model(body.model or "")
        refuse(body, CHAT)
        return [
            GenerateInput(
                request_id=RequestId(answer_id),
                model=model,
                prompt=to_chat(body.messages, body.add_generation_prompt),
                sampling=chat_sampling(body),
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                session=session,
                timeout_ms=timeout_ms,
                add_special_tokens=bool(body.add_special_tokens),
            )
        ]

    def head(self, *, stream: bool) -> dict[str, object]:
        return {"object": "chat.completion.chunk" if stream else "chat.completion"}

    def chunks(self, job: int, event: Event) -> Iterator[dict[str, object]]:
        """The `choices` entries that an event adds to a stream: first the role of each choice, then text."""
        if isinstance(event, ChoiceEvent):
            if chunk := self._choice_chunk(event):
                yield chunk
        elif isinstance(event, PromptEvent):
            for index in range(self.n):
                delta = {"role": "assistant", "content": "", "refusal": None}
                yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def extra(self, event: Event) -> dict[str, object]:
        """What an event adds beside `choices` in a stream."""
        return self._about_prompt(event) if isinstance(event, PromptEvent) else {}

    def whole(self, outputs: Sequence[Output]) -> dict[str, object]:
        output = outputs[0]
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(output.choices)]
        return {"choices": choices, **self._about_prompt(output.prompt)}

    def _about_prompt(self, prompt: PromptEvent) -> dict[str, object]:
        about: dict[str, object] = {}
        if self.body.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_logprobs(prompt)
        if self.body.return_token_ids:
            about["prompt_token_ids"] = prompt.token_ids
        return about

    def _choice_chunk(self, event: ChoiceEvent) -> dict[str, object] | None:
        body = self.body
        shows_tokens = bool(event.token_ids) and bool(body.logprobs or body.return_token_ids)
        if not event.text and event.finish_reason is None and not shows_tokens:
            return None
        chunk: dict[str, object] = {
            "index": event.choice,
            "delta": {"content": event.text} if event.text or event.finish_reason is None else {},
            "logprobs": None,
            "finish_reason": event.finish_reason,
        }
        if body.logprobs and event.logprobs:
            chunk["logprobs"] = {"content": chat_logprobs(event.logprobs), "refusal": None}
        if event.stop_reason is not None:
            chunk["stop_reason"] = event.stop_reason
        if body.return_token_ids:
            chunk["token_ids"] = event.token_ids
        return chunk

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, object]:
        content = "".join(choice.text)
        shape: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if self.body.logprobs:
            shape["logprobs"] = {"content": chat_logprobs(choice.logprobs), "refusal": None}
        if choice.stop_reason is not None:
            shape["stop_reason"] = choice.stop_reason
        if self.body.return_token_ids:
            shape["token_ids"] = choice.token_ids
        return shape


def to_chat(messages: Sequence[Message], add_generation_prompt: bool | None) -> Chat:
    """Raises InvalidRequest, whose `param` is the message's path."""
    return Chat(
        messages=tuple(_message(message, index) for index, message in enumerate(messages)),
        add_generation_prompt=add_generation_prompt is not False,
    )


def _message(message: Message, index: int) -> ChatMessage:
    within = f"messages[{index}]"
    refuse(message, MESSAGE, f"{within}.")
    if message.content is None:
        raise InvalidRequest(f"'{within}.content' must be a string or a list of parts.", f"{within}.content")
    if isinstance(message.content, str):
        content = message.content
    else:
        content = "\n".join(_part(part, f"{within}.content[{at}]") for at, part in enumerate(message.content))
    return chat_message(message.role, content, message.name or "", index)


def _part(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise Unsupported(f"'{path}' is of type '{part.type[:100]}': only 'text' is supported.", path)
    if part.text is None:
        raise InvalidRequest(f"Missing required parameter: '{path}.text'.", f"{path}.text")
    return part.text
