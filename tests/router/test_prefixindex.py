"""The prefix index against a plain model of it, and what the model does not say: bounds of its memory and of its pauses."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.common.blocks import SPAN, BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.router.prefixindex import PrefixIndex

pytestmark = pytest.mark.unit

PODS = {"a": 16, "b": 16, "c": 32, "d": 48, "node:n1": 16}
CHAINS = 3
LENGTH = 70


def key(chain: int, at: int) -> BlockId:
    """Chains share their first half."""
    return BlockId(bytes([chain if at >= LENGTH // 2 else 0, at]).rjust(16, b"\0"))


def ids_of(chain: int) -> list[BlockId]:
    return [key(chain, at) for at in range(LENGTH)]


class Model:
    """A set a pod."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[BlockId]] = {name: set() for name in PODS}

    def match(self, ids: Sequence[BlockId]) -> dict[str, int]:
        found = {}
        for name, blocks in self.blocks.items():
            num_spans = PODS[name] // SPAN
            tokens = 0
            for at in range(num_spans - 1, len(ids), num_spans):
                if ids[at] not in blocks:
                    break
                tokens += PODS[name]
            if tokens:
                found[name] = tokens
        return found


def filled() -> PrefixIndex:
    index = PrefixIndex()
    for name, block_size in PODS.items():
        index.add_pod(name, block_size)
    return index


def agree(index: PrefixIndex, model: Model) -> None:
    assert len(index) == sum(map(len, model.blocks.values()))
    places = index.slots(PODS)
    for chain in range(CHAINS):
        for ids in (ids_of(chain), ids_of(chain)[:33], ids_of(chain)[:1], []):
            expected = model.match(ids)
            assert index.match(ids) == expected
            assert dict(zip(PODS, index.hits(ids)[places], strict=True)) == dict.fromkeys(PODS, 0) | expected


RUN = st.tuples(st.integers(0, CHAINS - 1), st.integers(0, LENGTH), st.integers(0, LENGTH)).map(
    lambda run: [key(run[0], at) for at in range(min(run[1:]), max(run[1:]))]
)
SINGLE = st.tuples(st.integers(0, CHAINS - 1), st.integers(0, LENGTH - 1)).map(lambda place: [key(*place)])
STEP = st.tuples(
    st.sampled_from(("stored", "stored", "stored", "removed", "clear", "replace", "readd")),
    st.sampled_from(tuple(PODS)),
    RUN | SINGLE,
)


@given(st.lists(STEP, max_size=30))
@settings(deadline=None)
def test_it_says_what_a_plain_model_says(steps: list[tuple[str, str, list[BlockId]]]) -> None:
    index, model = filled(), Model()
    for what, name, keys in steps:
        blocks = model.blocks[name]
        match what:
            case "stored":
                index.stored(name, keys)
                blocks.update(keys)
            case "removed":
                index.removed(name, keys)
                blocks.difference_update(keys)
            case "clear":
                index.clear(name)
                blocks.clear()
            case "replace":
                index.replace(name, keys)
                model.blocks[name] = set(keys)
            case _:
                index.remove_pod(name)
                assert name not in index
                index.add_pod(name, PODS[name])
                blocks.clear()
        agree(index, model)


def test_a_hole_ends_a_prefix() -> None:
    index = filled()
    ids = ids_of(0)
    index.stored("a", ids)
    index.stored("b", ids)
    index.removed("b", [ids[40]])
    assert index.match(ids) == {"a": LENGTH * SPAN, "b": 40 * SPAN}
    index.stored("b", [ids[40]])
    assert index.match(ids)["b"] == LENGTH * SPAN


def test_larger_blocks_count_whole() -> None:
    """A pod with blocks of 32 tokens names each second span; half a block of a prompt is no hit."""
    index = filled()
    ids = ids_of(0)
    index.stored("c", ids[1::2])
    assert index.match(ids[:5]) == {"c": 64}
    index.removed("c", [ids[1]])
    assert index.match(ids) == {}


def test_what_was_not_added() -> None:
    index = PrefixIndex()
    with pytest.raises(KeyError):
        index.stored("a", ids_of(0))
    index.removed("a", ids_of(0))
    index.clear("a")
    index.remove_pod("a")
    assert index.match(ids_of(0)) == {}
    with pytest.raises(ValueError, match="spans of 16"):
        index.add_pod("a", 24)


def test_another_block_size_is_another_pod() -> None:
    index = filled()
    index.stored("a", ids_of(0))
    index.add_pod("a", 16)
    assert index.match(ids_of(0)) == {"a": LENGTH * SPAN}
    index.add_pod("a", 32)
    assert index.match(ids_of(0)) == {}


def test_pods_that_come_and_go_leave_nothing() -> None:
    index = filled()
    for life in range(200):
        index.stored("a", ids_of(life % CHAINS))
        index.clear("a")
        index.add_pod("guest", 16)
        index.stored("guest", ids_of(1))
        index.remove_pod("guest")
    for _ in range(20):
        index.removed("a", ids_of(0))  # any change cleans up
    assert (index._masks, index._former) == ({}, [])
    assert len(index._names) < 20


def test_many_pods_with_one_prefix() -> None:
    index = PrefixIndex()
    names = [f"p{i}" for i in range(200)]
    for i, name in enumerate(names):
        index.add_pod(name, 16)
        index.stored(name, ids_of(0)[: i % LENGTH])
    hits = index.hits(ids_of(0))[index.slots([*names, "stranger"])]
    assert hits.tolist() == [i % LENGTH * SPAN for i in range(200)] + [0]


def test_a_clear_of_many_blocks_is_no_pause(record_property: Callable[[str, object], None]) -> None:
    index = PrefixIndex()
    index.add_pod("a", 16)
    index.stored("a", [BlockId(i.to_bytes(16, "little")) for i in range(300_000)])
    begin = time.perf_counter()
    index.clear("a")
    seconds = time.perf_counter() - begin
    record_property("clear_seconds", seconds)
    assert index.match([BlockId(bytes(16))]) == {}
    assert seconds < 0.02  # cleaning all of it takes several times as long


def test_with_real_ids() -> None:
    index = PrefixIndex()
    index.add_pod("a", 16)
    first: list[BlockId] = []
    BlockHasher(Fingerprint("f")).extend(first, list(range(100)))
    index.stored("a", first)
    other: list[BlockId] = []
    BlockHasher(Fingerprint("f")).extend(other, [*range(64), *range(36)])
    assert index.match(other) == {"a": 64}
    assert np.count_nonzero(index.hits(other)) == 1
