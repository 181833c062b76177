"""Sampling on the device against the engine's own drawing on a CPU, which is its twin."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch

from kvrelay.engine.draw import Truncation, draw
from kvrelay.engine.rng import Purpose, uniforms
from tests.kernels.triton_device import DEVICE, ON_GPU

pytest.importorskip("triton", reason="Triton is not installed")

from kvrelay.kernels.ops import SampleParams
from kvrelay.kernels.triton.sample import TOKEN, TokenSampler

# numpy, which the interpreter computes by, warns of distances between infinities.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

VOCABS = [1, 700, 4096, 4500] + [49152, 128256, 151936, 151669] * ON_GPU
CLOSE = 1e-5
"""A share of a row's weight within which rounding may decide. The two compute a weight exp(-x) each to a relative 2^-23 (1 + x),
and sum up to 2^12 of them in float32, pairwise or in lanes: some 2^-19 in all for what has any weight (x up to 20).

Where top-p ends, more may: weights that are closer together than they are rounded are one weight to the twin, which keeps or
drops them together, while the kernel tells their logits apart. What they weigh together is added (see `distance_from_another`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1


def random_row(rng: random.Random) -> Row:
    return Row(
        temperature=rng.choice([0.0, 0.05, 0.7, 1.0, 1.0, 2.5]),
        top_k=rng.choice([0, 0, 1, 2, 40, 600, 5000]),
        top_p=rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0, 1.0]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.9, 1.0]),
        seed=rng.randrange(-(2**63), 2**63),
        choice=rng.randrange(128),
        position=rng.choice([0, 7, 100_000, 2**33 + 5]),
    )


