"""A model's tokenizer and chat template, read from its folder; without torch or transformers."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvrelay.common.errors import InvalidRequest
from kvrelay.common.pieces import Pieces
from kvrelay.common.template import ChatTemplate

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_INLINE_CHARACTERS = 4000
"""Shorter texts are encoded in less time than a thread takes to answer."""


class Tokenizer:
    """Encodes and decodes as transformers' AutoTokenizer of the same folder does. Safe for use by several threads."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError, naming the file, where the folder holds no tokenizer that is supported."""
        config = _read_json(folder / "tokenizer_config.json")
        self.special_tokens = _named_tokens(_read_json(folder / "special_tokens_map.json") | config)
        self._backend = _load_backend(folder, config, self.special_tokens)
        self.pieces = Pieces(self._backend)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the highest token id. A model may have rows for more."""
        self.eos_token_ids = eos_token_ids(folder) or self._named_ids("eos_token")
        source = _template_source(folder, config)
        self._template = ChatTemplate(source, self.special_tokens) if source is not None else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Raises InvalidRequest, naming `param`, if the text is not Unicode (has a lone surrogate)."""
        check_unicode(text, param)
        # The batch call, unlike the single one, lets other threads run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    async def encode_async(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """As `encode`; a long text in a thread, so that the event loop goes on."""
        if len(text) <= _INLINE_CHARACTERS:
            return self.encode(text, add_special_tokens, param=param)
        return await asyncio.to_thread(self.encode, text, add_special_tokens, param=param)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat's prompt as text. Raises InvalidRequest if there is no template, or if it refuses the messages."""
        if self._template is None:
            raise InvalidRequest("the model has no chat template", "messages")
        return self._template.render(messages, add_generation_prompt)

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The chat's prompt as tokens. The template writes the special tokens, so none are added: no second BOS."""
        return self.encode(self.render(messages, add_generation_prompt), add_special_tokens=False, param="messages")

    async def chat_async(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        text = self.render(messages, add_generation_prompt)
        return await self.encode_async(text, add_special_tokens=False, param="messages")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Incomplete or invalid UTF-8 becomes U+FFFD; ids without a token are left out."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text, a special one by its name; U+FFFD for bytes that are no character by themselves."""
        return self.pieces[token_id].decode("utf-8", "replace")

    def _named_ids(self, name: str) -> tuple[int, ...]:
        token_id = self._backend.token_to_id(self.special_tokens.get(name, ""))
        return () if token_id is None else (token_id,)


def check_unicode(text: str, param: str) -> None:
    """Raises InvalidRequest if `text` cannot be encoded in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} has a lone surrogate at character {error.start}", param) from error


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """What ends a text by the model's generation_config.json, or else config.json; empty if neither says."""
    for name in ("generation_config.json", "config.json"):
        found = _read_json(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def _read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}


def _load_backend(folder: Path, config: dict[str, Any], named: dict[str, str]) -> Backend:
    """tokenizer.json, which alone says where BOS and EOS go, and the special tokens that only the configuration has."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"there is no {path}")
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    added = [AddedToken(**token) for _, token in declared if token["content"] not in known]
    known |= {token.content for token in added}
    added += [AddedToken(token, special=True) for token in dict.fromkeys(named.values()) if token not in known]
    backend.add_tokens(added)
    return backend


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return None if found is None else str(found)
