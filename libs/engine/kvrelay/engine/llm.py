"""The engine offline: prompts in, whole outputs back, in one thread and one process.

llm = LLM("var/models/smollm2", max_num_seqs=16)
for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
    print(output.outputs[0].text)
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
import torch

from kvrelay.common.errors import InvalidRequest, error_from
from kvrelay.common.ids import RequestId
from kvrelay.common.request import ChoiceDelta, EngineRequest, FinishReason, PositionLogprobs, SamplingParams
from kvrelay.common.text import ChoiceText, StopPatterns
from kvrelay.common.tokenizer import Tokenizer
from kvrelay.engine.build import build
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.core import StepUpdate
from kvrelay.engine.messages import Notice, PromptComputed, RequestFailed

Prompt = str | Seq[int]
"""Text, or token ids."""
Conversation = Seq[Mapping[str, str]]
"""Messages: `role` and `content` of each."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. A token that ended it (end of sequence, a stop token) is in `token_ids` and not in `text`."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    """As many as `token_ids`, where asked for."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string, or the id of the token that ended the choice."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: RequestId
    prompt: str | None
    """None for a prompt of token ids."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PositionLogprobs, ...]
    """Of the prompt's second token and all that follow, where asked for."""
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    """Prompt tokens that were not computed."""


class _Choice:
    """A choice that is being generated."""

    def __init__(self, index: int, text: ChoiceText, *, watched: bool) -> None:
        """`watched`: a stop string may end it, so that its text is looked at with each token, and else at the end."""
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._text = text
        self._watched = watched
        self._unread: list[int] = []
        self._shown: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._stop_reason: str | int | None = None

    def take(self, delta: ChoiceDelta) -> bool:
        """Whether a stop string ended the choice, which the engine does not know."""
        if self.finish_reason is not None:
            return False
        self._logprobs += delta.logprobs
        self._unread += delta.token_ids
        if not self._watched and delta.finish_reason is None:
            return False
        text = self._text.push(
            self._unread, finished=delta.finish_reason is not None, stop_token_id=delta.stop_token_id
        )
        self._shown.append(text.text)
        self.token_ids += self._unread[: text.num_tokens]
        self._unread.clear()
        if delta.logprobs:
            del self._logprobs[len(self.token_ids) :]
        stopped = isinstance(text.stop_reason, str)
        self.finish_reason = FinishReason.STOP if stopped else delta.finish_reason
        self._stop_reason = text.stop_reason
        return stopped and delta.finish_reason is None

    def output(self) -> CompletionOutput:
        assert self.finish_reason is not None, "the choice goes on"
        return CompletionOutput(
            self._index,
            "".join(self._shown),
            tuple(self.token_ids),
            tuple(self._logprobs),
            self.finish_reason,
            self._stop_reason,
        )


class _Request:
    """A request that is being generated."""

    def __init__(self, request: EngineRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        self.request = request
        sampling, stops = request.sampling, StopPatterns(request.sampling.stop)
        self.choices = [
            _Choice(
                i,
                ChoiceText(tokenizer, sampling, prompt_token_ids=request.prompt_token_ids, stops=stops),
                watched=bool(sampling.stop),
            )
            for i in range(sampling.n)
        ]
        self._prompt = prompt
        self._computed = PromptComputed(num_cached_tokens=0)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def note(self, notice: Notice) -> None:
        """Raises the error that ended the request."""
        match notice.kind:
            case RequestFailed(code=code, message=message):
                raise error_from(code, message)
            case PromptComputed() as computed:
                self._computed = computed

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request.request_id,
            self._prompt,
            self.request.prompt_token_ids,
            self._computed.prompt_logprobs,
            tuple(choice.output() for choice in self.choices),
            self._computed.num_cached_tokens,
        )


def _silent(what: str, done: int, total: int) -> None:
    pass


class LLM:
    """A model to call in one's own process. Not for use by several threads at once."""

    def __init__(
        self, model: str | Path, *, on_progress: Callable[[str, int, int], None] = _silent, **options: object
    ) -> None:
        """Loads the model from its folder; `options` are `EngineConfig`'s.

        Raises TypeError for an unknown option, ValueError for one out of range, KvrelayError where the model does not load.
        """
        config = msgspec.structs.replace(EngineConfig(model=Path(model)), **options)
        if config.threads:
            torch.set_num_threads(config.threads)
        self.tokenizer = Tokenizer(config.model)
        built = build(config, on_progress)
        self.engine = built.engine
        self.attention = built.attention
        """The backend, and the reason for it in words."""
        self._vocab_size = built.loaded.vocab_size
        self._seeds = random.Random(config.seed)
        self._count = 0

    def generate(
        self, prompts: Seq[Prompt], sampling: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """One output a prompt, in their order. `sampling` for all of them, or one each; seeds are assigned where not set.

        Raises InvalidRequest, naming the field, before anything is computed.
        """
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        tokens = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return self._generate(texts, tokens, sampling)

    def chat(
        self, conversations: Seq[Conversation], sampling: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """The answer to each conversation, through the model's chat template. Raises as `generate` does."""
        texts = [self.tokenizer.render(messages) for messages in conversations]
        tokens = [self.tokenizer.encode(text, add_special_tokens=False, param="messages") for text in texts]
        return self._generate(texts, tokens, sampling)

    def _generate(
        self,
        texts: Seq[str | None],
        tokens: Seq[Seq[int]],
        sampling: SamplingParams | Seq[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(tokens)
        if len(sampling) != len(tokens):
            raise InvalidRequest(f"{len(tokens)} prompts and {len(sampling)} sampling parameters", "sampling")
        requests = [self._request(ids, params) for ids, params in zip(tokens, sampling, strict=True)]
        pending = {
            request.request_id: _Request(request, text, self.tokenizer)
            for request, text in zip(requests, texts, strict=True)
        }
        self._run(pending)
        return [pending[request.request_id].output() for request in requests]

    def _request(self, tokens: Seq[int], sampling: SamplingParams) -> EngineRequest:
        sampling.validate(self._vocab_size)
        outside = [token for token in tokens if not 0 <= token < self._vocab_size]
        if outside:
            raise InvalidRequest(f"token id {outside[0]} is outside the vocabulary of {self._vocab_size}", "prompt")
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._seeds.getrandbits(63))
        self._count += 1
        request_id = RequestId(f"llm-{self._count}")
        request = EngineRequest(request_id=request_id, prompt_token_ids=tuple(tokens), sampling=sampling)
        self.engine.limits.check(request)
        return request

    def _run(self, pending: dict[RequestId, _Request]) -> None:
        try:
            for entry in pending.values():
                self.engine.add(entry.request)
            while not all(entry.finished for entry in pending.values()):
                self._take(self.engine.step(), pending)
        finally:
            self.engine.abort(pending)
            while self.engine.has_work:  # a step in flight, of those that have just ended
                self.engine.step()

    def _take(self, update: StepUpdate, pending: dict[RequestId, _Request]) -> None:
        for notice in update.notices:
            if notice.request_id in pending:
                pending[notice.request_id].note(notice)
        for delta in update.deltas:
            if delta.request_id in pending and pending[delta.request_id].choices[delta.choice].take(delta):
                self.engine.abort_choice(delta.request_id, delta.choice)
