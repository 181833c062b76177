"""The batch sampler against plain code that treats one row at a time, and its draws against their distributions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, PositionLogprobs, SamplingParams
from kvrelay.engine.batch import NO_TOKEN
from kvrelay.engine.draw import invert
from kvrelay.engine.penalties import Penalties
from kvrelay.engine.rng import Purpose, uniforms
from kvrelay.engine.sampler import Sampler
from kvrelay.engine.sequence import Sequence

pytestmark = pytest.mark.unit

VOCAB = 700
EOS = (2, 5)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sequence(prompt: list[int], output: list[int], params: SamplingParams) -> Sequence:
    request = EngineRequest(request_id=RequestId("r"), prompt_token_ids=tuple(prompt), sampling=params)
    return Sequence(request=request, choice=0, tokens=prompt + output, num_prompt=len(prompt), order=0)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw_one(logits: torch.Tensor, seq: Sequence, choice: int = 0) -> int:
    (token,) = Sampler(logits.shape[-1], EOS).sample(logits.clone().view(1, -1), [(seq, choice)]).tokens
    return token


# The same in plain code, float64, one row, one token at a time.


def plain_adjusted(logits: list[float], seq: Sequence) -> list[float]:
    params, output = seq.request.sampling, seq.tokens[seq.num_prompt :]
    values = list(logits)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in set(seq.tokens):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        values[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        for token in (*EOS, *params.stop_token_ids):
            values[token] = -math.inf
    return values


def plain_distribution(values: list[float], params: SamplingParams) -> list[float]:
    top = max(values)
    weights = [math.exp((value - top) / params.temperature) for value in values]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if params.top_k > 0:
        floor = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    if params.top_p < 1.0:
        wanted, mass, floor = params.top_p * math.fsum(weights), 0.0, 0.0
        for floor in sorted(weights, reverse=True):
            mass += floor
            if mass >= wanted:
                break
        weights = [weight if weight >= floor else 0.0 for weight in weights]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def plain_draw(probabilities: list[float], uniform: float) -> tuple[int, float]:
    """The token, and how far the number lies from the border to another token."""
    mass, border = 0.0, uniform
    for token, probability in enumerate(probabilities):
        border = min(border, abs(mass - uniform)) if probability else border
        mass += probability
        if mass > uniform:
            return token, min(border, mass - uniform)
    raise AssertionError("the probabilities do not reach 1")


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 600, 5000]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, -2.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
    min_tokens=st.sampled_from([0, 0, 3, 100]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
ROWS = st.lists(st.tuples(st.builds(sequence, TOKENS, TOKENS, PARAMS), st.integers(0, 127)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_equals_plain_code(rows: list[tuple[Sequence, int]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    drawn = Sampler(VOCAB, EOS).sample(logits.clone(), rows)
    for row, (seq, choice), found in zip(logits.tolist(), rows, drawn.tokens, strict=True):
        params = seq.request.sampling
        values = plain_adjusted(row, seq)
        if params.temperature == 0.0 or params.top_k == 1:
            assert values[found] == pytest.approx(max(values), abs=1e-5)
            continue
        probabilities = plain_distribution(values, params)
        (uniform,) = uniforms([params.seed or 0], [choice], [len(seq.tokens)], Purpose.TOKEN)
        token, distance = plain_draw(probabilities, float(uniform))
        assert found == token or distance < 1e-5


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_adjusted_logits_equal_plain_code(rows: list[tuple[Sequence, int]], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    expected = [plain_adjusted(row, seq) for row, (seq, _) in zip(logits.tolist(), rows, strict=True)]
    Penalties(VOCAB, EOS).apply(logits, rows)
    torch.testing.assert_close(logits, torch.tensor(expected), atol=1e-4, rtol=1e-5)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.builds(sequence, TOKENS, TOKENS, PARAMS), min_size=16, max_size=16), seed=st.integers(0, 10**6))
def test_alone_as_in_a_batch_of_16(rows: list[Sequence], seed: int) -> None:
    logits = random_logits(16, seed)
    together = Sampler(VOCAB, EOS).sample(logits.clone(), [(seq, 1) for seq in rows]).tokens
    alone = [draw_one(logits[row], seq, choice=1) for row, seq in enumerate(rows)]
    assert together == alone


def test_alone_as_in_a_batch_with_a_large_vocabulary_and_ties() -> None:
    """Logits that come from bfloat16 have many equal values, at the edge of top-k and top-p as well."""
    vocab = 49_152
    logits = random_logits(16, vocab=vocab).bfloat16().float()
    variants: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.5}, {"min_p": 0.02}]
    rows = [(sequence([1], [2], SamplingParams(seed=i, **variants[i % 5])), 0) for i in range(16)]
    together = Sampler(vocab, EOS).sample(logits.clone(), rows).tokens
    assert together == [draw_one(logits[i], seq) for i, (seq, _) in enumerate(rows)]


def test_slightly_different_logits_seldom_draw_another_token() -> None:
    rows = [(sequence([1], [2] * i, SamplingParams(seed=3, top_p=0.95)), 0) for i in range(200)]
    logits = random_logits(1).expand(200, -1)
    noise = 1e-6 * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(1))
    plain = Sampler(VOCAB, EOS).sample(logits.clone(), rows)
    noisy = Sampler(VOCAB, EOS).sample(logits + noise, rows)
    assert plain.tokens == noisy.tokens


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = torch.zeros(VOCAB)

    def drawn(seed: int = 1, choice: int = 0, position: int = 2) -> int:
        return draw_one(logits, sequence([1], [1] * (position - 1), SamplingParams(seed=seed)), choice)

    assert len({drawn(), drawn(seed=2), drawn(choice=1), drawn(position=3)}) == 4
    assert drawn() == drawn()


def test_the_prompt_may_become_output_without_changing_the_draw() -> None:
    """A resumed stream: what was delivered is in the tokens either way, and only the position counts."""
    logits = random_logits(1)[0]
    params = SamplingParams(seed=9)
    assert draw_one(logits, sequence([1, 2, 3], [4], params)) == draw_one(logits, sequence([1], [2, 3, 4], params))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=12, top_p=0.9, min_p=0.01, presence_penalty=1.0),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws; the seeds are fixed, so that this passes always or never."""
    count, vocab = 20_000, 40
    logits = random_logits(1, seed=5, vocab=vocab)[0]
    seq = sequence([0], [1, 3], params)
    expected = np.array(plain_distribution(plain_adjusted(logits.tolist(), seq), params)) * count
    sampler = Sampler(vocab, EOS)
    rows = []
    for seed in range(count):
        seeded = SamplingParams(**{f: getattr(params, f) for f in params.__struct_fields__ if f != "seed"}, seed=seed)
        rows.append((sequence([0], [1, 3], seeded), 0))
    drawn = np.bincount(sampler.sample(logits.repeat(count, 1), rows).tokens, minlength=vocab)
    assert not drawn[expected == 0].any()
    common = expected >= 5
    rest = [expected[~common].sum()], [drawn[~common].sum()]
    wanted, found = np.append(expected[common], rest[0]), np.append(drawn[common], rest[1])
    wanted, found = wanted[wanted > 0], found[wanted > 0]
    freedom = len(wanted) - 1
    chi_square = ((found - wanted) ** 2 / wanted).sum()
    assert chi_square < freedom + 3.1 * math.sqrt(2 * freedom) + 7  # above the 0.1% quantile


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000, 1024])
def test_the_edges_of_the_draw_are_never_tokens_of_weight_zero(vocab: int) -> None:
    """The smallest and the largest number, with zeros at both ends that fill whole spans, and one weight alone."""
    for start, end in (
        (0, vocab),
        (vocab // 2, vocab // 2 + 1),
        (vocab - 1, vocab),
        (0, 1),
        (vocab // 3, vocab // 2 + 1),
    ):
        weights = torch.zeros(3, vocab)
        weights[:, start:end] = 0.3
        lowest, highest = 0.0, 1.0 - 2.0**-53
        found = invert(weights, torch.tensor([lowest, highest, 0.5], dtype=torch.float64)).tolist()
        assert found[:2] == [start, end - 1]
        assert start <= found[2] < end


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 30, 600]] = 1.0
    assert draw_one(logits, sequence([1], [], SamplingParams(temperature=0.0))) == 30


