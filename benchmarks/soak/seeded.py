"""A seeded answer depends on nothing but its request: not on its batch, not on the kind of stack, not on the day."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import httpx

from benchmarks.soak.case import Case, Figures, Plan
from benchmarks.soak.material import references, short
from tests.exactness.fixtures import OVER_PREFILL_PODS, running
from tests.exactness.served import SECONDS, Answer, complete

STACKS: dict[str, dict[str, int]] = {
    "both": {"prefill": 0, "decode": 0, "both": 1},
    "1p1d": {"prefill": 1, "decode": 1},
}
OPTIONS: list[dict[str, float]] = [
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 100, "min_p": 0.02, "repetition_penalty": 1.15},
]
NAMES = ["story", "question", "python", "russian", "numbers", "100 tokens", "chat haiku", "chat spanish"]
OUTPUT_TOKENS = 32
Request = tuple[tuple[int, ...], Mapping[str, float]]


async def _ask(url: str, requests: Sequence[Request], at_once: int) -> list[Answer]:
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:

        async def one(prompt: tuple[int, ...], options: Mapping[str, float]) -> Answer:
            async with places:
                [answer] = await complete(client, prompt, max_tokens=OUTPUT_TOKENS, **options)
                return answer

        return await asyncio.gather(*(one(*request) for request in requests))


def _run(plan: Plan) -> Figures:
    cases = short(references(plan))
    prompts = [cases[name].prompt for name in NAMES if name in cases]
    requests: list[Request] = [
        (prompt, {**options, "seed": seed})
        for seed, (prompt, options) in enumerate(itertools.product(prompts, OPTIONS))
    ]
    first: list[str] = []
    passes = 0
    for name, pods in STACKS.items():
        router = OVER_PREFILL_PODS
        with running(plan.model, plan.scratch / name, threads=plan.threads, router_options=router, **pods) as stack:
            for at_once, time in itertools.product((1, 16), (1, 2)):
                texts = [answer.text for answer in asyncio.run(_ask(stack.url, requests, at_once))]
                first = first or texts
                passes += 1
                for request, text, expected in zip(requests, texts, first, strict=True):
                    where = f"{name}, {at_once} at once, time {time}, {request[1]}"
                    assert text == expected, f"{where}\ngot  {text!r}\nwant {expected!r}"
    assert len(set(first)) > 0.8 * len(first), "seeds and prompts were meant to differ"
    return {"requests": len(requests), "passes": passes, "answers": passes * len(requests)}


CASES = [Case("seeded", "seeded sampling: the same alone and in a batch of 16, in both and 1P1D, twice", _run)]
