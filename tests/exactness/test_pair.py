"""One prefill pod and one decode pod, in float32: exact, cold and with hits; what moves between them; choices and seeds."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.stack import Stack
from tests.exactness.fixtures import OVER_PREFILL_PODS, running
from tests.exactness.reference import Reference
from tests.exactness.served import ask_all, assert_whole, inspect, payload_bytes
from tests.exactness.test_served import TOKEN_BYTES, ask, check

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]


@pytest.fixture(scope="module")
def shared_pair(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(
        model_dir, tmp_path_factory.mktemp("pair"), prefill=1, decode=1, router_options=OVER_PREFILL_PODS
    ) as stack:
        yield stack


@pytest.fixture
def pair(shared_pair: Stack) -> Iterator[Stack]:
    """A prefill and a decode pod for all tests here. They hold what the tests before have left in their caches."""
    yield shared_pair
    assert_whole(shared_pair.pods)


def test_prefill_and_decode_cold_and_with_hits(pair: Stack, cases: dict[str, Reference]) -> None:
    check(cases, ask(pair.url, cases, at_once=16))
    again = {name: case for name, case in cases.items() if len(case.prompt) > 16}
    answers = ask(pair.url, again, at_once=1)
    check(again, answers)
    for name, answer in answers.items():
        # All that was cached is found, but for the prompt's last token and what shares a block with it.
        assert answer.cached_tokens == (len(cases[name].prompt) - 1) // 16 * 16, name


def test_the_payload_is_what_the_decode_pod_lacks(pair: Stack) -> None:
    rng = random.Random(7)
    prompt = [rng.randrange(100, 40_000) for _ in range(256)]

    def sent(tokens: list[int], **options: object) -> int:
        before = payload_bytes(pair)
        asyncio.run(ask_all(pair.url, [tokens], 1, max_tokens=4, ignore_eos=True, **options))
        return payload_bytes(pair) - before

    overlapped = inspect(pair.prefill[0]).transfer.payload_bytes_overlapped
    assert sent(prompt) == 256 * TOKEN_BYTES
    overlapped = inspect(pair.prefill[0]).transfer.payload_bytes_overlapped - overlapped
    assert overlapped >= 256 * TOKEN_BYTES / 2
    assert sent(prompt) == 0
    assert sent(prompt + prompt[:64]) == 64 * TOKEN_BYTES
    assert sent(prompt[::-1], n=4) == 256 * TOKEN_BYTES


def test_four_branches_of_one_transfer_differ(pair: Stack) -> None:
    rng = random.Random(13)
    prompt = [rng.randrange(100, 40_000) for _ in range(20)]
    options = {"n": 4, "temperature": 1.0, "seed": 11, "max_tokens": 24}
    before = inspect(pair.prefill[0]).transfer.transfers_completed
    [first] = asyncio.run(ask_all(pair.url, [prompt], 1, **options))
    assert len({answer.tokens for answer in first}) == 4
    assert inspect(pair.prefill[0]).transfer.transfers_completed == before + 1
    [again] = asyncio.run(ask_all(pair.url, [prompt], 1, **options))
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(
    model_dir: Path, tmp_path: Path, pair: Stack, short_cases: dict[str, Reference]
) -> None:
    """In one pod that does both and in 1P1D, twice each."""
    prompts = [case.prompt for case in list(short_cases.values())[-16:]]
    options = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 5, "max_tokens": 24, "presence_penalty": 0.2}

    def sampled(stack: Stack) -> list[list[tuple[int, ...]]]:
        rounds = ((16, prompts), (1, prompts[:4]), (16, prompts))
        answers = (asyncio.run(ask_all(stack.url, some, at_once, **options)) for at_once, some in rounds)
        return [[choices[0].tokens for choices in each] for each in answers]

    with running(model_dir, tmp_path, prefill=0, decode=0, both=1) as both:
        seen = sampled(both) + sampled(pair)
    for tokens in seen:
        assert tokens == seen[0][: len(tokens)]
    assert len(set(seen[0])) == 16
