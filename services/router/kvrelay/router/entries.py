"""Log-probabilities as clients see them: token ids become text and bytes."""

from collections.abc import Sequence

from kvrelay.common.request import PositionLogprobs, TokenLogprob
from kvrelay.common.text import Detokenizer
from kvrelay.common.tokenizer import Tokenizer
from kvrelay.router.job import PositionEntry, TokenEntry


class Entries:
    """Reads tokens by one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def at(self, position: PositionLogprobs, text_offset: int) -> PositionEntry:
        return PositionEntry(
            chosen=self._entry(position.chosen),
            top=tuple(self._entry(entry) for entry in position.top),
            text_offset=text_offset,
        )

    def _entry(self, entry: TokenLogprob) -> TokenEntry:
        data = self._tokenizer.token_bytes(entry.token_id)
        return TokenEntry(
            token_id=entry.token_id,
            text=data.decode("utf-8", "replace"),
            utf8=data,
            logprob=entry.logprob,
            rank=entry.rank,
        )

    def of_prompt(self, tokens: Sequence[int], positions: Sequence[PositionLogprobs]) -> tuple[PositionEntry, ...]:
        """`positions` are those of the second token and its followers."""
        if not positions:
            return ()
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        offset = 0
        entries = []
        for token, position in zip(tokens, positions, strict=False):
            offset += len(detokenizer.push((token,)))
            entries.append(self.at(position, offset))
        return tuple(entries)

    def text(self, tokens: Sequence[int]) -> str:
        """Special tokens by their names."""
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
