"""The block pool: references, the order in which free blocks go, and what listeners hear."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvrelay.common.errors import NoCapacity
from kvrelay.common.ids import BlockId
from kvrelay.engine.pool import BlockPool, NoListener, StoredRun

pytestmark = pytest.mark.unit


def key(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "little"))


class Removed:
    def __init__(self) -> None:
        self.ids: list[BlockId] = []

    def stored(self, runs: Sequence[StoredRun]) -> None:
        raise AssertionError("the pool alone stores nothing")

    def removed(self, ids: Sequence[BlockId]) -> None:
        self.ids += ids


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        assert pool.cache(block, key(number))
    return blocks


def test_all_blocks_once_and_no_more() -> None:
    pool = BlockPool(5, NoListener())
    assert sorted(pool.allocate(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(NoCapacity):
        pool.allocate(1)
    pool.release([3])
    with pytest.raises(NoCapacity):
        pool.allocate(2)
    assert pool.num_free == 1, "a refusal takes nothing"
    assert pool.allocate(1) == [3]


def test_a_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2, NoListener())
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_blank_blocks_go_before_cached_ones_and_of_these_the_longest_unused() -> None:
    listener = Removed()
    pool = BlockPool(6, listener)
    a, b = cached(pool, 1, 2), cached(pool, 3, 4)
    pool.release(a)
    pool.release(b)
    pool.allocate(2)
    assert not listener.ids
    pool.share(a)  # used again
    pool.release(a)
    pool.allocate(3)
    # Of a prefix the tail goes first: 4 before 3, and 2 before 1.
    assert listener.ids == [key(4), key(3), key(2)]
    assert pool.find([key(1), key(2)]) == a[:1]
    assert pool.find([key(3)]) == []


def test_find_ends_at_the_first_gap() -> None:
    pool = BlockPool(3, NoListener())
    blocks = cached(pool, 1, 2, 3)
    assert pool.find([key(1), key(9), key(3)]) == blocks[:1]


def test_equal_content_is_cached_once() -> None:
    pool = BlockPool(2, NoListener())
    (first,) = cached(pool, 1)
    (second,) = pool.allocate(1)
    assert not pool.cache(second, key(1))
    pool.release([second])
    assert pool.find([key(1)]) == [first]
    assert list(pool.blank) == [second]


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0, NoListener())


@pytest.mark.parametrize("seed", range(20))
def test_against_a_plain_model(seed: int) -> None:
    """Random holders: a block is free when nobody holds it, and what is found is what was cached."""
    rng = random.Random(seed)
    pool = BlockPool(12, NoListener())
    holders: list[list[int]] = []
    contents: dict[int, Any] = {}
    for number in range(400):
        match rng.choice(("allocate", "cache", "share", "release")):
            case "allocate":
                count = rng.randint(1, 4)
                if count <= pool.num_free:
                    holders.append(pool.allocate(count))
                    contents |= dict.fromkeys(holders[-1], None)
            case "cache" if holders:
                block = rng.choice(rng.choice(holders))
                if pool.cache(block, key(number)):
                    contents[block] = key(number)
            case "share":
                known = [content for content in contents.values() if content is not None]
                found = pool.find([rng.choice(known)]) if known else []
                if found:
                    pool.share(found)
                    holders.append(found)
            case "release" if holders:
                pool.release(holders.pop(rng.randrange(len(holders))))
        held = [block for blocks in holders for block in blocks]
        assert pool.refs == [held.count(block) for block in range(12)]
        assert pool.num_free == 12 - len(set(held))
        assert all(contents[block] == content for content, block in pool.cached.items())
