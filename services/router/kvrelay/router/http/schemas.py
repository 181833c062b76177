"""The bodies of requests: names and types. Ranges are checked later, and once for both fronts.

Types are strict: a number in quotes is no number, and true is no integer. A field that is not listed is refused, as OpenAI's
servers do. Fields typed `object` ask for what is not supported: `kvrelay.router.http.refusals` says which values ask for nothing.
"""

from typing import Literal

import msgspec


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """Usage so far in each chunk (an extension)."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common. None is the field's default, as OpenAI reads null."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    # Extensions.
    min_tokens: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_ms: int | None = None
    request_id: str | None = None

    # Known, and not supported.
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    use_beam_search: object = None
    length_penalty: object = None
    bad_words: object = None
    allowed_token_ids: object = None
    logits_processors: object = None
    truncate_prompt_tokens: object = None
    spaces_between_special_tokens: object = None
    return_tokens_as_token_ids: object = None
    kv_transfer_params: object = None
    vllm_xargs: object = None

    @property
    def session(self) -> str:
        """What belongs together, as far as the body says so."""
        return self.user or ""


class CompletionBody(GenerateBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = 16
    """OpenAI's default; null is what is left of the model's length."""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None

    suffix: object = None
    prompt_embeds: object = None


class ContentPart(msgspec.Struct, frozen=True):
    """Parts of other types have further fields: their type alone is refused."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None

    annotations: object = None
    refusal: object = None
    audio: object = None
    function_call: object = None
    tool_calls: object = None
    tool_call_id: object = None


class ChatBody(GenerateBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None

    # They change no answer.
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: dict[str, object] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None

    audio: object = None
    chat_template: object = None
    chat_template_kwargs: object = None
    continue_final_message: object = None
    documents: object = None
    echo: object = None
    function_call: object = None
    functions: object = None
    mm_processor_kwargs: object = None
    modalities: object = None
    moderation: object = None
    parallel_tool_calls: object = None
    prediction: object = None
    reasoning_effort: object = None
    tool_choice: object = None
    tools: object = None
    verbosity: object = None
    web_search_options: object = None

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]
