"""A body's fields to sampling parameters: null is the default, other names are translated."""

from collections.abc import Mapping

import msgspec

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.request import SamplingParams
from kvrelay.router.http.schemas import ChatBody, CompletionBody, GenerateBody

_SAME_NAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def completion_sampling(body: CompletionBody) -> SamplingParams:
    """With `echo`, `logprobs` asks for those of the prompt as well."""
    given = _given(body)
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            given["prompt_logprobs"] = body.logprobs
    return msgspec.structs.replace(SamplingParams(max_tokens=body.max_tokens), **given)


def chat_sampling(body: ChatBody) -> SamplingParams:
    """Raises InvalidRequest for `top_logprobs` without `logprobs`."""
    given = _given(body)
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidRequest("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return msgspec.structs.replace(SamplingParams(max_tokens=max_tokens), **given)


def chat_names(body: ChatBody) -> Mapping[str, str]:
    """What this client called the fields that the core knows by another name."""
    names = {"logprobs": "top_logprobs", "prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def _given(body: GenerateBody) -> dict[str, object]:
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.stop_token_ids is not None:
        given["stop_token_ids"] = tuple(body.stop_token_ids)
    return given
