"""The router's events as messages of `kvrelay.v1`."""

from collections.abc import Iterable

from kvrelay.common.ids import RequestId
from kvrelay.common.wire import finish_to_proto
from kvrelay.router.job import ChoiceEvent, Event, PositionEntry, PromptEvent, TokenEntry
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import types_pb2


class Responses:
    """Of one request. An echoed prompt leads each choice's first text."""

    def __init__(self, request_id: RequestId) -> None:
        self._request_id = request_id
        self._echo = ""
        self._begun: set[int] = set()

    def of(self, event: Event) -> pb.GenerateResponse:
        if isinstance(event, ChoiceEvent):
            return pb.GenerateResponse(request_id=self._request_id, choice=self._choice(event))
        if isinstance(event, PromptEvent):
            self._echo = event.text
            prompt = pb.PromptInfo(token_ids=event.token_ids, prompt_logprobs=_positions(event.prompt_logprobs))
            return pb.GenerateResponse(request_id=self._request_id, prompt=prompt)
        usage = pb.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
        )
        return pb.GenerateResponse(request_id=self._request_id, usage=usage)

    def _choice(self, event: ChoiceEvent) -> pb.ChoiceOutput:
        text = event.text
        if self._echo and event.choice not in self._begun:
            self._begun.add(event.choice)
            text = self._echo + text
        return pb.ChoiceOutput(
            choice=event.choice,
            text=text,
            token_ids=event.token_ids,
            logprobs=_positions(event.logprobs),
            finish_reason=finish_to_proto(event.finish_reason),
            stop_reason="" if event.stop_reason is None else str(event.stop_reason),
        )


def _positions(entries: Iterable[PositionEntry]) -> list[types_pb2.PositionLogprobs]:
    return [
        types_pb2.PositionLogprobs(chosen=_token(at.chosen), top=[_token(entry) for entry in at.top]) for at in entries
    ]


def _token(entry: TokenEntry) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)
