"""What each token adds to a text, in bytes, and the rule by which a tokenizer joins tokens into text.

Of the decoders that tokenizer.json can name, those of the supported model families are known: byte-level BPE (ByteLevel),
and SentencePiece's, with `▁` for a space and `<0xAB>` for a single byte (Replace, ByteFallback, Fuse, Strip; Metaspace).
"""

import dataclasses
import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN_STEPS = re.compile(r"(ByteLevel |Metaspace |(Replace )*(ByteFallback )?(Fuse (Strip )?)?)")


@dataclasses.dataclass(frozen=True, slots=True)
class JoinRule:
    """How tokens become text. `byte_level`: their characters stand for bytes. Else: `replacements` are made in each token,
    runs of byte tokens become characters (`byte_fallback`), `strip` names a character and how many of it the text loses
    at its start, and the first token loses all `first_loses`."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: tuple[str, int] = ("", 0)
    first_loses: str = ""


def join_rule(backend: Backend) -> JoinRule:
    """Raises ValueError for a decoder that is not known."""
    if backend.decoder is None:
        raise ValueError("the tokenizer has no decoder")
    described: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    names = "".join(f"{step['type']} " for step in steps)
    if not _KNOWN_STEPS.fullmatch(names):
        raise ValueError(f"the tokenizer's decoder is not supported: {names}")
    rule = JoinRule()
    for step in steps:
        rule = dataclasses.replace(rule, **_part(step))
        if step["type"] == "Replace":
            replacement = (_literal(step["pattern"]), step["content"])
            rule = dataclasses.replace(rule, replacements=(*rule.replacements, replacement))
    return rule


def _part(step: dict[str, Any]) -> dict[str, Any]:
    match step["type"]:
        case "ByteLevel":
            return {"byte_level": True}
        case "ByteFallback":
            return {"byte_fallback": True}
        case "Strip" if step["stop"] != 0:
            raise ValueError("the tokenizer's decoder strips the end of a text: not supported")
        case "Strip":
            return {"strip": (step["content"], step["start"])}
        case "Metaspace":
            mark = step["replacement"]
            first_loses = "" if step["prepend_scheme"] == "never" else mark
            return {"replacements": ((mark, " "),), "first_loses": first_loses}
    return {}


def _literal(pattern: dict[str, str]) -> str:
    if "String" not in pattern:
        raise ValueError(f"the tokenizer's decoder replaces the pattern {pattern}: not supported")
    return pattern["String"]


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one visible character: itself where it is one, else the next from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(visible))
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTES = _byte_of_character()


class Pieces(dict[int, bytes]):
    """Token id → its bytes, made when first asked for; an id without a token has none.

    A token of SentencePiece has its space, also where a text that it starts would lose it.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self.rule = join_rule(backend)
        added = backend.get_added_tokens_decoder()
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_tokens = frozenset(self._find_byte_tokens())

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        piece = self[token_id] = self._bytes_of(token_id, token)
        return piece

    def _bytes_of(self, token_id: int, token: str) -> bytes:
        if self.rule.byte_level:
            known = [_BYTES.get(character) for character in token]
            return token.encode() if None in known else bytes(b for b in known if b is not None)
        if token_id in self.byte_tokens:
            return bytes([int(token[3:5], 16)])
        for old, new in self.rule.replacements:
            token = token.replace(old, new)
        return token.encode()

    def _find_byte_tokens(self) -> list[int]:
        if not self.rule.byte_fallback:
            return []
        return [token_id for token, token_id in self._backend.get_vocab().items() if _BYTE_TOKEN.fullmatch(token)]
