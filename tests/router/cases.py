"""The table of cases that runs through both fronts: one neutral request each, and what must come of it.

`Case.http()` and `Case.grpc()` render it; `tests.router.answers` reads both answers into one form.
"""

import dataclasses
from typing import Any

from kvrelay.common.request import SamplingParams
from kvrelay.common.wire import sampling_to_proto
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import types_pb2

Prompt = str | tuple[int, ...] | list[dict[str, str]]
"""Text, token ids, or a chat's messages."""


@dataclasses.dataclass(frozen=True)
class Case:
    """`sampling` by the names of `SamplingParams`, `extras` by those of the request.

    `error` is the error's code, `param` the field it names (`http_param` where HTTP calls it otherwise). Without an error,
    `finish` is each choice's reason and `num_tokens` each choice's length, where the case fixes them.
    """

    name: str
    prompt: Prompt = "Once upon a time"
    sampling: dict[str, Any] = dataclasses.field(default_factory=lambda: {"max_tokens": 8})
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str | None = None
    error: str = ""
    param: str | None = None
    http_param: str | None = None
    finish: str | None = "length"
    num_tokens: int | None = 8

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def param_in_http(self) -> str | None:
        return self.http_param or self.param

    def http(self, model: str) -> dict[str, Any]:
        """The body. Token ids are asked for, so that they can be compared."""
        fields = dict(self.sampling)
        if self.is_chat and "logprobs" in fields:
            fields["top_logprobs"], fields["logprobs"] = fields["logprobs"], True
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
        fields.setdefault("max_tokens", None)
        prompt = list(self.prompt) if isinstance(self.prompt, tuple) else self.prompt
        return {
            "model": self.model if self.model is not None else model,
            ("messages" if self.is_chat else "prompt"): prompt,
            "return_token_ids": True,
            **fields,
            **self.extras,
        }

    def grpc(self, model: str) -> pb.GenerateRequest:
        request = pb.GenerateRequest(model=self.model if self.model is not None else model)
        if isinstance(self.prompt, str):
            request.prompt = self.prompt
        elif isinstance(self.prompt, tuple):
            request.prompt_token_ids.SetInParent()
            request.prompt_token_ids.ids.extend(self.prompt)
        else:
            request.chat.SetInParent()
            request.chat.messages.extend(pb.ChatMessage(**message) for message in self.prompt)
        request.sampling.CopyFrom(_sampling(self.sampling))
        for name, value in self.extras.items():
            setattr(request.chat if name == "add_generation_prompt" else request, name, value)
        return request


def _sampling(given: dict[str, Any]) -> types_pb2.SamplingParams:
    """Only what the case gives is set."""
    whole = sampling_to_proto(SamplingParams(**given))
    message = types_pb2.SamplingParams()
    for name in given:
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.has_presence:
            setattr(message, name, getattr(whole, name))
    message.stop.extend(whole.stop)
    message.stop_token_ids.extend(whole.stop_token_ids)
    message.logit_bias.update(whole.logit_bias)
    message.include_stop_str_in_output = whole.include_stop_str_in_output
    message.ignore_eos = whole.ignore_eos
    return message


CHAT: list[dict[str, str]] = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France? 🇫🇷"},
]


def _with(**sampling: Any) -> dict[str, Any]:
    return {"max_tokens": 8, **sampling}


