"""Batches of one pod applied by their numbers: what is known, what follows, what is missing."""

import time

import pytest

from kvrelay.common.ids import BlockId, Epoch, PodId
from kvrelay.common.kvevents import (
    MAX_BATCH_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    decode_batch,
    encode_batch,
)
from kvrelay.router.replica import Replica
from tests.common.test_discovery import record
from tests.kvevents import Sets, key, stored

pytestmark = pytest.mark.unit

POD = PodId("one")


def batch(sequence: int, *events: Event, epoch: str = "e1") -> EventBatch:
    return EventBatch(epoch=Epoch(epoch), sequence=sequence, time=time.time(), events=events)


def replica() -> tuple[Replica, Sets]:
    index = Sets()
    return Replica(record("one"), index, 0.0), index


def test_from_the_first_batch_on() -> None:
    one, index = replica()
    index.stored(POD, (key(99),))
    assert one.apply(batch(1, stored(1, 2, 3)))
    assert one.apply(batch(2, BlockRemoved(keys=(key(2),)), stored(4)))
    assert index[POD] == {key(1), key(3), key(4)}, "what the index had before is not the pod's"
    assert one.apply(batch(3, AllBlocksCleared(), stored(5)))
    assert index[POD] == {key(5)}
    assert one.sequence == 3


def test_a_batch_that_comes_twice_counts_once() -> None:
    one, index = replica()
    for number in (1, 2, 1, 2, 3):
        assert one.apply(batch(number, stored(number)))
    assert one.apply(batch(1, BlockRemoved(keys=(key(3),))))
    assert (index[POD], one.sequence) == ({key(1), key(2), key(3)}, 3)


def test_a_gap_changes_nothing_and_the_snapshot_covers_it() -> None:
    one, index = replica()
    assert one.apply(batch(1, stored(1)))
    assert not one.apply(batch(3, stored(3)))
    assert (index[POD], one.sequence) == ({key(1)}, 1)
    one.lose()
    assert index[POD] == {key(1)}, "most of what is known is still right"
    one.restart(4, [key(2)])
    one.add([key(3)])
    for number in (3, 4):
        assert one.apply(batch(number, stored(77)))
    assert one.apply(batch(5, stored(5)))
    assert (index[POD], one.sequence) == ({key(2), key(3), key(5)}, 5)


@pytest.mark.parametrize("first", [batch(2, stored(1)), batch(1), batch(7)])
def test_in_the_middle_a_snapshot_is_needed(first: EventBatch) -> None:
    one, index = replica()
    assert not one.apply(first)
    assert one.sequence is None
    assert index[POD] == set()


def test_a_batch_without_events_tells_of_a_gap() -> None:
    one, _ = replica()
    assert one.apply(batch(0))
    assert one.apply(batch(1, stored(1)))
    assert one.apply(batch(1))
    assert not one.apply(batch(2)), "the second one has not come"


def test_other_epochs_are_ignored() -> None:
    one, index = replica()
    assert one.apply(batch(9, stored(9), epoch="e0"))
    assert one.apply(batch(1, stored(1)))
    assert one.apply(batch(2, BlockRemoved(keys=(key(1),)), epoch="e2"))
    assert (index[POD], one.sequence) == ({key(1)}, 1)
    one.end()
    assert index[POD] == set()


def test_on_the_wire_a_batch_has_no_tokens_and_no_salts() -> None:
    told = BlockStored(parent=key(0), keys=(key(1),), token_ids=(7,) * 16, block_size=16, extra_keys=("salt:secret",))
    data = encode_batch(batch(1, told, BlockRemoved(keys=(key(2),)), AllBlocksCleared()))
    assert b"secret" not in data
    assert decode_batch(data).events == (stored(1), BlockRemoved(keys=(key(2),)), AllBlocksCleared())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode_batch(batch(1, BlockRemoved(keys=(BlockId(b"short"),)))),
        encode_batch(batch(-1)),
        bytes(MAX_BATCH_BYTES + 1),
    ],
    ids=["empty", "garbage", "short key", "negative", "huge"],
)
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_batch(data)
