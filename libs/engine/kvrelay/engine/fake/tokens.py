"""What a fake model says: a function of prompt, seed, choice and position alone, so that pods, batches and retries agree."""

import hashlib
import struct
from collections.abc import Sequence

from kvrelay.common.request import EngineRequest, FinishReason, PositionLogprobs, SamplingParams, TokenLogprob
from kvrelay.engine.fake.config import FakeConfig

_FORCING_BIAS = 50.0


class Speaker:
    """The outputs of one request."""

    def __init__(self, request: EngineRequest, config: FakeConfig) -> None:
        self._config = config
        self._sampling = request.sampling
        self._num_prompt = len(request.prompt_token_ids)
        prompt = struct.pack(f"<{self._num_prompt}I", *request.prompt_token_ids)
        self._state = hashlib.sha256(prompt)

    def token(self, choice: int, index: int) -> int:
        """The token at `index` of the choice's output. Greedy choices are all alike; a bias of 50 or more decides."""
        sampling = self._sampling
        if self._ends_here(index):
            return self._config.eos_token_ids[0]
        bias = max(sampling.logit_bias.items(), key=lambda entry: entry[1], default=(0, 0.0))
        if bias[1] >= _FORCING_BIAS:
            return bias[0]
        seed, drawn = (0, 0) if sampling.greedy else (sampling.seed or 0, choice)
        state = self._state.copy()
        state.update(struct.pack("<qII", seed, drawn, index))
        token = int.from_bytes(state.digest()[:8], "little") % self._config.vocab_size
        while token in self._config.eos_token_ids:
            token = (token + 1) % self._config.vocab_size
        return token

    def _ends_here(self, index: int) -> bool:
        length = max(self._config.natural_length, self._sampling.min_tokens + 1)
        return bool(self._config.eos_token_ids) and not self._sampling.ignore_eos and index == length - 1

    def finish(self, token: int, index: int) -> tuple[FinishReason | None, int | None]:
        """Whether the token at `index` ends the choice, and which stop token did."""
        sampling = self._sampling
        ends = token in self._config.eos_token_ids and not sampling.ignore_eos
        if index >= sampling.min_tokens and (ends or token in sampling.stop_token_ids):
            return FinishReason.STOP, token
        if index + 1 >= self.limit:
            return FinishReason.LENGTH, None
        return None, None

    @property
    def limit(self) -> int:
        """Of a choice's output, in tokens."""
        room = self._config.max_model_len - self._num_prompt
        return room if self._sampling.max_tokens is None else min(room, self._sampling.max_tokens)

    @property
    def expected(self) -> int:
        """How many tokens a choice will have, if nothing stops it early."""
        goes_on = self._sampling.ignore_eos or not self._config.eos_token_ids
        return (
            self.limit if goes_on else min(self.limit, max(self._config.natural_length, self._sampling.min_tokens + 1))
        )

    def logprobs(self, token: int) -> tuple[PositionLogprobs, ...]:
        return _position(token, self._sampling.logprobs, self._config.vocab_size)


def prompt_logprobs(tokens: Sequence[int], sampling: SamplingParams, vocab_size: int) -> tuple[PositionLogprobs, ...]:
    """From the second token on."""
    return tuple(at for token in tokens[1:] for at in _position(token, sampling.prompt_logprobs, vocab_size))


def _position(token: int, count: int | None, vocab_size: int) -> tuple[PositionLogprobs, ...]:
    if count is None:
        return ()
    top = tuple(
        TokenLogprob(token_id=(token + rank) % vocab_size, logprob=-0.5 * (rank + 1), rank=rank + 1)
        for rank in range(min(count, vocab_size))
    )
    return (PositionLogprobs(chosen=TokenLogprob(token_id=token, logprob=-0.5, rank=1), top=top),)
