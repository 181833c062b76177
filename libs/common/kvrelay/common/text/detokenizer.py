"""Tokens to text, as they come: each push gives what later tokens can no longer change."""

import codecs
from collections.abc import Sequence

from kvrelay.common.pieces import Pieces
from kvrelay.common.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice. All that it gives, joined, is the tokenizer's decoding of all tokens at once.

    `prompt_token_ids` are what the tokens follow: a text that goes on keeps its first space, and may complete a character
    that the prompt began. The time of a push depends on its tokens alone.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        pieces = tokenizer.pieces
        hidden = pieces.special if skip_special_tokens else frozenset[int]()
        begun = _unfinished(pieces, hidden, prompt_token_ids)
        self._pieces = pieces
        self._hidden = hidden
        self._joiner: _Bytes | _Runs
        if pieces.rule.byte_level:
            self._joiner = _Bytes(pieces, begun)
        else:
            self._joiner = _Runs(pieces, begun, at_start=not _shows(pieces, hidden, prompt_token_ids))

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._hidden.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._joiner.push(token_ids)

    def flush(self) -> str:
        """What was held back, at the end: U+FFFD for bytes that make no character."""
        return self._joiner.flush()


def _shows(pieces: Pieces, hidden: frozenset[int], token_ids: Sequence[int]) -> bool:
    return any(pieces[token_id] and token_id not in hidden for token_id in reversed(token_ids))


def _unfinished(pieces: Pieces, hidden: frozenset[int], token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of a prompt that begin a character."""
    tail = b""
    for token_id in reversed(token_ids):
        if len(tail) >= _LONGEST_CHARACTER:
            break
        tail = (b"" if token_id in hidden else pieces[token_id]) + tail
    decoder = _utf8("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


class _Bytes:
    """Byte-level BPE: all tokens' bytes, decoded together."""

    def __init__(self, pieces: Pieces, begun: bytes) -> None:
        self._pieces = pieces
        self._decoder = _utf8("replace")
        self._decoder.decode(begun)

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        return self._decoder.decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _Runs:
    """SentencePiece: text, and runs of byte tokens. A run is one valid piece of UTF-8 or else nothing but replacement
    characters, so what it says is known when it ends. The start of a text loses its prefix space."""

    def __init__(self, pieces: Pieces, begun: bytes, at_start: bool) -> None:
        self._pieces = pieces
        self._run = bytearray(begun)
        character, count = pieces.rule.strip
        self._strip = character
        self._num_to_strip = count if at_start else 0
        self._first_loses = pieces.rule.first_loses if at_start else ""

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if token_id in self._pieces.byte_tokens:
                self._run += piece
            elif piece:
                parts.append(self._end_run())
                parts.append(self._text(piece))
        return self._stripped("".join(parts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _text(self, piece: bytes) -> str:
        text = piece.decode()
        if self._first_loses:
            text, self._first_loses = text.replace(" ", ""), ""
        return text

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if not text.startswith(self._strip):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text
