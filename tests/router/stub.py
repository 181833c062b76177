"""A router without pods: bytes are its tokens, and it always knows what it will say."""

import asyncio
import time
from collections.abc import AsyncGenerator

import msgspec

from kvrelay.common.errors import Cancelled, ContextLengthExceeded, InvalidRequest, KvrelayError, ModelNotFound
from kvrelay.common.ids import Fingerprint, RequestId
from kvrelay.common.request import EngineRequest, FinishReason
from kvrelay.router.job import (
    Chat,
    ChoiceEvent,
    Event,
    GenerateInput,
    ModelInfo,
    PositionEntry,
    PreparedRequest,
    PromptEvent,
    Readiness,
    TokenEntry,
    UsageEvent,
)

MODEL = "stub"
VOCAB = 300
MAX_LEN = 512
EOS = 256
SPEECH = "The relay passes the baton – wärmer, schneller 🏃 and on it goes. "


class StubRouter:
    """Says `SPEECH` from the place that its seed and choice name, over and over. Keeps `kvrelay.router.job.Inference`.

    `failure` is raised before token `fail_at` of the first choice. While `gate` is closed, nothing comes after token `stall_at`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.prepared: list[GenerateInput] = []
        self.generated: list[RequestId] = []
        self.running: dict[RequestId, asyncio.Event] = {}
        self.closed: asyncio.Queue[RequestId] = asyncio.Queue()
        self.failure: KvrelayError | None = None
        self.fail_at = 0
        self.stall_at: int | None = None
        self.stalled = asyncio.Event()
        self.gate = asyncio.Event()
        self.readiness = Readiness(ready=True, reason="1 pod")
        self.info = ModelInfo(
            name=MODEL,
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            has_chat_template=True,
            fingerprint=Fingerprint("0123456789abcdef"),
            created=1_700_000_000,
        )

    def models(self) -> tuple[ModelInfo, ...]:
        return (self.info,)

    def model_info(self, model: str = "") -> ModelInfo:
        if model not in ("", MODEL):
            raise ModelNotFound(f"The model `{model}` does not exist.", "model")
        return self.info

    def ready(self) -> Readiness:
        return self.readiness

    async def prepare(self, source: GenerateInput) -> PreparedRequest:
        self.model_info(source.model)
        tokens = await self._tokens(source.prompt)
        source.sampling.validate(VOCAB)
        if not -(2**31) <= source.priority < 2**31:
            raise InvalidRequest("priority is out of range", "priority")
        if source.timeout_ms is not None and source.timeout_ms < 1:
            raise InvalidRequest("timeout_ms must be positive", "timeout_ms")
        room = MAX_LEN - len(tokens)
        sampling = source.sampling
        if room < 1:
            raise ContextLengthExceeded(f"the prompt is over {MAX_LEN} tokens", _field(source.prompt))
        if (sampling.max_tokens or 1) > room:
            raise ContextLengthExceeded(f"prompt and output are over {MAX_LEN} tokens", "max_tokens")
        sampling = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens or room, seed=sampling.seed or 0)
        self.prepared.append(source)
        request = EngineRequest(
            request_id=source.request_id,
            prompt_token_ids=tokens,
            sampling=sampling,
            timeout_ms=source.timeout_ms or 60_000,
        )
        now = time.monotonic()
        return PreparedRequest(
            input=source, request=request, deadline=now + request.timeout_ms / 1000, arrival=now, created=1_700_000_001
        )

    async def _tokens(self, prompt: str | tuple[int, ...] | Chat) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            for token in prompt:
                if not 0 <= token < VOCAB:
                    raise InvalidRequest(f"token id {token} is outside the vocabulary", "prompt")
            tokens = prompt
        else:
            tokens = await self.tokenize(MODEL, prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty", _field(prompt))
        return tokens

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[Event, None]:
        request = prepared.request
        self.generated.append(request.request_id)
        aborted = self.running[request.request_id] = asyncio.Event()
        try:
            prompt = prepared.request.prompt_token_ids
            voices = [list(_speak(prepared, choice)) for choice in range(request.sampling.n)]
            self._maybe_fail(0)
            await self._maybe_stall(0, aborted)
            yield self._prompt_event(prepared)
            for step in range(max(len(voice) for voice in voices)):
                if step:
                    self._maybe_fail(step)
                    await self._maybe_stall(step, aborted)
                for voice in voices:
                    if step < len(voice):
                        yield voice[step]
                await asyncio.sleep(0)
            total = sum(len(event.token_ids) for voice in voices for event in voice)
            yield UsageEvent(prompt_tokens=len(prompt), completion_tokens=total, cached_tokens=len(prompt) // 16 * 16)
        finally:
            del self.running[request.request_id]
            self.closed.put_nowait(request.request_id)

    def _prompt_event(self, prepared: PreparedRequest) -> PromptEvent:
        tokens = prepared.request.prompt_token_ids
        top = prepared.request.sampling.prompt_logprobs
        offsets = _offsets(tokens)
        positions = [_position(token, at, top or 0, offsets[at]) for at, token in enumerate(tokens)]
        return PromptEvent(
            token_ids=tokens,
            num_cached_tokens=len(tokens) // 16 * 16,
            text=_text(tokens) if prepared.input.echo else "",
            prompt_logprobs=tuple(positions[1:]) if top is not None else (),
        )

    def _maybe_fail(self, step: int) -> None:
        if self.failure is not None and step == self.fail_at:
            raise self.failure

    async def _maybe_stall(self, step: int, aborted: asyncio.Event) -> None:
        if step == self.stall_at:
            self.stalled.set()
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, aborted)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if aborted.is_set():
            raise Cancelled("the request was aborted")

    async def abort(self, request_id: RequestId) -> bool:
        if request_id not in self.running:
            return False
        self.running[request_id].set()
        return True

    async def tokenize(
        self, model: str, prompt: str | Chat, *, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        self.model_info(model)
        if isinstance(prompt, Chat):
            if not prompt.messages:
                return ()
            text = "".join(f"<{message.role}>{message.content}\n" for message in prompt.messages)
            return tuple((text + ("<assistant>" if prompt.add_generation_prompt else "")).encode())
        return tuple(prompt.encode())

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        self.model_info(model)
        if not all(0 <= token < VOCAB for token in token_ids):
            raise InvalidRequest("a token id is outside the vocabulary", "tokens")
        return _text(token_ids)


def _field(prompt: str | tuple[int, ...] | Chat) -> str:
    return "messages" if isinstance(prompt, Chat) else "prompt"


def _speak(prepared: PreparedRequest, choice: int) -> list[ChoiceEvent]:
    """One event a token. A character's text comes with its last byte; a stop string is looked for in the whole."""
    sampling = prepared.request.sampling
    assert sampling.max_tokens is not None
    data = SPEECH.encode()
    start = (sampling.seed or 0) + 7 * choice
    tokens = [data[(start + at) % len(data)] for at in range(sampling.max_tokens)]
    finish, stop_reason, end = FinishReason.LENGTH, None, len(_text(tuple(tokens)))
    for stop in sampling.stop:
        found = _text(tuple(tokens)).find(stop)
        if 0 <= found < end:
            finish, stop_reason, end = FinishReason.STOP, stop, found
            tokens = tokens[: len(_text(tuple(tokens))[: found + len(stop)].encode())]
    return list(_events(choice, tokens, end, finish, stop_reason, sampling.logprobs))


