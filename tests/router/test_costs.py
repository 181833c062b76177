"""Costs are learned from what goes by; loads estimate queues from reports and from what was sent."""

import random

import pytest

from kvrelay.common.blocks import BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.router.board import Group
from kvrelay.router.costs import Costs
from kvrelay.router.expected import Expected
from kvrelay.router.load import BACKLOG, FREE_AT, Load, Report
from kvrelay.router.prefixindex import PrefixIndex
from kvrelay.router.prompt import AT_ONCE, PromptIds
from tests.router.loads import Clock, pod

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("fixed", "each", "pair"),
    [(0.004, 2e-5, 1e-9), (0.05, 5e-3, 2e-7), (0.0, 1e-4, 0.0)],
    ids=["gpu", "cpu", "flat"],
)
def test_it_learns_what_prompts_cost(fixed: float, each: float, pair: float) -> None:
    costs, load, rng = Costs(), pod("p0"), random.Random(1)
    for _ in range(300):
        tokens, before = int(10 ** rng.uniform(0, 4.3)), rng.randrange(0, 20_000)
        noise = rng.uniform(0.9, 1.1)
        costs.prefilled(load, tokens, before, noise * (fixed + tokens * (each + pair * (before + tokens / 2))))
    for tokens, before in ((1, 1_000), (1_000, 0), (10_000, 0), (2_000, 16_000)):
        expected = fixed + tokens * (each + pair * (before + tokens / 2))
        assert costs.seconds(tokens, before, load.slowness) == pytest.approx(expected, rel=0.15)


def test_the_first_few_requests_already_count() -> None:
    """A processor is hundreds of times slower than what is believed at first."""
    costs, load = Costs(), pod("p0")
    for _ in range(30):
        costs.prefilled(load, 500, 0, 2.5)
    assert costs.seconds(500, 0, load.slowness) == pytest.approx(2.5, rel=0.5)


def test_hits_that_leave_little_do_not_make_a_pod_slow() -> None:
    """A token takes as long as a step does."""
    costs, load = Costs(), pod("p0")
    for number in range(300):
        tokens = (1, 20, 4_000)[number % 3]
        costs.prefilled(load, tokens, 4_000, 0.005 + tokens * 25e-6)
    assert load.slowness == pytest.approx(1.0, rel=0.3)
    assert load.seconds_per_token == pytest.approx(25e-6, rel=0.4)
    assert costs.seconds(8_000, 0) == pytest.approx(0.2, rel=0.4)


def test_nothing_measured_teaches_nothing() -> None:
    costs, load = Costs(), pod("p0")
    before = (costs.seconds(1_000, 1_000), costs.transfer)
    costs.prefilled(load, 0, 100, 1.0)
    costs.prefilled(load, 100, 0, 0.0)
    costs.transferred(0, 1.0)
    assert (costs.seconds(1_000, 1_000), costs.transfer) == before
    assert load.slowness == 1.0


def waiting(load: Load, clock: Clock) -> float:
    values = Group([], [load], PrefixIndex(), Expected()).values
    return float(max(0.0, values[FREE_AT, 0] - clock.now, values[BACKLOG, 0]))


def test_a_queue_runs_off_with_time() -> None:
    clock = Clock()
    load = pod("p0", clock=clock)
    load.begin(1_000, 1_000, 2.0)
    assert waiting(load, clock) == pytest.approx(2.0)
    clock.now += 1.5
    assert waiting(load, clock) == pytest.approx(0.5)
    load.begin(1_000, 1_000, 3.0)
    assert waiting(load, clock) == pytest.approx(3.5)


def test_of_several_prompts_only_one_is_under_way() -> None:
    """However long ago: no report says that the pod is faster than it was believed to be."""
    clock = Clock()
    load = pod("p0", clock=clock)
    for _ in range(4):
        load.begin(1_000, 1_000, 2.0)
    clock.now += 100
    assert waiting(load, clock) == pytest.approx(6.0)
    load.computed(1_000, 1_000, 2.0)
    assert waiting(load, clock) == pytest.approx(6.0)
    for _ in range(3):
        load.computed(1_000, 1_000, 2.0)
    assert waiting(load, clock) == 0.0


def test_others_work_counts_by_reports() -> None:
    clock = Clock()
    load = pod("p0", clock=clock)
    load.begin(1_000, 4_000, 0.5)
    report = Report(credits=9, num_running=1, num_waiting=3, waiting_tokens=4_000, free_blocks=1000, num_blocks=1000)
    load.report(report)  # nothing but this router's own
    assert waiting(load, clock) == pytest.approx(0.5)
    load.report(Report(9, 1, 3, 104_000, 1000, 1000))
    assert waiting(load, clock) == pytest.approx(100_000 * load.seconds_per_token)
    load.computed(1_000, 4_000, 0.5)
    load.report(Report(9, 0, 0, 0, 1000, 1000))
    assert waiting(load, clock) == 0.0


def test_expectations_of_two_requests_end_each_at_its_time() -> None:
    expected, ids = Expected(), [BlockId(i.to_bytes(16, "big")) for i in range(64)]
    expected.follow(["a", "b"])
    expected.add("a", ids[:32], until=10.0)
    expected.add("a", ids, until=20.0)
    expected.add("b", ids[:15], until=20.0)  # less than is noted at all
    expected.add("stranger", ids, until=20.0)
    places = expected.index.slots(["a", "b", "stranger"])
    assert expected.hits(ids, 9.0)[places].tolist() == [1024, 0, 0]
    assert expected.hits(ids, 10.0)[places].tolist() == [1024, 0, 0]
    assert expected.hits(ids, 20.0)[places].tolist() == [0, 0, 0]
    assert (expected._until, expected._ends, len(expected.index)) == ({}, [], 0)
    expected.follow(["b"])
    assert expected.index.names() == {"b"}


async def test_ids_are_hashed_once_a_model_and_in_steps() -> None:
    tokens = list(range(2 * AT_ONCE + 100))
    prompt, model = PromptIds(tokens, ("salt:s",)), Fingerprint("f")
    await prompt.prepare([model, Fingerprint("g")])
    ids: list[BlockId] = []
    BlockHasher(model, ("salt:s",)).extend(ids, tokens)
    assert prompt.ids(model) == ids
    assert prompt.ids(model) is prompt.ids(model)
    assert prompt.ids(Fingerprint("g")) != ids
    assert prompt.ids(Fingerprint("h")) != ids  # of a pod that came since
