"""The text of one choice: detokenized as it comes, ended by stop strings, aligned with its tokens where asked for."""

import dataclasses
from collections.abc import Sequence

from kvrelay.common.request import SamplingParams
from kvrelay.common.text.detokenizer import Detokenizer
from kvrelay.common.text.stops import StopPatterns, StopStrings
from kvrelay.common.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class TokenText:
    """One token as OpenAI's log-probabilities show it. `offset`: where it begins in the choice's text, in characters;
    a token that begins inside a character has the offset of that character."""

    token_id: int
    text: str
    data: bytes
    offset: int


@dataclasses.dataclass(slots=True)
class TextDelta:
    """What a push adds. `num_tokens` of it count: those after a stop string do not. `tokens` are these, if aligned."""

    text: str = ""
    num_tokens: int = 0
    finished: bool = False
    stop_reason: str | int | None = None
    """The stop string or the stop token's id, where one ended the choice."""
    tokens: list[TokenText] = dataclasses.field(default_factory=list)


class ChoiceText:
    """`stops` are `params.stop` compiled, for several choices of one request; with `align` each token's text comes too.

    A stop string does not count before more than `min_tokens` tokens have come, as end-of-sequence does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        stops: StopPatterns | None = None,
        align: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt_token_ids
        )
        self._stops = StopStrings(stops or StopPatterns(params.stop), params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._bulk = not params.stop and not align
        self._align = align
        self._length = 0
        self.num_tokens = 0
        self.finished = False

    def push(self, token_ids: Sequence[int], *, finished: bool = False, stop_token_id: int | None = None) -> TextDelta:
        """The next tokens. `finished`: no more come; `stop_token_id`: the last of them is this one, and not in the text.

        After the end (a stop string, or `finished`) whatever else comes is ignored.
        """
        delta = TextDelta()
        if self.finished:
            return delta
        shown = token_ids if stop_token_id is None else token_ids[:-1]
        if self._bulk:
            delta.text = self._detokenizer.push(shown)
            delta.num_tokens = len(shown)
            self.num_tokens += len(shown)
        else:
            self._push_each(shown, delta)
        if not self.finished and stop_token_id is not None:
            self._count(stop_token_id, delta)
            delta.stop_reason = stop_token_id
        if not self.finished and finished:
            self._finish(delta)
        delta.finished = self.finished
        return delta

    def _push_each(self, token_ids: Sequence[int], delta: TextDelta) -> None:
        for token_id in token_ids:
            self._count(token_id, delta)
            self._add(self._detokenizer.push((token_id,)), delta)
            if self.finished:
                return

    def _count(self, token_id: int, delta: TextDelta) -> None:
        self.num_tokens += 1
        delta.num_tokens += 1
        if self._align:
            data = self._tokenizer.token_bytes(token_id)
            delta.tokens.append(TokenText(token_id, data.decode("utf-8", "replace"), data, self._length))

    def _add(self, text: str, delta: TextDelta) -> None:
        self._length += len(text)
        shown, stop = self._stops.push(text, armed=self.num_tokens > self._min_tokens)
        delta.text += shown
        if stop is not None:
            self.finished = True
            delta.stop_reason = stop

    def _finish(self, delta: TextDelta) -> None:
        self._add(self._detokenizer.flush(), delta)
        if not self.finished:
            delta.text += self._stops.flush()
        self.finished = True
