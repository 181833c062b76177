"""Edits of logits against the engine's penalties on a CPU, which are their twin."""

import random

import pytest
import torch

from kvrelay.common.ids import RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.penalties import Penalties
from kvrelay.engine.sequence import Sequence
from tests.kernels.triton_device import DEVICE

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.triton.edit import Edits, edit

pytestmark = pytest.mark.kernels

VOCAB = 1000
EOS = (2, 5)


def random_sequence(rng: random.Random) -> Sequence:
    params = SamplingParams(
        repetition_penalty=rng.choice([1.0, 0.5, 1.3]),
        presence_penalty=rng.choice([0.0, -2.0, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.5, 1.1]),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-100, 100) for _ in range(rng.choice([0, 4]))},
        min_tokens=rng.choice([0, 100]),
        stop_token_ids=(7,),
    )
    tokens = [rng.randrange(200) for _ in range(rng.randrange(2, 90))]
    request = EngineRequest(request_id=RequestId("r"), prompt_token_ids=tuple(tokens[:2]), sampling=params)
    return Sequence(request=request, choice=0, tokens=tokens, num_prompt=2, order=0)


def edits_of(seqs: list[Sequence]) -> Edits:
    """One entry for each token that anything concerns, in no order, and some padding."""
    found = []
    for row, seq in enumerate(seqs):
        params, output = seq.request.sampling, seq.tokens[seq.num_prompt :]
        masked = {*EOS, *params.stop_token_ids} if len(output) < params.min_tokens else set()
        for token in {*seq.tokens, *params.logit_bias, *masked}:
            count = output.count(token)
            repetition = params.repetition_penalty if token in seq.tokens else 1.0
            frequency = torch.tensor(params.frequency_penalty) * count
            presence = params.presence_penalty if count else 0.0
            bias = params.logit_bias.get(token, 0.0)
            found.append((row * VOCAB + token, bias, repetition, float(frequency), presence, token in masked))
    found += [(-1, float("nan"), 1.0, 0.0, 0.0, True)] * 3
    random.Random(0).shuffle(found)
    dtypes = (torch.int64, *(torch.float32,) * 4, torch.bool)
    columns = zip(zip(*found, strict=True), dtypes, strict=True)
    return Edits(*(torch.tensor(column, dtype=dtype, device=DEVICE) for column, dtype in columns))


def test_equal_to_the_engines() -> None:
    rng = random.Random(0)
    seqs = [random_sequence(rng) for _ in range(20)]
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    expected, found = logits.clone(), logits.to(DEVICE, copy=True)
    Penalties(VOCAB, EOS).apply(expected, [(seq, 0) for seq in seqs])
    edit(found, edits_of(seqs))
    assert torch.equal(found.cpu(), expected)
    assert (expected != logits).sum() > 500


def test_of_two_bytes() -> None:
    """Rounded once, from what float32 gives."""
    rng = random.Random(1)
    edits = edits_of([random_sequence(rng) for _ in range(3)])
    narrow = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(torch.float16).to(DEVICE)
    wide = narrow.float()
    edit(narrow, edits)
    edit(wide, edits)
    assert torch.equal(narrow, wide.to(torch.float16))


def test_nothing_to_do() -> None:
    logits = torch.ones(2, VOCAB, device=DEVICE)
    edit(logits, Edits(*(torch.tensor([], device=DEVICE) for _ in range(6))))
    assert logits.eq(1).all()
