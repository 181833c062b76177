"""Prompts and what transformers makes of them."""

import functools
from pathlib import Path

from benchmarks.soak.case import Plan
from kvrelay.common.tokenizer import Tokenizer
from tests.exactness.fixtures import token_ids
from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import Reference, References

SHORT_TOKENS = 300


def references(plan: Plan) -> dict[str, Reference]:
    """By the prompt's name."""
    return _references(plan.model, plan.prompts or len(PROMPTS))


def short(cases: dict[str, Reference]) -> dict[str, Reference]:
    return {name: case for name, case in cases.items() if len(case.prompt) <= SHORT_TOKENS}


@functools.cache
def _references(model: Path, count: int) -> dict[str, Reference]:
    tokenizer, made = Tokenizer(model), References(model)
    return {prompt.name: made.of(token_ids(tokenizer, prompt)) for prompt in PROMPTS[:count]}
