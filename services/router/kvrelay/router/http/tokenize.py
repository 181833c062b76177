"""`/tokenize` and `/detokenize`, in vLLM's shape."""

import abc
import asyncio
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from kvrelay.common.errors import InvalidRequest
from kvrelay.router.front import FrontSettings
from kvrelay.router.http.asgi import read_body, send_json
from kvrelay.router.http.chat import to_chat
from kvrelay.router.http.parse import parse
from kvrelay.router.http.schemas import DetokenizeBody, TokenizeBody
from kvrelay.router.job import Chat, Inference

B = TypeVar("B")
TURN_TOKENS = 256


class _Endpoint(abc.ABC, Generic[B]):
    schema: type[B]

    def __init__(self, router: Inference, settings: FrontSettings) -> None:
        self.router = router
        self._limit = settings.max_body_bytes
        self._decoder = msgspec.json.Decoder(self.schema)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = parse(await read_body(scope, receive, self._limit), self._decoder)
        await send_json(send, await self.answer(body))

    @abc.abstractmethod
    async def answer(self, body: B) -> dict[str, object]:
        """Raises KvrelayError."""


class Tokenize(_Endpoint[TokenizeBody]):
    schema = TokenizeBody

    async def answer(self, body: TokenizeBody) -> dict[str, object]:
        model = self.router.model_info(body.model or "")
        tokens = await self.router.tokenize(model.name, _prompt(body), add_special_tokens=body.add_special_tokens)
        shape: dict[str, object] = {
            "count": len(tokens),
            "max_model_len": model.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            shape["token_strs"] = await self._texts(model.name, tokens)
        return shape

    async def _texts(self, model: str, tokens: Sequence[int]) -> list[str]:
        """Of each token. Other requests have their turn in between."""
        texts: list[str] = []
        for at, token in enumerate(tokens):
            if at % TURN_TOKENS == 0:
                await asyncio.sleep(0)
            texts.append(await self.router.detokenize(model, (token,)))
        return texts


class Detokenize(_Endpoint[DetokenizeBody]):
    schema = DetokenizeBody

    async def answer(self, body: DetokenizeBody) -> dict[str, object]:
        model = self.router.model_info(body.model or "")
        return {"prompt": await self.router.detokenize(model.name, tuple(body.tokens))}


def _prompt(body: TokenizeBody) -> str | Chat:
    """Raises InvalidRequest unless the body has exactly one of the two."""
    if body.messages is not None and body.prompt is not None:
        raise InvalidRequest("Give either 'prompt' or 'messages', not both.", "prompt")
    if body.messages is not None:
        return to_chat(body.messages, body.add_generation_prompt)
    if body.prompt is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", "prompt")
    return body.prompt
