"""Eviction policies: against simulations written from the paper's pseudocode, in random lives with pins and sizes, and by hand."""

import copy
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.policy import Arc, Lru, Policy, make_policy
from tests.kvstore.caches import REFERENCES, Cache, ReferenceArc, key

pytestmark = pytest.mark.unit


def arc_cache(limit_bytes: int, start: float = 0.0) -> tuple[Arc, Cache]:
    policy = Arc(limit_bytes, start)
    return policy, Cache(policy, limit_bytes)


def lists(arc: Arc) -> dict[str, list[int]]:
    named = {"t1": arc.t1, "t2": arc.t2, "b1": arc.b1, "b2": arc.b2}
    return {name: [int.from_bytes(block_id, "little") for block_id in blocks] for name, blocks in named.items()}


# Requests: of each kind, as many as the test takes, from a seed and for a cache of `capacity` blocks.


def uniform(rng: random.Random, capacity: int) -> Iterator[int]:
    while True:
        yield rng.randrange(2 * capacity + 1)


def zipf(rng: random.Random, capacity: int) -> Iterator[int]:
    numbers = range(5 * capacity + 5)
    weights = list(itertools.accumulate(1 / (number + 1) for number in numbers))
    while True:
        yield from rng.choices(numbers, cum_weights=weights, k=100)


def looping(rng: random.Random, capacity: int) -> Iterator[int]:
    """Loops over a little less than fits, and over a little more."""
    while True:
        length = max(1, round(capacity * rng.choice((0.5, 0.9, 1.1, 1.5))))
        for _ in range(rng.randint(2, 4)):
            yield from range(length)