GOOD = (
    Case("text"),
    Case("greedy", sampling=_with(temperature=0.0)),
    Case("token ids", prompt=(12, 45, 200, 7)),
    Case("one token id", prompt=(0,)),
    Case("chat", prompt=CHAT),
    Case("chat, developer", prompt=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
    Case("chat, name", prompt=[{"role": "user", "content": "Hi", "name": "Ada"}]),
    Case("chat, no generation prompt", prompt=CHAT, extras={"add_generation_prompt": False}),
    Case("chat, empty content", prompt=[{"role": "user", "content": ""}]),
    Case("other scripts", prompt="Ωμέγα, 数字, 🏃‍♀️ – ok"),
    Case("one token", sampling={"max_tokens": 1}, num_tokens=1),
    Case("seeded", sampling=_with(seed=7, temperature=0.8, top_p=0.9)),
    Case("seed below zero", sampling=_with(seed=-(2**63), temperature=0.0)),
    Case("n", sampling=_with(n=3, seed=3)),
    Case("n, chat", prompt=CHAT, sampling=_with(n=2, seed=3)),
    Case("top_k", sampling=_with(top_k=5, seed=1)),
    Case("top_k -1", sampling=_with(top_k=-1, seed=1)),
    Case("min_p", sampling=_with(min_p=0.1, seed=1)),
    Case("penalties", sampling=_with(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, seed=1)),
    Case("logit_bias", sampling=_with(logit_bias={65: 5.0, 66: -100.0}, temperature=0.0)),
    Case("logprobs 0", sampling=_with(logprobs=0, temperature=0.0)),
    Case("logprobs 5", sampling=_with(logprobs=5, temperature=0.0)),
    Case("logprobs 20", sampling=_with(logprobs=20, temperature=0.0)),
    Case("logprobs, chat", prompt=CHAT, sampling=_with(logprobs=3, temperature=0.0)),
    Case("logprobs, n", sampling=_with(logprobs=2, n=2, seed=2)),
    Case("prompt_logprobs", sampling=_with(prompt_logprobs=2, temperature=0.0)),
    Case("prompt_logprobs, chat", prompt=CHAT, sampling=_with(prompt_logprobs=0, temperature=0.0)),
    Case("echo", extras={"echo": True}, sampling=_with(temperature=0.0)),
    Case("echo, n", extras={"echo": True}, sampling=_with(n=2, seed=5)),
    Case("echo, token ids", prompt=(72, 101, 121), extras={"echo": True}, sampling=_with(temperature=0.0)),
    Case("priority", extras={"priority": -3}),
    Case("cache_salt", extras={"cache_salt": "tenant-7"}),
    Case("timeout", extras={"timeout_ms": 30_000}),
    Case("no special tokens", extras={"add_special_tokens": False}),
    Case("special tokens kept", sampling=_with(skip_special_tokens=False, temperature=0.0)),
    Case("ignore_eos", sampling=_with(ignore_eos=True, min_tokens=8)),
    Case("min_tokens", sampling=_with(min_tokens=4, seed=1), num_tokens=None, finish=None),
    Case("stop_token_ids", sampling=_with(stop_token_ids=(299,), seed=1), num_tokens=None, finish=None),
    Case("stop, not met", sampling=_with(stop=("no such words",))),
    Case("max_tokens left out", prompt="short", sampling={"temperature": 0.0}, num_tokens=None, finish=None),
)

BAD = (
    Case("empty prompt", prompt="", error="invalid_request", param="prompt"),
    Case("no token ids", prompt=(), error="invalid_request", param="prompt"),
    Case("no messages", prompt=[], error="invalid_request", param="messages"),
    Case("token id out of vocabulary", prompt=(1, 10_000_000), error="invalid_request", param="prompt"),
    Case("token id 2**32 - 1", prompt=(2**32 - 1,), error="invalid_request", param="prompt"),
    Case("prompt too long", prompt="word " * 9_000, error="context_length_exceeded", param="prompt"),
    Case(
        "chat too long",
        prompt=[{"role": "user", "content": "word " * 9_000}],
        error="context_length_exceeded",
        param="messages",
    ),
    Case("max_tokens too many", sampling={"max_tokens": 8192}, error="context_length_exceeded", param="max_tokens"),
    Case("unknown role", prompt=[{"role": "tool", "content": "x"}], error="unsupported", param="messages[0].role"),
    Case("unknown model", model="gpt-4o", error="model_not_found", param="model"),
    Case("no model", model="", error="invalid_request", param="model"),
    Case("max_tokens 0", sampling={"max_tokens": 0}, error="invalid_request", param="max_tokens"),
    Case("n 0", sampling=_with(n=0), error="invalid_request", param="n"),
    Case("n 1000", sampling=_with(n=1000), error="invalid_request", param="n"),
    Case("temperature -1", sampling=_with(temperature=-1.0), error="invalid_request", param="temperature"),
    Case("top_p 0", sampling=_with(top_p=0.0), error="invalid_request", param="top_p"),
    Case("top_p 1.1", sampling=_with(top_p=1.1), error="invalid_request", param="top_p"),
    Case("top_k -2", sampling=_with(top_k=-2), error="invalid_request", param="top_k"),
    Case("min_p 2", sampling=_with(min_p=2.0), error="invalid_request", param="min_p"),
    Case("repetition 0", sampling=_with(repetition_penalty=0.0), error="invalid_request", param="repetition_penalty"),
    Case("presence 3", sampling=_with(presence_penalty=3.0), error="invalid_request", param="presence_penalty"),
    Case("frequency -3", sampling=_with(frequency_penalty=-3.0), error="invalid_request", param="frequency_penalty"),
    Case("logprobs 21", sampling=_with(logprobs=21), error="invalid_request", param="logprobs"),
    Case(
        "top_logprobs 21",
        prompt=CHAT,
        sampling=_with(logprobs=21),
        error="invalid_request",
        param="logprobs",
        http_param="top_logprobs",
    ),
    Case("prompt_logprobs 21", sampling=_with(prompt_logprobs=21), error="invalid_request", param="prompt_logprobs"),
    Case("10,000 stops", sampling=_with(stop=("x",) * 10_000), error="invalid_request", param="stop"),
    Case("empty stop", sampling=_with(stop=("",)), error="invalid_request", param="stop"),
    Case("long stop", sampling=_with(stop=("x" * 5000,)), error="invalid_request", param="stop"),
    Case("stop token", sampling=_with(stop_token_ids=(10_000_000,)), error="invalid_request", param="stop_token_ids"),
    Case("min over max", sampling=_with(min_tokens=9), error="invalid_request", param="min_tokens"),
    Case("bias 101", sampling=_with(logit_bias={5: 101.0}), error="invalid_request", param="logit_bias"),
    Case("bias token", sampling=_with(logit_bias={10_000_000: 1.0}), error="invalid_request", param="logit_bias"),
    Case("request id", extras={"request_id": "x" * 200}, error="invalid_request", param="request_id"),
)
