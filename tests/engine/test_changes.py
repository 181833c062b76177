"""What a step changed in the prefix cache, as events: whole, in order, in runs, bounded; and true to the pool."""

import random
from typing import Any

import pytest

from kvrelay.common.blocks import NO_PARENT, SPAN
from kvrelay.common.ids import BlockId
from kvrelay.common.kvevents import BlockRemoved, BlockStored, Event
from kvrelay.engine import changes as module
from kvrelay.engine.changes import CacheChanges
from kvrelay.engine.pool import StoredRun

pytestmark = pytest.mark.unit


def key(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "little"))


def run(parent: int, *numbers: int, extra_keys: tuple[str, ...] = ()) -> StoredRun:
    """Spans whose tokens say their number."""
    return StoredRun(
        parent=key(parent),
        ids=tuple(map(key, numbers)),
        token_ids=tuple(number for number in numbers for _ in range(SPAN)),
        extra_keys=extra_keys,
    )


def apply(events: tuple[Event, ...], keys: set[BlockId]) -> None:
    """Checks that nothing is stored or removed twice."""
    for event in events:
        if isinstance(event, BlockStored):
            assert keys.isdisjoint(event.keys)
            keys |= set(event.keys)
        else:
            assert isinstance(event, BlockRemoved)
            assert keys >= set(event.keys)
            keys -= set(event.keys)


def test_nothing_changed() -> None:
    changes = CacheChanges(16)
    changes.removed(())
    assert changes.take() == ()


def test_runs_that_follow_one_another_are_one_event() -> None:
    changes = CacheChanges(16)
    changes.stored((run(0, 1, 2),))
    changes.stored((run(2, 3), run(3, 4)))
    (event,) = changes.take()
    assert event == BlockStored(
        parent=NO_PARENT,
        keys=(key(1), key(2), key(3), key(4)),
        token_ids=tuple(number for number in (1, 2, 3, 4) for _ in range(16)),
        block_size=16,
    )
    assert changes.take() == ()


@pytest.mark.parametrize("second", [run(1, 3), run(2, 3, extra_keys=("salt:a",))])
def test_what_does_not_follow_is_another_event(second: StoredRun) -> None:
    changes = CacheChanges(16)
    changes.stored((run(0, 1, 2), second))
    first, other = changes.take()
    assert isinstance(first, BlockStored)
    assert isinstance(other, BlockStored)
    assert (first.keys, other.keys) == ((key(1), key(2)), (key(3),))
    assert (other.parent, other.extra_keys) == (second.parent, second.extra_keys)


def test_the_order_of_what_was_stored_and_removed_is_kept() -> None:
    changes = CacheChanges(16)
    changes.stored((run(0, 1),))
    changes.removed([key(8)])
    changes.removed([key(9), key(1)])
    changes.stored((run(0, 1),))
    kinds = [(type(event), event.keys) for event in changes.take() if isinstance(event, BlockStored | BlockRemoved)]
    assert kinds == [
        (BlockStored, (key(1),)),
        (BlockRemoved, (key(8), key(9), key(1))),
        (BlockStored, (key(1),)),
    ]


def test_a_large_block_has_the_key_of_its_last_span() -> None:
    changes = CacheChanges(32)
    changes.stored((run(0, 1, 2, 3, 4), run(4, 5, 6)))
    (event,) = changes.take()
    assert isinstance(event, BlockStored)
    assert (event.keys, event.block_size) == ((key(2), key(4), key(6)), 32)
    assert len(event.token_ids) == 3 * 32


def test_much_is_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 4 * 16)
    changes = CacheChanges(16)
    changes.stored((run(0, *range(1, 11)),))
    changes.removed([key(number) for number in range(20, 29)])
    told = []
    while events := changes.take():
        assert sum(len(event.keys) for event in events if isinstance(event, BlockStored | BlockRemoved)) <= 4
        told += events
    stored = [event for event in told if isinstance(event, BlockStored)]
    assert [event.parent for event in stored] == [NO_PARENT, key(4), key(8)]
    assert [key for event in stored for key in event.keys] == [key(number) for number in range(1, 11)]
    assert [len(event.token_ids) for event in stored] == [64, 64, 32]
    removed = [key for event in told if isinstance(event, BlockRemoved) for key in event.keys]
    assert removed == [key(number) for number in range(20, 29)]


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_told_is_what_the_pool_has(harness: Any, block_size: int, seed: int) -> None:
    """Prefixes that are shared, pools that overflow, choices that branch, salts, aborts."""
    rng = random.Random(seed)
    changes = CacheChanges(block_size)
    h = harness(num_blocks=24, max_model_len=300, block_size=block_size, listener=changes)
    told: set[BlockId] = set()
    evicted = 0
    trunks = [[rng.randrange(90) for _ in range(150)] for _ in range(3)]
    for number in range(60):
        prompt = rng.choice(trunks)[: rng.randrange(1, 150)] + [rng.randrange(90) for _ in range(rng.randrange(40))]
        salt = rng.choice(("", "", "a"))
        h.engine.add(
            h.request(f"r{number}", prompt, max_tokens=rng.randrange(1, 40), n=rng.choice((1, 1, 2)), cache_salt=salt)
        )
        for _ in range(rng.randrange(8)):
            h.step()
            events = changes.take()
            evicted += sum(isinstance(event, BlockRemoved) for event in events)
            apply(events, told)
            assert told == h.engine.manager.pool.cached.keys()
        if rng.random() < 0.2:
            h.engine.abort((f"r{rng.randrange(number + 1)}",))
    h.run()
    apply(changes.take(), told)
    assert told == h.engine.manager.pool.cached.keys()
    assert evicted > 5, "the pool was too large for a test"