def _events(
    choice: int, tokens: list[int], end: int, finish: FinishReason, stop_reason: str | None, top: int | None
) -> list[ChoiceEvent]:
    events = []
    offsets = _offsets(tuple(tokens))
    sent = 0
    for at, token in enumerate(tokens):
        last = at + 1 == len(tokens)
        upto = min(end, len(_text(tuple(tokens))) if last else offsets[at + 1])
        events.append(
            ChoiceEvent(
                choice=choice,
                text=_text(tuple(tokens))[sent:upto],
                token_ids=(token,),
                logprobs=(_position(token, at, top, offsets[at]),) if top is not None else (),
                finish_reason=finish if last else None,
                stop_reason=stop_reason if last else None,
            )
        )
        sent = max(sent, upto)
    return events


def _text(tokens: tuple[int, ...]) -> str:
    return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


def _offsets(tokens: tuple[int, ...]) -> list[int]:
    """Of each token: the characters that are whole before it."""
    return [
        len(bytes(token for token in tokens[:at] if token < 256).decode("utf-8", "ignore")) for at in range(len(tokens))
    ]


def _position(token: int, at: int, top: int, offset: int) -> PositionEntry:
    chosen = _entry(token, -0.5 - at / 64, 1)
    others = [_entry((token + rank) % 256, -0.5 - at / 64 - rank, rank + 1) for rank in range(1, top)]
    return PositionEntry(chosen=chosen, top=(chosen, *others) if top else (), text_offset=offset)


def _entry(token: int, logprob: float, rank: int) -> TokenEntry:
    utf8 = bytes([token]) if token < 256 else b""
    return TokenEntry(token_id=token, text=utf8.decode("utf-8", "replace"), utf8=utf8, logprob=logprob, rank=rank)