def random_logits(vocab: int, kind: str) -> torch.Tensor:
    x = torch.randn(vocab)
    match kind:
        case "plain":
            return x * 3
        case "ties":  # of a model that computes in bfloat16
            return (x * 3).bfloat16().float()
        case "flat":
            return x * 1e-3
        case "peaked":
            x[torch.randint(vocab, (3,))] += 20
            return x
        case "masked":
            return torch.where(torch.rand(vocab) < 0.9, -torch.inf, x).index_fill(0, torch.tensor([vocab // 2]), 1.0)
        case "dense":  # neighbouring floats
            return 20 + x * 1e-5
        case "equal":
            return torch.full((vocab,), 3.25)
    raise AssertionError(kind)


KINDS = ["plain", "ties", "flat", "peaked", "masked", "dense", "equal"]


def params_of(rows: list[Row]) -> SampleParams:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=DEVICE)

    return SampleParams(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=column("seed", torch.int64),
        choice=column("choice", torch.int32),
        position=column("position", torch.int64),
    )


def run(logits: torch.Tensor, rows: list[Row], sampler: TokenSampler | None = None, **flags: bool) -> list[int]:
    sampler = sampler or TokenSampler(len(rows) + 2, logits.shape[1], DEVICE)
    tokens = torch.full((len(rows),), -7, device=DEVICE)
    found, finite = sampler(logits.to(DEVICE), params_of(rows), tokens, **flags)
    assert found is tokens
    assert finite.all()
    return tokens.tolist()


def uniform_of(row: Row) -> float:
    return float(uniforms([row.seed], [row.choice], [row.position], Purpose.TOKEN)[0])


def twin(logits: torch.Tensor, row: Row) -> int:
    if row.greedy:
        return int(logits.argmax())
    cut = Truncation([row.temperature], [row.top_k if row.top_k < len(logits) else 0], [row.top_p], [row.min_p])
    number = torch.tensor([uniform_of(row)], dtype=torch.float64)
    return int(draw(logits.clone().unsqueeze(0), logits.max().unsqueeze(0), cut, number))


def distance_from_another(logits: torch.Tensor, row: Row) -> float:
    """How far the row's number, and its thresholds, are from where another token or another set begins, as a share of the weight;
    less the share of what may be kept or dropped at the end of top-p."""
    away = (logits.max() - logits).double()
    weights = (-away / float(np.float32(row.temperature))).exp()
    if row.top_k:
        floor = away.sort().values[min(row.top_k, len(away)) - 1]
        weights[away > floor] = 0.0
    distance = float((weights - row.min_p).abs().min()) if row.min_p else 1.0
    doubtful = 0.0
    weights[weights < float(np.float32(row.min_p))] = 0.0
    if row.top_p < 1.0:
        sums = weights.sort(descending=True).values.cumsum(0)
        wanted = float(np.float32(row.top_p)) * sums[-1]
        distance = min(distance, float((sums - wanted).abs().min() / sums[-1]))
        floor = weights.sort(descending=True).values[(sums < wanted).sum().clamp(max=len(sums) - 1)]
        rounded = floor * 2.0**-22 * (1.0 - floor.log())  # of either of two
        doubtful = float(weights[((weights - floor).abs() <= rounded) & (weights != floor)].sum())
        weights[weights < floor] = 0.0
    total = float(weights.sum())
    sums = weights.cumsum(0) / total
    return min(distance, float((sums - uniform_of(row)).abs().min())) - doubtful / total


@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_equal_the_twins(vocab: int) -> None:
    torch.manual_seed(vocab)
    rng = random.Random(vocab)
    rows = [random_row(rng) for _ in range(192 if ON_GPU else 14)]
    logits = torch.stack([random_logits(vocab, kind) for kind, _ in zip(itertools.cycle(KINDS), rows, strict=False)])
    tokens = run(logits, rows)
    expected = [twin(logits[at], row) for at, row in enumerate(rows)]
    other = [at for at in range(len(rows)) if tokens[at] != expected[at]]
    for at in other:
        assert not rows[at].greedy
        assert distance_from_another(logits[at], rows[at]) < CLOSE, (rows[at], KINDS[at % len(KINDS)])
    # A large vocabulary has many borders: of 150,000 even ones every number is closer than that to one.
    assert len(other) <= len(rows) // 10


@pytest.mark.parametrize("top_k", [2, 64])
def test_top_k_is_exact_and_keeps_ties(top_k: int) -> None:
    """Many draws from few tokens, all of the same weight: each comes, nothing else does."""
    vocab = 4200
    logits = torch.full((vocab,), -1.0)
    best = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[: top_k + 3]
    logits[best] = torch.linspace(1.0, 1.0 + 1e-6, len(best)).sort(descending=True).values
    ordered = logits.sort(descending=True).values
    kept = set((logits >= ordered[top_k - 1]).nonzero().flatten().tolist())
    count = 20 * top_k if ON_GPU else 6
    rows = [Row(top_k=top_k, position=at) for at in range(count)]
    tokens = run(logits.expand(count, -1).contiguous(), rows)
    assert set(tokens) <= kept
    assert tokens == [twin(logits, row) for row in rows]
    assert len(set(tokens)) > min(len(kept), count) // 3


def test_the_first_of_equals_is_taken_where_nothing_is_drawn() -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [5000, 8999]] = 1.0
    logits[1, [17, 4095, 4096]] = 2.0
    rows = [Row(temperature=0.0), Row(top_k=1), Row(temperature=0.0)]
    assert run(logits, rows) == [5000, 17, 0]
    assert run(logits, rows, draws=False) == [5000, 17, 0]


def test_rows_do_not_depend_on_the_batch_nor_on_what_is_launched() -> None:
    torch.manual_seed(5)
    logits = torch.stack([random_logits(4500, kind) for kind in KINDS[:3]])
    rows = [Row(min_p=0.01, seed=1), Row(top_p=0.9, seed=2), Row(temperature=0.0)]
    together = run(logits, rows)
    assert run(logits, rows, cuts=False) == together
    again = TokenSampler(1, 4500, DEVICE)
    assert [run(logits[at : at + 1], [row], again)[0] for at, row in enumerate(rows)] == together


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * ON_GPU)
def test_logits_of_two_bytes_in_wider_rows(dtype: torch.dtype) -> None:
    """A vocabulary that was padded: what is beyond it is never taken."""
    torch.manual_seed(6)
    wide = (torch.randn(4, 5001) * 3).to(dtype)
    wide[:, 4500:] = torch.inf
    rows = [Row(temperature=0.0), Row(), Row(top_k=5), Row(top_p=0.5)]
    assert run(wide[:, :4500], rows) == run(wide[:, :4500].float(), rows)