def scanned(rng: random.Random, capacity: int) -> Iterator[int]:
    """A working set of three fifths of the cache, used twice, then a scan of blocks that never come again."""
    fresh = itertools.count(capacity)
    working = range(max(1, 3 * capacity // 5))
    while True:
        for _ in range(2):
            yield from rng.sample(working, len(working))
        yield from itertools.islice(fresh, 2 * capacity)


def mixed(rng: random.Random, capacity: int) -> Iterator[int]:
    """Phases of all kinds, in which the target goes up and down."""
    while True:
        kind = rng.choice((uniform, zipf, looping, scanned))
        yield from itertools.islice(kind(rng, capacity), rng.randint(1, 6 * capacity))


KINDS = (uniform, zipf, looping, scanned, mixed)


@pytest.mark.parametrize("block_bytes", [1, 147_459])
@pytest.mark.parametrize("capacity", [1, 2, 3, 8, 13, 60])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lru", "arc"])
def test_each_request_equals_the_reference(
    name: str, kind: Callable[[random.Random, int], Iterator[int]], capacity: int, block_bytes: int
) -> None:
    """Also for a size that is no power of two, where a target in bytes is not the target in pages times a number."""
    limit = capacity * block_bytes
    cache, reference = Cache(make_policy(name, limit), limit), REFERENCES[name](capacity)
    for count, number in enumerate(itertools.islice(kind(random.Random(capacity), capacity), 1500)):
        assert cache.request(number, block_bytes) == reference.request(number), count
        assert cache.sizes.keys() == {key(page) for page in reference.contents()}, count


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_the_lists_and_the_target_are_the_papers_in_every_branch(start: float) -> None:
    met: Counter[str] = Counter()
    for seed in range(30):
        capacity = 1 + seed % 9
        (arc, cache), reference = arc_cache(capacity, start), ReferenceArc(capacity, start)
        for number in itertools.islice(mixed(random.Random(seed), capacity), 600):
            assert cache.request(number) == reference.request(number)
            pages = {name: list(getattr(reference, name)) for name in ("t1", "t2", "b1", "b2")}
            assert lists(arc) == pages
            assert arc.target_bytes == reference.p
        met += reference.met
    branches = ("I", "II", "III", "IV.A, ghosts", "IV.A, no ghosts", "IV.B", "IV.B, full", "REPLACE, tie")
    assert min(met[branch] for branch in branches) > 20, "all of the algorithm was compared"


@pytest.mark.parametrize("capacity", [20, 100])
def test_scans_do_not_drive_the_working_set_out_of_arc(capacity: int) -> None:
    hits = {}
    for name in ("lru", "arc"):
        cache = Cache(make_policy(name, capacity), capacity)
        hits[name] = sum(map(cache.request, itertools.islice(scanned(random.Random(1), capacity), 60 * capacity)))
    assert hits["arc"] > 1.5 * hits["lru"]


class Lives:
    """Random deeds on a policy, and what must hold after each."""

    def __init__(self, policy: Policy, limit_bytes: int) -> None:
        self.cache = Cache(policy, limit_bytes)

    def request(self, number: int, size: int) -> None:
        self.cache.request(number, size)

    def ask(self, number: int, size: int) -> None:
        """For a block that then isn't stored."""
        if key(number) not in self.cache.sizes:
            self.cache.policy.victim(key(number), self.cache.evictable)

    def remove(self, number: int, size: int) -> None:
        self.cache.remove(number)

    def pin(self, number: int, size: int) -> None:
        self.cache.pinned ^= {key(number)}

    def check(self) -> None:
        policy, sizes = self.cache.policy, self.cache.sizes
        assert sorted(drained(policy)) == sorted(sizes)
        if not isinstance(policy, Arc):
            return
        assert {**policy.t1.sizes, **policy.t2.sizes} == sizes
        named = [policy.t1, policy.t2, policy.b1, policy.b2]
        every = [block_id for blocks in named for block_id in blocks]
        assert len(every) == len(set(every)), "no id is in two lists"
        for blocks in named:
            assert blocks.num_bytes == sum(blocks.sizes.values())
        assert policy.t1.num_bytes + policy.b1.num_bytes <= policy.limit_bytes
        assert sum(blocks.num_bytes for blocks in named) <= 2 * policy.limit_bytes
        assert 0 <= policy.target_bytes <= policy.limit_bytes * (1 + 1e-9)
        assert policy._counted.issubset({*policy.b1, *policy.b2}), "what it keeps of ghosts is bounded as they are"


def drained(policy: Policy) -> list[BlockId]:
    """What a copy of the policy gives until it has nothing more."""
    policy = copy.deepcopy(policy)
    gone = []
    while (victim := policy.victim(key(10**9), lambda _: True)) is not None:
        policy.evicted(victim)
        gone.append(victim)
    return gone


DEEDS = st.tuples(
    st.sampled_from(("request", "request", "request", "ask", "remove", "pin")), st.integers(0, 14), st.integers(1, 7)
)


@pytest.mark.parametrize("name", ["lru", "arc"])
@settings(deadline=None, max_examples=150)
@given(deeds=st.lists(DEEDS, max_size=80), limit_bytes=st.integers(7, 30))
def test_whatever_happens_it_holds_what_the_tier_holds(
    name: str, deeds: list[tuple[str, int, int]], limit_bytes: int
) -> None:
    lives = Lives(make_policy(name, limit_bytes), limit_bytes)
    for deed, number, size in deeds:
        getattr(lives, deed)(number, size)
        lives.check()


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_pinned_blocks_are_passed_over(name: str) -> None:
    cache = Cache(make_policy(name, 3), 3)
    for number in (1, 2, 3, 1):
        cache.request(number)
    cache.pinned = {key(2)}
    cache.request(4)
    assert cache.sizes.keys() == {key(1), key(2), key(4)}
    cache.pinned = {key(2), key(4)}
    cache.request(5)
    assert cache.sizes.keys() == {key(2), key(4), key(5)}, "the others' turn, if that is all that can go"
    cache.pinned |= {key(5)}
    assert cache.policy.victim(key(6), cache.evictable) is None


def test_lru_goes_by_the_last_use() -> None:
    policy = Lru()
    for number in (1, 2, 3):
        policy.stored(key(number), 1)
    policy.used(key(1))
    policy.removed(key(2))
    policy.removed(key(9))
    assert drained(policy) == [key(3), key(1)]


def test_a_tie_takes_from_t1_for_a_block_of_b2_alone() -> None:
    """The one place where REPLACE depends on what comes."""
    arc, cache = arc_cache(3)
    for number in (1, 1, 2, 3, 4, 2, 3):
        cache.request(number)
    assert lists(arc) == {"t1": [4], "t2": [2, 3], "b1": [], "b2": [1]}
    assert arc.target_bytes == 2
    assert arc.victim(key(1), cache.evictable) == key(4)
    assert arc.target_bytes == 1, "as much as T1 has"
    assert arc.victim(key(5), cache.evictable) == key(2)
    assert arc.victim(key(1), cache.evictable) == key(4)


@pytest.mark.parametrize("times", [1, 5])
def test_a_ghost_moves_the_target_once_even_if_its_block_does_not_come(times: int) -> None:
    arc, cache = arc_cache(4)
    for number in (1, 2, 1, 3, 4, 5, 6):
        cache.request(number)
    assert lists(arc) == {"t1": [4, 5, 6], "t2": [1], "b1": [3], "b2": []}
    for _ in range(times):
        arc.victim(key(3), cache.evictable)
    assert arc.target_bytes == 1
    cache.request(3)
    assert arc.target_bytes == 1
    assert key(3) in arc.t2
    arc.evicted(key(3))
    arc.stored(key(3), 1)
    assert arc.target_bytes == 0, "its next ghost counts anew"


def test_a_ghost_whose_block_is_on_its_way_outlives_the_others() -> None:
    arc, cache = arc_cache(4)
    for number in (1, 1, 2, 2, 3, 4, 5, 6):
        cache.request(number)
    assert lists(arc) == {"t1": [5, 6], "t2": [1, 2], "b1": [3, 4], "b2": []}
    arc.victim(key(3), cache.evictable)
    cache.request(7)
    assert lists(arc) == {"t1": [6, 7], "t2": [1, 2], "b1": [3, 5], "b2": []}


def test_a_ghost_counts_where_there_is_room_too() -> None:
    arc, cache = arc_cache(3)
    for number in (1, 1, 2, 3, 4):
        cache.request(number)
    assert lists(arc) == {"t1": [3, 4], "t2": [1], "b1": [2], "b2": []}
    cache.remove(4)
    cache.request(2)
    assert lists(arc) == {"t1": [3], "t2": [1, 2], "b1": [], "b2": []}
    assert arc.target_bytes == 1


def test_no_ghost_is_left_of_what_was_removed() -> None:
    arc, cache = arc_cache(3)
    for number in (1, 1, 2, 3, 4):
        cache.request(number)
    for number in (1, 2, 3, 9):
        cache.remove(number)
    assert lists(arc) == {"t1": [4], "t2": [], "b1": [], "b2": []}
    for number in (1, 2):
        cache.request(number)
    assert lists(arc)["t1"] == [4, 1, 2], "they come as if for the first time"
    assert arc.target_bytes == 0


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_block_that_is_not_in_the_tier_is_neither_used_nor_evicted(name: str) -> None:
    cache = Cache(make_policy(name, 2), 2)
    for number in (1, 1, 2, 3):
        cache.request(number)
    absent = next(number for number in (1, 2, 3, 4) if key(number) not in cache.sizes)
    for call in (cache.policy.used, cache.policy.evicted):
        for number in (absent, 4):
            with pytest.raises(KeyError):
                call(key(number))
    assert sorted(drained(cache.policy)) == sorted(cache.sizes)


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_large_block_takes_as_many_small_ones_as_it_needs(name: str) -> None:
    cache = Cache(make_policy(name, 100), 100)
    for number in range(10):
        cache.request(number, 10)
    cache.request(10, 35)
    assert cache.sizes.keys() == set(map(key, range(4, 11)))


def test_arc_counts_bytes() -> None:
    arc, cache = arc_cache(100)
    cache.request(0, 10)
    cache.request(0)
    for number in (1, 2, 3):
        cache.request(number, 30)
    cache.request(4, 20)
    assert lists(arc) == {"t1": [2, 3, 4], "t2": [0], "b1": [], "b2": []}, "a ghost of 30 would make L1 110"
    for number in (5, 6):
        cache.request(number, 10)
    assert lists(arc) == {"t1": [3, 4, 5, 6], "t2": [0], "b1": [2], "b2": []}, "L1 is 100"
    cache.request(2, 40)
    assert arc.target_bytes == 30, "as large as the ghost was"
    assert lists(arc) == {"t1": [4, 5, 6], "t2": [0, 2], "b1": [3], "b2": []}
    assert arc.t2.num_bytes == 50, "as large as the block is now"


def test_a_policy_is_chosen_by_name() -> None:
    assert isinstance(make_policy("lru", 1), Lru)
    arc = make_policy("arc", 7)
    assert isinstance(arc, Arc)
    assert arc.limit_bytes == 7
    assert [make_policy(name, 1).name for name in ("lru", "arc")] == ["lru", "arc"]
    with pytest.raises(ValueError, match=r"'mru'.*arc, lru"):
        make_policy("mru", 1)
