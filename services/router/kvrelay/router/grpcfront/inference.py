"""`kvrelay.v1.Inference`: everything that HTTP can ask, by the same core, with the same errors under the same names."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Final

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.ids import RequestId, new_request_id
from kvrelay.common.tracing import TRACEPARENT
from kvrelay.common.wire import sampling_from_proto
from kvrelay.router.front import chat_message, check_model, check_request_id, shorter_timeout
from kvrelay.router.grpcfront.calls import Calls, Context, Handler
from kvrelay.router.grpcfront.events import Responses
from kvrelay.router.job import Chat, GenerateInput, Inference
from kvrelay.v1 import inference_pb2 as pb

INFERENCE: Final = "kvrelay.v1.Inference"
SESSION_KEY: Final = "x-session-id"
"""Metadata; as HTTP's header of the name."""


class InferenceService:
    def __init__(self, router: Inference) -> None:
        self._router = router

    def handlers(self, calls: Calls) -> dict[str, Handler]:
        return {
            "Generate": calls.stream(pb.GenerateRequest, self.generate),
            "Tokenize": calls.unary(pb.TokenizeRequest, self.tokenize),
            "Detokenize": calls.unary(pb.DetokenizeRequest, self.detokenize),
            "GetModelInfo": calls.unary(pb.GetModelInfoRequest, self.model_info),
            "Abort": calls.unary(pb.AbortGenerationRequest, self.abort),
        }

    async def generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Raises what the router raises, before the first message or later."""
        try:
            prepared = await self._router.prepare(_input(request, context))
        except InvalidRequest as error:
            if error.param == "prompt" and request.HasField("chat"):
                raise type(error)(error.message, "messages") from error
            raise
        responses = Responses(prepared.input.request_id)
        async with contextlib.aclosing(self._router.generate(prepared)) as events:
            async for event in events:
                yield responses.of(event)

    async def tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        model = self._router.model_info(request.model)
        if request.WhichOneof("input") is None:
            raise InvalidRequest("Missing required parameter: 'prompt'.", "prompt")
        prompt = _chat(request.chat) if request.HasField("chat") else request.prompt
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        token_ids = await self._router.tokenize(model.name, prompt, add_special_tokens=special)
        return pb.TokenizeResponse(token_ids=token_ids, max_model_len=model.max_model_len)

    async def detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        model = self._router.model_info(request.model)
        text = await self._router.detokenize(model.name, tuple(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def model_info(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        info = self._router.model_info()
        return pb.GetModelInfoResponse(
            model=info.name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            has_chat_template=info.has_chat_template,
            fingerprint=info.fingerprint,
        )

    async def abort(self, request: pb.AbortGenerationRequest, context: Context) -> pb.AbortGenerationResponse:
        """Of a request that is over, or never was, nothing is said: it does not run."""
        if not request.request_id:
            raise InvalidRequest("request_id is empty", "request_id")
        await self._router.abort(RequestId(request.request_id))
        return pb.AbortGenerationResponse()


def _input(request: pb.GenerateRequest, context: Context) -> GenerateInput:
    """Raises InvalidRequest. The call's deadline and the request's own: the earlier one counts."""
    remaining: float | None = context.time_remaining()
    return GenerateInput(
        request_id=RequestId(check_request_id(request.request_id)) if request.request_id else new_request_id(),
        model=check_model(request.model),
        prompt=_prompt(request),
        sampling=sampling_from_proto(request.sampling),
        priority=request.priority,
        cache_salt=request.cache_salt,
        session=_metadata(context, SESSION_KEY),
        traceparent=_metadata(context, TRACEPARENT),
        timeout_ms=shorter_timeout(
            request.timeout_ms or None, None if remaining is None else max(1, int(remaining * 1000))
        ),
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        echo=request.echo,
    )


def _metadata(context: Context, key: str) -> str:
    """Empty where there is none of the key."""
    value = dict(context.invocation_metadata() or ()).get(key, "")
    return value if isinstance(value, str) else value.decode("latin-1")


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...] | Chat:
    match request.WhichOneof("input"):
        case "prompt":
            return request.prompt
        case "prompt_token_ids":
            return tuple(request.prompt_token_ids.ids)
        case "chat":
            return _chat(request.chat)
        case _:
            raise InvalidRequest("Missing required parameter: 'prompt'.", "prompt")


def _chat(chat: pb.Chat) -> Chat:
    return Chat(
        messages=tuple(
            chat_message(message.role, message.content, message.name, index)
            for index, message in enumerate(chat.messages)
        ),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
    )
