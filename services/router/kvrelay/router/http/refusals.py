"""Known fields that ask for what is not supported: refused by name, unless their value asks for nothing."""

from collections.abc import Mapping, Sequence

import msgspec

from kvrelay.common.errors import InvalidRequest, Unsupported

Neutral = Mapping[str, Sequence[object]]
"""Of each unsupported field, the values, besides null, that leave the answer as it is."""

COMMON: Neutral = {
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
COMPLETION: Neutral = {**COMMON, "suffix": (), "prompt_embeds": ()}
CHAT: Neutral = {
    **COMMON,
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
MESSAGE: Neutral = {
    "annotations": ([],),
    "refusal": (),
    "audio": (),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
}
"""An answer's own message, sent back as a part of the conversation, passes."""


def refuse(body: msgspec.Struct, neutral: Neutral, within: str = "") -> None:
    """Raises Unsupported, naming the field, for the first one that asks for something; `within` leads the name."""
    for name, values in neutral.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise Unsupported(f"'{within}{name}' is not supported with this value.", f"{within}{name}")


def refuse_best_of(best_of: int | None, n: int) -> None:
    """All of `best_of` choices are returned, or none is: there is no choosing among them."""
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise InvalidRequest(f"best_of must not be under n: {best_of} < {n}", "best_of")
    raise Unsupported("best_of over n is not supported", "best_of")
