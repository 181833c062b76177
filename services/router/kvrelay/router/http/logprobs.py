"""Log-probabilities in the three shapes that clients know: completions, chat, and `prompt_logprobs`."""

import dataclasses
from collections.abc import Sequence

from kvrelay.router.job import PositionEntry, PromptEvent, TokenEntry

_LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this instead."""


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _is_text(entry: TokenEntry) -> bool:
    """Not a part of a character, or bytes that are none."""
    return "\ufffd" not in entry.text or entry.utf8 == entry.text.encode()


def _escaped(entry: TokenEntry) -> str:
    return "".join(f"\\x{byte:02x}" for byte in entry.utf8)


def _completion_token(entry: TokenEntry) -> str:
    return entry.text if _is_text(entry) else f"bytes:{_escaped(entry)}"


def _chat_token(entry: TokenEntry) -> dict[str, object]:
    return {
        "token": entry.text if _is_text(entry) else _escaped(entry),
        "logprob": _finite(entry.logprob),
        "bytes": list(entry.utf8),
    }


@dataclasses.dataclass(slots=True)
class CompletionLogprobs:
    """The four parallel lists of a text completion. Without alternatives asked for, `top_logprobs` is null."""

    with_top: bool
    tokens: list[str] = dataclasses.field(default_factory=list)
    token_logprobs: list[float | None] = dataclasses.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = dataclasses.field(default_factory=list)
    text_offset: list[int] = dataclasses.field(default_factory=list)

    def add_prompt(self, prompt: PromptEvent) -> None:
        """Of an echoed prompt: its first token has no log-probability."""
        later = prompt.prompt_logprobs
        self.tokens.append(prompt.text[: later[0].text_offset] if later else prompt.text)
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(0)
        self.add(later, 0)

    def add(self, positions: Sequence[PositionEntry], shift: int) -> None:
        """`shift`: characters of the text before the one that the positions count in."""
        for at in positions:
            self.tokens.append(_completion_token(at.chosen))
            self.token_logprobs.append(_finite(at.chosen.logprob))
            if self.with_top:
                self.top_logprobs.append(_by_text(at))
            self.text_offset.append(at.text_offset + shift)

    def shape(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if self.with_top else None,
            "text_offset": self.text_offset,
        }


def _by_text(at: PositionEntry) -> dict[str, float]:
    """The most likely ones and the chosen one. Of two tokens with one text the likelier stands."""
    found: dict[str, float] = {}
    for entry in (*at.top, at.chosen):
        found.setdefault(_completion_token(entry), _finite(entry.logprob))
    return found


def chat_logprobs(positions: Sequence[PositionEntry]) -> list[dict[str, object]]:
    return [{**_chat_token(at.chosen), "top_logprobs": [_chat_token(entry) for entry in at.top]} for at in positions]


def prompt_logprobs(prompt: PromptEvent) -> list[dict[str, dict[str, object]] | None]:
    """One a prompt token, by token id; null for the first."""
    return [None, *(_by_id(at) for at in prompt.prompt_logprobs)]


def _by_id(at: PositionEntry) -> dict[str, dict[str, object]]:
    return {
        str(entry.token_id): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.text,
        }
        for entry in (at.chosen, *at.top)
    }
