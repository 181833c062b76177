"""Greedy answers in float32 are those of transformers: all prompts, on every engine, under all that must not matter.

The product: engine × chunk size, and for each of them {1, 16} requests at once × {cold, with prefix hits}, and apart from these,
after preemptions. (One request at a time is never preempted: a pool that holds it holds it to its end.) Each chunk size comes with
a block size of its own.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence

from benchmarks.soak.case import Case, Figures, Plan
from benchmarks.soak.engines import ENGINES, Asked, Options, engine
from benchmarks.soak.material import references, short
from tests.exactness.reference import Reference
from tests.exactness.served import Answer
from tests.exactness.test_served import TOKEN_BYTES

SIZES = ((100, 16), (96, 32))
"""Chunk and block. 100 divides the prompts of 100, 700, 1,500 and 4,000 tokens; 96 divides none of these."""
AT_ONCE = (1, 16)

COPIES = 3
SMALL_POOL_TOKENS = 640
FILLERS = 4
FILLER = Asked(prompt=(504, 1048, 282, 253), max_tokens=160, ignore_eos=True)
"""It ranks before a long prompt and grows by a block from time to time, at the long one's cost."""


def _check(cases: Mapping[str, Reference], answers: Sequence[Answer], where: str) -> None:
    for (name, case), answer in zip(cases.items(), answers, strict=True):
        case.check(f"{where}: {name}", answer.tokens, answer.logprobs)


def _exactness(name: str, chunk: int, block_size: int, plan: Plan) -> Figures:
    """A pass under a new salt is cold, but for the beginnings that prompts share; the next one has hits."""
    cases = references(plan)
    asked = [Asked(case.prompt) for case in cases.values()]
    cached: dict[str, int] = {}
    options = Options(block_size=block_size, max_num_batched_tokens=chunk, kv_cache_bytes=1 << 30, max_model_len=4096)
    with engine(name, plan, plan.scratch, options) as subject:
        for at_once in AT_ONCE:
            for state in ("cold", "hits"):
                answers = subject.answer(asked, at_once, salt=f"{at_once} at once")
                _check(cases, answers, f"{at_once} at once, {state}")
                cached[f"{at_once} at once, {state}"] = sum(answer.cached_tokens for answer in answers)
            _check_hits(name, block_size, cases, answers)
    return {"prompts": len(cases), "answers": 4 * len(cases), "cached_tokens": cached}


def _check_hits(name: str, block_size: int, cases: Mapping[str, Reference], answers: Sequence[Answer]) -> None:
    """All that was cached is found, but for the prompt's last token and what shares a block with it."""
    for (prompt, case), answer in zip(cases.items(), answers, strict=True):
        whole = (len(case.prompt) - 1) // block_size * block_size
        if name == "2p2d":  # what one pair has cached, the other has not
            assert answer.cached_tokens <= whole, prompt
        else:
            assert answer.cached_tokens == whole, f"{prompt}: {answer.cached_tokens} cached tokens, not {whole}"
    if any(len(case.prompt) > block_size for case in cases.values()):
        assert any(answer.cached_tokens for answer in answers)


def _preemption(name: str, chunk: int, block_size: int, plan: Plan) -> Figures:
    """Without prefix caching: what is preempted is computed again, all of it."""
    cases = references(plan)
    few = {prompt: case for prompt, case in short(cases).items() if len(case.prompt) > 4}
    preemptions = {
        "short": _preempt_short(name, plan, _options(chunk, block_size, SMALL_POOL_TOKENS // block_size), few)
    }
    assert preemptions["short"] > 0, "the pool was meant to be too small"
    for prompt in cases.keys() - short(cases).keys():
        blocks = FILLERS - (-len(cases[prompt].prompt) // block_size)
        preemptions[prompt] = _preempt_long(name, plan, _options(chunk, block_size, blocks), prompt, cases[prompt])
        # Where one pod prefills and another decodes, what gives way to running streams may be the reservation.
        assert preemptions[prompt] > 0 or name in ("1p1d", "2p2d"), "the pool was meant to be too small"
    return {"prompts": len(few) + len(preemptions) - 1, "preemptions": preemptions}


def _options(chunk: int, block_size: int, num_blocks: int) -> Options:
    num_tokens = num_blocks * block_size
    return Options(
        block_size=block_size,
        max_num_batched_tokens=chunk,
        kv_cache_bytes=num_tokens * TOKEN_BYTES,
        max_model_len=num_tokens,
        prefix_caching=False,
        watermark=0.0,
    )


def _preempt_short(name: str, plan: Plan, options: Options, cases: Mapping[str, Reference]) -> int:
    """Far more at once than fit when they have grown."""
    names = list(cases) * COPIES
    with engine(name, plan, plan.scratch / "short", options) as subject:
        answers = subject.answer([Asked(cases[prompt].prompt) for prompt in names], len(names), salt="")
        for prompt, answer in zip(names, answers, strict=True):
            cases[prompt].check(prompt, answer.tokens, answer.logprobs)
        return subject.num_preemptions


def _preempt_long(name: str, plan: Plan, options: Options, prompt: str, case: Reference) -> int:
    """A long prompt beside streams that rank before it, in a pool that holds no more than what all need at first."""
    with engine(name, plan, plan.scratch / prompt, options) as subject:
        *others, answer = subject.answer([FILLER] * FILLERS + [Asked(case.prompt)], FILLERS + 1, salt="")
        case.check(prompt, answer.tokens, answer.logprobs)
        assert all(len(other.tokens) == FILLER.max_tokens for other in others)
        return subject.num_preemptions


def _cases() -> list[Case]:
    made = []
    for name, (chunk, block_size) in itertools.product(ENGINES, SIZES):
        label = f"{name}-chunk{chunk}-block{block_size}"
        where = f"{name}, chunks of {chunk} tokens, blocks of {block_size}"
        exact = functools.partial(_exactness, name, chunk, block_size)
        preempted = functools.partial(_preemption, name, chunk, block_size)
        made.append(Case(f"exactness-{label}", f"{where}: 1 and 16 at once, cold and with hits", exact))
        made.append(Case(f"preemption-{label}", f"{where}: pools too small for what runs", preempted))
    return made


CASES = _cases()
