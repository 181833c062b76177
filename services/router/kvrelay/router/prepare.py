"""From what a client wrote to what pods understand: validate → chat template → tokenize → bound by the model's length."""

import asyncio
import secrets
import time

import msgspec

from kvrelay.common.errors import ContextLengthExceeded, InvalidRequest
from kvrelay.common.ids import new_request_id
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.common.tokenizer import Tokenizer, check_unicode
from kvrelay.router.job import Chat, GenerateInput, PreparedRequest

MAX_SALT_CHARS = 256
INLINE_MESSAGES = 100
"""Fewer are rendered in less time than a thread takes to answer."""


class Preparer:
    """Knows the model's tokenizer. `vocab_size` is the model's, which may have rows that no token uses."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, default_timeout_ms: int, max_timeout_ms: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._default_timeout_ms = default_timeout_ms
        self._max_timeout_ms = max_timeout_ms

    async def prepare(self, source: GenerateInput, max_model_len: int) -> PreparedRequest:
        """Raises InvalidRequest, which names the field; ContextLengthExceeded where prompt and output do not fit the model."""
        arrival = time.monotonic()
        source.sampling.validate(self._vocab_size)
        timeout_ms = self._timeout_ms(source)
        _check_routing(source)
        special = None if isinstance(source.prompt, Chat) else source.add_special_tokens
        tokens = await self.tokens(source.prompt, special)
        if not tokens:
            raise InvalidRequest("the prompt is empty", field_of(source.prompt))
        sampling = _bounded(source.sampling, len(tokens), max_model_len, field_of(source.prompt))
        request = EngineRequest(
            request_id=new_request_id(),
            prompt_token_ids=tokens,
            sampling=sampling,
            priority=source.priority,
            cache_salt=source.cache_salt,
            timeout_ms=timeout_ms,
        )
        return PreparedRequest(
            input=source,
            request=request,
            deadline=arrival + timeout_ms / 1000,
            arrival=arrival,
            created=int(time.time()),
        )

    async def tokens(
        self, prompt: str | tuple[int, ...] | Chat, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """`add_special_tokens` None: for text, and not for a chat, whose template writes them. Raises InvalidRequest."""
        match prompt:
            case Chat():
                text = await self._render(prompt)
                found = await self._tokenizer.encode_async(text, bool(add_special_tokens), param="messages")
                return tuple(found)
            case str():
                return tuple(await self._tokenizer.encode_async(prompt, add_special_tokens is not False))
            case _:
                self.check_ids(prompt, "prompt")
                return prompt

    async def _render(self, chat: Chat) -> str:
        """Many messages in a thread, so that the event loop goes on."""
        messages = _messages(chat)
        if len(messages) <= INLINE_MESSAGES:
            return self._tokenizer.render(messages, chat.add_generation_prompt)
        return await asyncio.to_thread(self._tokenizer.render, messages, chat.add_generation_prompt)

    def check_ids(self, tokens: tuple[int, ...], field: str) -> None:
        """Raises InvalidRequest for an id outside the vocabulary."""
        size = self._vocab_size
        if tokens and not (min(tokens) >= 0 and max(tokens) < size):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {size}", field)

    def _timeout_ms(self, source: GenerateInput) -> int:
        if source.timeout_ms is None:
            return self._default_timeout_ms
        if source.timeout_ms < 1:
            raise InvalidRequest(f"timeout_ms must be positive, not {source.timeout_ms}", "timeout_ms")
        return min(source.timeout_ms, self._max_timeout_ms)


def field_of(prompt: str | tuple[int, ...] | Chat) -> str:
    return "messages" if isinstance(prompt, Chat) else "prompt"


def _messages(chat: Chat) -> list[dict[str, str]]:
    """As chat templates expect them: no name where there is none."""
    return [
        {"role": message.role, "content": message.content, **({"name": message.name} if message.name else {})}
        for message in chat.messages
    ]


def _check_routing(source: GenerateInput) -> None:
    if not -(2**31) <= source.priority < 2**31:
        raise InvalidRequest(f"priority must fit 32 bits, not {source.priority}", "priority")
    check_unicode(source.cache_salt, "cache_salt")
    for text in source.sampling.stop:
        check_unicode(text, "stop")
    if len(source.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt has over {MAX_SALT_CHARS} characters", "cache_salt")


def _bounded(sampling: SamplingParams, num_prompt: int, max_model_len: int, field: str) -> SamplingParams:
    """With `max_tokens` and `seed`. Raises ContextLengthExceeded where prompt and output do not fit the model."""
    room = max_model_len - num_prompt
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens; with at least one of output it is over the model's {max_model_len}",
            field,
        )
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise ContextLengthExceeded(
            f"max_tokens is {sampling.max_tokens}, and the prompt has {num_prompt} tokens: together over the model's "
            f"{max_model_len}",
            "max_tokens",
        )
    if sampling.min_tokens > room:
        raise ContextLengthExceeded(
            f"min_tokens is {sampling.min_tokens}, and only {room} fit after the prompt", "min_tokens"
        )
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens or room, seed=seed)