def test_what_is_not_finite_is_told_and_harms_no_other_row() -> None:
    torch.manual_seed(7)
    logits = torch.randn(6, 4500)
    clean = logits.clone()
    logits[0, 4400] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 100:] = -torch.inf
    rows = [Row(top_k=50, seed=at) for at in range(6)]
    sampler = TokenSampler(6, 4500, DEVICE)
    tokens, finite = sampler(logits.to(DEVICE), params_of(rows))
    assert finite.tolist() == [False, False, False, True, True, True]
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert 0 <= tokens[3] < 100
    assert tokens[4:].tolist() == run(clean[4:], rows[4:])


def test_numbers_are_those_of_the_engine() -> None:
    """On equal weights the token is the number itself, as far as there are tokens."""
    vocab = 8192
    rng = random.Random(8)
    rows = [
        Row(seed=seed, choice=choice, position=position)
        for seed, choice, position in [
            (0, 0, 0),
            (-1, 127, 2**33 + 5),
            (-(2**63), 2**31 - 1, 2**32 - 1),
            *((rng.randrange(-(2**63), 2**63), rng.randrange(2**31), rng.randrange(2**40)) for _ in range(5)),
        ]
    ]
    tokens = run(torch.zeros(len(rows), vocab), rows, cuts=False)
    assert tokens == [int(uniform_of(row) * vocab) for row in rows]


def test_refusals() -> None:
    sampler = TokenSampler(2, 100, DEVICE)
    for shape in ((3, 100), (2, 99)):
        with pytest.raises(ValueError, match="for a sampler of"):
            sampler(torch.zeros(shape, device=DEVICE), params_of([Row()] * shape[0]))
    tokens, _ = sampler(torch.zeros((0, 100), device=DEVICE), params_of([]))
    assert tokens.shape == (0,)


def test_purpose() -> None:
    assert TOKEN == Purpose.TOKEN


@pytest.mark.parametrize("chunk", [64, 512])
def test_other_sizes(chunk: int) -> None:
    """Give the same tokens, however many chunks there are and however many turns their logits take."""
    torch.manual_seed(9)
    logits = torch.stack([random_logits(1500, kind) for kind in ("plain", "ties", "dense")])
    rows = [Row(top_k=40, top_p=0.9, seed=1), Row(top_p=0.8, seed=2), Row(top_k=300, seed=3)]
    assert run(logits, rows, TokenSampler(3, 1500, DEVICE, chunk)) == [
        twin(logits[at], row) for at, row in enumerate(rows)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="only a GPU captures")
def test_captured() -> None:
    """A graph gives what the same calls give, for parameters and logits that came after it was captured."""
    torch.manual_seed(10)
    rng = random.Random(10)
    sampler = TokenSampler(64, 32000, DEVICE)
    logits, tokens = torch.zeros(64, 32000, device=DEVICE), torch.zeros(64, dtype=torch.int64, device=DEVICE)
    finite = torch.zeros(64, dtype=torch.bool, device=DEVICE)
    params = params_of([Row()] * 64)
    sampler(logits, params, tokens, finite)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler(logits, params, tokens, finite)
    for _ in range(3):
        rows = [random_row(rng) for _ in range(64)]
        new = torch.stack([random_logits(32000, kind) for kind, _ in zip(itertools.cycle(KINDS), rows, strict=False)])
        logits.copy_(new)
        for field in dataclasses.fields(SampleParams):
            getattr(params, field.name).copy_(getattr(params_of(rows), field.name))
        graph.replay()
        assert tokens.tolist() == run(new, rows)
