"""What a request costs where: prefixes, queues, rooms; by stored blocks, and by what was just sent."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from kvrelay.common.blocks import BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.router.costs import Costs
from kvrelay.router.load import Load
from kvrelay.router.policy import LeastLoaded, PodsView, Route, RouteRequest
from kvrelay.router.prefixaware import PrefixAware
from kvrelay.router.prefixindex import PrefixIndex
from kvrelay.router.prompt import PromptIds
from tests.router.loads import ROOMY, Clock, chosen, pod, view

pytestmark = pytest.mark.unit

MODEL = Fingerprint("")
LENGTH = 4_000
LARGE = {"free_blocks": 100_000, "num_blocks": 100_000}


def prompt(seed: int, length: int = LENGTH, *, shared: int = 0) -> tuple[int, ...]:
    """`shared` tokens at its beginning are those of any other."""
    own = random.Random(seed).choices(range(1000), k=length - shared)
    return (*range(shared), *own)


def ids_of(tokens: Sequence[int]) -> list[BlockId]:
    ids: list[BlockId] = []
    BlockHasher(MODEL).extend(ids, tokens)
    return ids


def ask(tokens: Sequence[int], **more: object) -> RouteRequest:
    return RouteRequest(len(tokens), prompt=PromptIds(tokens), **more)  # type: ignore[arg-type]


class Bench:
    """A policy, its index, and pods that the index knows."""

    def __init__(self, *names: str, **report: int) -> None:
        self.clock = Clock()
        self.index = PrefixIndex()
        self.costs = Costs()
        self.policy = PrefixAware(32, self.index, self.costs, clock=self.clock)
        self.loads = {name: self.add(name, **report) for name in names}
        self.view = view(*self.loads.values())

    def add(self, name: str, **report: int) -> Load:
        self.index.add_pod(name, 16)
        return pod(name, clock=self.clock, both=name[0] == "b", **{**LARGE, **report})

    def choose(self, request: RouteRequest, pods: PodsView | None = None) -> Route | None:
        return self.policy.choose(request, pods or self.view)

    def send(self, request: RouteRequest) -> tuple[str, str]:
        """As the dispatcher and a placement do."""
        route = self.choose(request)
        assert route is not None
        self.policy.placed(request, route)
        rest = request.num_prompt_tokens - route.num_cached_tokens
        route.decode.begin(0 if route.prefill else rest, request.num_prompt_tokens, route.seconds)
        if route.prefill is not None:
            route.prefill.begin(rest, request.num_prompt_tokens, route.seconds)
        return chosen(route)


def test_where_the_prefix_is() -> None:
    bench, tokens = Bench("p0", "p1", "p2", "d0"), prompt(1)
    bench.index.stored("p1", ids_of(tokens)[:200])
    route = bench.choose(ask(tokens))
    assert chosen(route) == ("p1", "d0")
    assert route is not None
    assert route.num_cached_tokens == 3_200
    assert route.seconds == pytest.approx(bench.costs.seconds(800, 3_200))


def test_a_whole_hit_leaves_one_token_to_compute() -> None:
    bench, tokens = Bench("p0", "d0"), prompt(1)
    bench.index.stored("p0", ids_of(tokens))
    route = bench.choose(ask(tokens))
    assert route is not None
    assert route.num_cached_tokens == LENGTH - 1


def test_other_salts_and_models_have_no_prefix_here() -> None:
    bench, tokens = Bench("p0", "d0"), prompt(1)
    bench.index.stored("p0", ids_of(tokens))
    salted = RouteRequest(LENGTH, prompt=PromptIds(tokens, ("salt:mine",)))
    route = bench.choose(salted)
    assert route is not None
    assert route.num_cached_tokens == 0


def test_a_queue_is_worth_no_more_than_the_prefix() -> None:
    bench, tokens = Bench("p0", "p1", "d0"), prompt(1)
    bench.index.stored("p0", ids_of(tokens)[:125])  # half of it: 50 ms or so
    bench.loads["p0"].report(replace(ROOMY, waiting_tokens=500))
    assert chosen(bench.choose(ask(tokens)))[0] == "p0"
    bench.loads["p0"].report(replace(ROOMY, waiting_tokens=50_000))
    assert chosen(bench.choose(ask(tokens)))[0] == "p1"


def test_a_long_prefix_is_worth_a_queue_where_nothing_could_start() -> None:
    bench, tokens = Bench("p0", "p1", "d0"), prompt(1, 100_000)
    bench.index.stored("p0", ids_of(tokens)[:6_000])
    bench.loads["p0"].report(replace(ROOMY, credits=0, waiting_tokens=20_000))
    assert chosen(bench.choose(ask(tokens)))[0] == "p0"
    assert chosen(bench.choose(ask(prompt(2, 100_000))))[0] == "p1"
    bench.loads["p1"].report(replace(ROOMY, credits=0, waiting_tokens=20_000))
    assert bench.choose(ask(prompt(2, 100_000))) is None


def test_what_was_just_sent_counts_before_an_event_says_so() -> None:
    bench = Bench("p0", "p1", "p2", "p3", "d0")
    first = bench.send(ask(prompt(1, 20_000, shared=16_000)))[0]
    assert bench.send(ask(prompt(2, 18_000, shared=16_000)))[0] == first
    assert bench.send(ask(prompt(3, 20_000)))[0] != first


def test_what_was_just_sent_is_forgotten_when_no_event_confirms_it() -> None:
    bench, tokens = Bench("p0", "p1", "d0"), prompt(1)
    bench.send(ask(tokens))
    bench.clock.now += 60
    route = bench.choose(ask(tokens))
    assert route is not None
    assert route.num_cached_tokens == 0


def test_one_prefix_does_not_pile_up_on_one_pod() -> None:
    """A hundred at once with 1,000 tokens in common of 4,000: spread, or the last one would wait for all others."""
    bench = Bench("p0", "p1", "p2", "p3", "d0", credits=1000)
    places = [bench.send(ask(prompt(seed, shared=1_000)))[0] for seed in range(100)]
    counts = [places.count(name) for name in ("p0", "p1", "p2", "p3")]
    assert max(counts) <= 1.3 * 25, counts


def test_an_idle_cluster_takes_turns() -> None:
    """Each request finds all pods idle: what was begun in the last minute decides."""
    bench = Bench("p0", "p1", "p2", "p3", "d0")
    places = []
    for seed in range(40):
        places.append(bench.send(ask(prompt(seed)))[0])
        bench.clock.now += 1.0
        load = bench.loads[places[-1]]
        load.computed(LENGTH, LENGTH, bench.costs.seconds(LENGTH, 0))
        load.end(LENGTH)
    assert [places.count(name) for name in ("p0", "p1", "p2", "p3")] == [10] * 4


def test_without_an_index_load_decides() -> None:
    """Nothing is known of prefixes, though every prompt is the same: as evenly as the policy that only looks at load."""
    clock, costs = Clock(), Costs()
    names = [f"p{i}" for i in range(5)] + [f"d{i}" for i in range(5)]
    for policy in (PrefixAware(32, PrefixIndex(), costs, clock=clock), LeastLoaded(32)):
        pods = view(*(pod(name, clock=clock, **LARGE) for name in names))
        places = []
        for _ in range(50):
            request = ask(prompt(1))
            route = policy.choose(request, pods)
            assert route is not None
            assert route.prefill is not None
            policy.placed(request, route)
            route.prefill.begin(LENGTH, LENGTH, route.seconds)
            route.decode.begin(0, LENGTH)
            places.append(chosen(route))
        for side in (0, 1):
            counts = [[place[side] for place in places].count(name) for name in names[5 * side : 5 * side + 5]]
            assert counts == [10] * 5


def test_a_slow_pod_gets_less() -> None:
    bench = Bench("p0", "p1", "d0")
    for _ in range(100):
        bench.costs.prefilled(bench.loads["p0"], 4_000, 0, 0.4)
        bench.costs.prefilled(bench.loads["p1"], 4_000, 0, 0.1)
    places = [bench.send(ask(prompt(seed)))[0] for seed in range(50)]
    assert 35 <= places.count("p1") <= 45


def test_the_decode_pod_computes_what_little_it_has_not_got() -> None:
    bench, tokens = Bench("p0", "d0", "d1"), prompt(1)
    bench.index.stored("d1", ids_of(tokens)[:245])
    assert chosen(bench.choose(ask(tokens))) == ("", "d1")
    # Not where that is most of it: prompts are the prefill pods' part.
    bench.index.removed("d1", ids_of(tokens)[100:])
    assert chosen(bench.choose(ask(tokens)))[0] == "p0"


def test_streams_that_would_stand_still_count() -> None:
    """The rest costs the decode pod 30 ms: it is nothing to a queue of a second, and too much beside a hundred streams."""
    bench, tokens = Bench("p0", "d0"), prompt(1)
    bench.index.stored("d0", ids_of(tokens)[:180])
    bench.loads["d0"].report(replace(ROOMY, num_running=100))
    assert chosen(bench.choose(ask(tokens)))[0] == "p0"
    bench.loads["p0"].report(replace(ROOMY, waiting_tokens=400_000))
    assert chosen(bench.choose(ask(tokens)))[0] == ""


def test_a_slow_link_makes_decode_pods_with_prefixes_dear() -> None:
    """Both decode pods have room: over a fast link load decides, over a slow one what needs not be moved."""
    bench, tokens = Bench("p0", "d0", "d1"), prompt(1)
    bench.index.stored("d1", ids_of(tokens)[:120])
    bench.loads["d1"].report(replace(ROOMY, num_running=2))
    assert chosen(bench.choose(ask(tokens))) == ("p0", "d0")
    for _ in range(100):
        bench.costs.transferred(4_000, 0.4)
    assert chosen(bench.choose(ask(tokens))) == ("p0", "d1")


def test_short_prompts_and_lonely_pods() -> None:
    bench = Bench("p0", "d0", "b0")
    assert chosen(bench.choose(ask(prompt(1, 31))))[0] == ""
    assert chosen(bench.choose(ask(prompt(1)), view(bench.loads["d0"]))) == ("", "d0")
    assert chosen(bench.choose(ask(prompt(1)), view(bench.loads["p0"], bench.loads["b0"]))) == ("", "b0")
    assert bench.choose(ask(prompt(1)), view(bench.loads["p0"])) is None
    assert bench.choose(ask(prompt(1)), view()) is None


def test_room_credits_groups_and_failures() -> None:
    bench, tokens = Bench("p0", "p1", "d0", "d1"), prompt(1)
    p0, p1, d0, d1 = bench.loads.values()
    assert chosen(bench.choose(ask(tokens, excluded=frozenset({p0, d0})))) == ("p1", "d1")
    assert chosen(bench.choose(ask(tokens, excluded=frozenset(bench.loads.values()))))[0] == ""
    assert chosen(bench.choose(ask(tokens, decode=d1)))[1] == "d1"
    d1.report(replace(ROOMY, free_blocks=10))
    assert chosen(bench.choose(ask(tokens)))[1] == "d0"
    d0.report(replace(ROOMY, credits=0))
    assert bench.choose(ask(tokens)) is None
    other = pod("d9", group=1, clock=bench.clock, **LARGE)
    assert chosen(bench.choose(ask(tokens), view(p0, p1, d0, other))) == ("", "d9")
    assert bench.choose(ask(tokens, group=0), view(p0, p1, d0, other)) is None


def test_a_full_prefill_pod_makes_it_wait() -> None:
    bench = Bench("p0", "d0")
    bench.loads["p0"].refused()
    assert bench.choose(ask(prompt(1))) is None


def test_what_is_larger_than_any_pod_takes_an_empty_one() -> None:
    bench = Bench("d0", free_blocks=19, num_blocks=20)
    request = RouteRequest(300, num_choices=128)
    assert bench.choose(request) is None
    bench.loads["d0"].report(replace(ROOMY, free_blocks=20, num_blocks=20))
    assert chosen(bench.choose(request)) == ("", "d0")


def test_a_pod_that_comes_back_has_nothing() -> None:
    bench, tokens = Bench("p0", "p1", "d0"), prompt(1)
    bench.index.stored("p1", ids_of(tokens))
    assert chosen(bench.choose(ask(tokens)))[0] == "p1"
    bench.index.clear("p1")
    route = bench.choose(ask(tokens))
    assert route is not None
    assert route.num_cached_tokens == 0


def test_a_thousand_pods(record_property: Callable[[str, object], None]) -> None:
    """Figures for many blocks: `python -m benchmarks.decisions`."""
    names = [f"p{i}" for i in range(500)] + [f"d{i}" for i in range(500)]
    bench = Bench(*names)
    common = prompt(0)
    for name in names:
        bench.index.stored(name, ids_of(common)[:100])
    requests = [ask((*common[:2_000], *prompt(seed, 2_000))) for seed in range(100)]
    for request in requests:
        assert request.prompt is not None
        request.prompt.ids(MODEL)
    begin = time.thread_time()
    places = [bench.send(request) for request in requests]
    microseconds = 1e4 * (time.thread_time() - begin)
    record_property("microseconds_per_choice", microseconds)
    print("microseconds a choice:", microseconds)
    for side in (0, 1):
        assert len({place[side] for place in places}) == 100  # spread: all have the same prefix