def test_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1)[0]
    for temperature in (1e-4, 1e-30, 5e-324):
        assert draw_one(logits, sequence([1], [], SamplingParams(temperature=temperature, seed=1))) == logits.argmax()


def test_end_of_sequence_waits_for_min_tokens_and_comes_then() -> None:
    logits = torch.zeros(VOCAB)
    logits[5], logits[9], logits[11] = 30.0, 20.0, 10.0
    for ignore_eos in (False, True):
        params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(9,), ignore_eos=ignore_eos)
        drawn = [draw_one(logits, sequence([1], [1] * length, params)) for length in range(4)]
        assert drawn == [11, 11, 5, 5]


def test_penalty_counts_follow_the_sequence() -> None:
    """One sampler over many steps equals a new one at each step, also when sequences come, go and return."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.2)
    kept = Sampler(VOCAB, EOS)
    seqs = [sequence(list(range(100 * i, 100 * i + 99)), [], params) for i in range(3)]
    for step in range(200):
        present = [seq for i, seq in enumerate(seqs) if (step // 10) % 3 != i]
        logits = random_logits(len(present), seed=step % 7)
        rows = [(seq, 0) for seq in present]
        found = kept.sample(logits.clone(), rows).tokens
        assert found == Sampler(VOCAB, EOS).sample(logits.clone(), rows).tokens
        for seq, token in zip(present, found, strict=True):
            seq.tokens.append(token)


def test_branches_of_one_sequence_draw_apart() -> None:
    seq = sequence([1, 2], [], SamplingParams(seed=4, n=4, frequency_penalty=0.5))
    drawn = Sampler(VOCAB, EOS).sample(torch.zeros(4, VOCAB), [(seq, choice) for choice in range(4)])
    assert len(set(drawn.tokens)) == len(drawn.tokens) == 4


# Log-probabilities.


def check_logprobs(found: PositionLogprobs | None, logits: torch.Tensor, token: int, count: int) -> None:
    assert found is not None
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert found.chosen.token_id == token
    assert found.chosen.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    assert found.chosen.rank == int((logits > logits[token]).sum()) + 1
    assert len(found.top) == min(count, len(logits))
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    assert [entry.token_id for entry in found.top] == order[:count]
    for entry in found.top:
        assert entry.logprob == pytest.approx(float(expected[entry.token_id]), abs=1e-5)
        assert entry.rank == int((logits > logits[entry.token_id]).sum()) + 1


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4, seed=2)
    logits[3, :10] = 20.0  # equal ones, ten of them
    wanted = [5, 0, None, 10]
    biased = [SamplingParams(seed=i, logprobs=k, logit_bias={7: 50.0}, top_k=3) for i, k in enumerate(wanted)]
    drawn = Sampler(VOCAB, EOS).sample(logits.clone(), [(sequence([1], [], p), 0) for p in biased])
    assert drawn.logprobs.keys() == {0, 1, 3}
    for row in (0, 1, 3):
        check_logprobs(drawn.logprobs[row], logits[row], drawn.tokens[row], wanted[row] or 0)
    assert drawn.tokens[0] == 7


def test_prompt_logprobs() -> None:
    logits = random_logits(150, seed=3)
    targets = [(i * 37) % VOCAB for i in range(150)]
    for count in (0, 4):
        found = Sampler(VOCAB, EOS).prompt_logprobs(logits, targets, count)
        for row, target in enumerate(targets):
            check_logprobs(found[row], logits[row], target, count)
    assert Sampler(VOCAB, EOS).prompt_logprobs(logits[:0], [], 3) == []


# Failures.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_fail_their_rows_only(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, logprobs=2, top_p=0.9, presence_penalty=0.1)
    rows = [(sequence([1], [2] * i, params), 0) for i in range(5)]
    logits = random_logits(5)
    good = Sampler(VOCAB, EOS).sample(logits.clone(), rows)
    logits[1, 3], logits[2, 4], logits[4] = math.nan, math.inf, -math.inf
    found = Sampler(VOCAB, EOS).sample(logits, rows)
    assert found.tokens == [good.tokens[0], NO_TOKEN, NO_TOKEN, good.tokens[3], NO_TOKEN]
    assert [found.logprobs[row] for row in (0, 3)] == [good.logprobs[row] for row in (0, 3)]


def test_masked_logits_are_not_bad() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 77] = 0.5
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, top_p=0.5, top_k=3)
        assert draw_one(logits[0], sequence([1], [], params)) == 77


def test_eos_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        Sampler(VOCAB, (VOCAB,))


def test_no_rows_no_samples() -> None:
    assert Sampler(VOCAB, EOS).sample(torch.empty(0, VOCAB), []) == ([], {})
