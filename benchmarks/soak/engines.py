"""What is asked for exact answers: the offline engine, and stacks of pods. One interface for both."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import httpx
import msgspec

from benchmarks.soak.case import Plan
from kvrelay.cli.stack import Stack
from kvrelay.common.request import SamplingParams
from tests.exactness.fixtures import OVER_PREFILL_PODS, running
from tests.exactness.reference import OUTPUT_TOKENS
from tests.exactness.served import SECONDS, Answer, complete, inspect

if TYPE_CHECKING:
    from kvrelay.engine.llm import LLM, RequestOutput

STACKS: dict[str, dict[str, int]] = {
    "both": {"prefill": 0, "decode": 0, "both": 1},
    "1p1d": {"prefill": 1, "decode": 1},
    "2p2d": {"prefill": 2, "decode": 2},
}
ENGINES = ["llm", *STACKS]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of each engine, by `EngineConfig`'s names."""

    block_size: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    max_model_len: int
    prefix_caching: bool = True
    watermark: float = 0.01
    max_step_ms: float = 60_000.0
    """So long that the budget does not adapt: chunks are of the size that is asked for."""

    def flags(self) -> dict[str, str | bool]:
        given: dict[str, object] = msgspec.structs.asdict(self)
        caching = given.pop("prefix_caching")
        return {name.replace("_", "-"): str(value) for name, value in given.items()} | {
            "no-prefix-caching": not caching
        }


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    max_tokens: int = OUTPUT_TOKENS
    ignore_eos: bool = False


class Engine(Protocol):
    def answer(self, asked: Sequence[Asked], at_once: int, salt: str) -> list[Answer]:
        """In their order, which is their rank as well. Under another salt nothing of before is found."""
        ...

    @property
    def num_preemptions(self) -> int: ...


class Offline:
    def __init__(self, plan: Plan, options: Options) -> None:
        self._plan = plan
        self._options = options
        self._salt = ""
        self._llm = self._load()

    def _load(self) -> "LLM":
        from kvrelay.engine.llm import LLM  # torch is loaded by whoever needs it: it would be shared with the pods

        options = msgspec.structs.asdict(self._options)
        return LLM(self._plan.model, dtype="float32", threads=self._plan.threads, **options)

    def answer(self, asked: Sequence[Asked], at_once: int, salt: str) -> list[Answer]:
        if salt != self._salt:
            self._salt, self._llm = salt, self._load()
        groups = [asked[i : i + at_once] for i in range(0, len(asked), at_once)]
        return [_answer(output) for group in groups for output in self._generate(group)]

    def _generate(self, asked: Sequence[Asked]) -> "list[RequestOutput]":
        sampling = [
            SamplingParams(temperature=0.0, logprobs=0, max_tokens=one.max_tokens, ignore_eos=one.ignore_eos)
            for one in asked
        ]
        outputs = self._llm.generate([one.prompt for one in asked], sampling)
        state = self._llm.engine.inspect()
        assert not state.violations, state.violations
        assert (state.num_requests, state.free_blocks) == (0, state.num_blocks), "blocks are held with no request left"
        return outputs

    @property
    def num_preemptions(self) -> int:
        return self._llm.engine.inspect().num_preemptions


def _answer(output: "RequestOutput") -> Answer:
    [choice] = output.outputs
    return Answer(
        tokens=choice.token_ids,
        logprobs=tuple(position.chosen.logprob for position in choice.logprobs),
        cached_tokens=output.num_cached_tokens,
        text=choice.text,
        finish_reason=choice.finish_reason,
    )


class Served:
    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def answer(self, asked: Sequence[Asked], at_once: int, salt: str) -> list[Answer]:
        return asyncio.run(self._answer(asked, at_once, salt))

    async def _answer(self, asked: Sequence[Asked], at_once: int, salt: str) -> list[Answer]:
        places = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(base_url=self._stack.url, timeout=SECONDS) as client:

            async def one(rank: int, one: Asked) -> Answer:
                options = {"max_tokens": one.max_tokens, "ignore_eos": one.ignore_eos}
                async with places:
                    [answer] = await complete(client, one.prompt, cache_salt=salt, priority=rank, **options)
                    return answer

            return await asyncio.gather(*(one(rank, each) for rank, each in enumerate(asked)))

    @property
    def num_preemptions(self) -> int:
        return sum(inspect(node).num_preemptions for node in self._stack.pods)


@contextmanager
def engine(name: str, plan: Plan, scratch: Path, options: Options) -> Iterator[Engine]:
    if name == "llm":
        yield Offline(plan, options)
        return
    router: Mapping[str, str] = OVER_PREFILL_PODS
    flags, pods = options.flags(), STACKS[name]
    with running(
        plan.model, scratch, engine_options=flags, router_options=router, threads=plan.threads, **pods
    ) as stack:
        yield Served(stack)
