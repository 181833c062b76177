"""Greedy answers of real stacks, in float32, are those of transformers: token for token, log-probabilities within 1e-3."""

import asyncio
from pathlib import Path

import pytest

from tests.exactness.fixtures import OVER_PREFILL_PODS, running
from tests.exactness.reference import OUTPUT_TOKENS, Reference
from tests.exactness.served import Answer, ask_all, inspect, payload_bytes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]

TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""Of SmolLM2's KV in float32: 30 layers, K and V, 3 heads of 64."""


def ask(url: str, cases: dict[str, Reference], at_once: int) -> dict[str, Answer]:
    prompts = [case.prompt for case in cases.values()]
    answers = asyncio.run(ask_all(url, prompts, at_once, max_tokens=OUTPUT_TOKENS))
    return {name: choices[0] for name, choices in zip(cases, answers, strict=True)}


def check(cases: dict[str, Reference], answers: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        cases[name].check(name, answer.tokens, answer.logprobs)


def test_one_pod_that_does_both(model_dir: Path, tmp_path: Path, short_cases: dict[str, Reference]) -> None:
    options = {"max-num-batched-tokens": "96"}
    with running(model_dir, tmp_path, prefill=0, decode=0, both=1, engine_options=options) as stack:
        check(short_cases, ask(stack.url, short_cases, at_once=16))
        assert payload_bytes(stack) == 0


def test_two_of_each(model_dir: Path, tmp_path: Path, short_cases: dict[str, Reference]) -> None:
    engine = {"block-size": "32", "max-num-batched-tokens": "100"}
    with running(
        model_dir, tmp_path, prefill=2, decode=2, engine_options=engine, router_options=OVER_PREFILL_PODS
    ) as stack:
        check(short_cases, ask(stack.url, short_cases, at_once=16))
        for node in stack.prefill:
            assert inspect(node).transfer.transfers_completed > 0, f"{node.name} had nothing to do"


def test_after_a_preemption(model_dir: Path, tmp_path: Path, short_cases: dict[str, Reference]) -> None:
    names = [name for name, case in short_cases.items() if len(case.prompt) >= 50] * 3
    engine = {"kv-cache-bytes": str(40 * 16 * TOKEN_BYTES), "max-model-len": "600", "no-prefix-caching": True}
    with running(model_dir, tmp_path, prefill=0, decode=0, both=1, engine_options=engine) as stack:
        prompts = [short_cases[name].prompt for name in names]
        answers = asyncio.run(ask_all(stack.url, prompts, len(names), max_tokens=OUTPUT_TOKENS))
        for name, choices in zip(names, answers, strict=True):
            short_cases[name].check(name, choices[0].tokens, choices[0].logprobs)
        assert inspect(stack.both[0]).num_preemptions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize(("p", "d"), [("16", "32"), ("32", "16")])
def test_block_sizes_are_converted(
    model_dir: Path, tmp_path: Path, short_cases: dict[str, Reference], p: str, d: str
) -> None:
    some = {name: case for name, case in short_cases.items() if len(case.prompt) > 14}
    pods = {"prefill-0": {"block-size": p}, "decode-0": {"block-size": d}}
    with running(model_dir, tmp_path, prefill=1, decode=1, pod_options=pods, router_options=OVER_PREFILL_PODS) as stack:
        check(some, ask(stack.url, some, at_once=8))


def test_dtypes_of_the_kv_are_converted(model_dir: Path, tmp_path: Path, short_cases: dict[str, Reference]) -> None:
    """A cache in bfloat16 rounds keys and values to 8 bits: tokens agree where the choice was clear."""
    clear = {name: case for name, case in short_cases.items() if min(case.gaps[:4]) > 1.0 and len(case.prompt) > 4}
    assert len(clear) >= 3
    engine = {"no-prefix-caching": True}
    for pod in ("prefill-0", "decode-0"):
        with running(
            model_dir,
            tmp_path / pod,
            prefill=1,
            decode=1,
            pod_options={pod: {"kv-dtype": "bfloat16"}},
            engine_options=engine,
            router_options=OVER_PREFILL_PODS,
        ) as stack:
            for name, answer in ask(stack.url, clear, at_once=4).items():
                assert answer.tokens[:4] == clear[name].tokens[:4], name
            assert inspect(stack.prefill[0]).transfer.payload_bytes_sent == sum(
                len(case.prompt) for case in clear.values()
            ) * (TOKEN_BYTES // 2)
