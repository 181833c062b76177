"""Prefix hits, copy-on-write, and what the cache's listener hears."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from kvrelay.common.blocks import NO_PARENT, BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint, RequestId
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.engine.manager import KvManager
from kvrelay.engine.pool import StoredRun
from kvrelay.engine.sequence import Sequence

pytestmark = pytest.mark.unit

FINGERPRINT = Fingerprint("m")


def sequence(tokens: Seq[int], salt: str = "") -> Sequence:
    request = EngineRequest(
        request_id=RequestId("r"), prompt_token_ids=tuple(tokens), sampling=SamplingParams(), cache_salt=salt
    )
    return Sequence(request, 0, list(tokens), len(tokens), 0)


def computed(manager: KvManager, tokens: Seq[int], salt: str = "") -> Sequence:
    seq = sequence(tokens, salt)
    manager.pin(seq, manager.find(seq, len(tokens)))
    assert manager.grow(seq, len(tokens))
    manager.commit(seq, len(tokens))
    return seq


class Heard:
    def __init__(self) -> None:
        self.runs: list[StoredRun] = []
        self.gone: list[BlockId] = []

    def stored(self, runs: Seq[StoredRun]) -> None:
        self.runs += runs

    def removed(self, ids: Seq[BlockId]) -> None:
        self.gone += ids


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_a_prefix_is_found_in_whole_blocks(block_size: int) -> None:
    manager = KvManager(20, block_size, FINGERPRINT)
    first = computed(manager, range(100))
    for common in (0, 15, 47, 64, 96, 100):
        other = sequence([*range(common), 777, 778])
        assert manager.find(other, common + 1) == first.blocks[: common // block_size]
    assert manager.find(sequence(range(100)), 95) == first.blocks[: 95 // block_size]
    assert manager.find(sequence(range(100), salt="s"), 100) == []


def test_the_key_of_a_block_is_the_id_of_its_last_span() -> None:
    manager = KvManager(4, 32, FINGERPRINT)
    ids: list[BlockId] = []
    BlockHasher(FINGERPRINT).extend(ids, range(64))
    seq = computed(manager, range(64))
    assert manager.pool.cached == {ids[1]: seq.blocks[0], ids[3]: seq.blocks[1]}


def test_nothing_is_found_without_prefix_caching() -> None:
    manager = KvManager(8, 16, FINGERPRINT, prefix_caching=False)
    computed(manager, range(32))
    assert manager.find(sequence(range(32)), 32) == []
    assert not manager.pool.cached


def test_growth_that_does_not_fit_changes_nothing() -> None:
    manager = KvManager(3, 16, FINGERPRINT)
    seq = sequence(range(64))
    assert manager.grow(seq, 17)
    assert manager.cost(seq, 64, ()) == 2
    assert not manager.grow(seq, 64)
    assert len(seq.blocks) == 2
    assert manager.num_free == 1


def test_the_last_holder_writes_in_place() -> None:
    manager = KvManager(8, 16, FINGERPRINT)
    parent = computed(manager, range(20))
    children = [sequence(range(20)) for _ in range(2)]
    for child in children:
        manager.fork(parent, child)
    full, tail = parent.blocks
    for seq in (parent, *children):
        seq.tokens.append(5)
        assert manager.grow(seq, 21)
    copies = manager.take_copies()
    assert [source for source, _ in copies] == [tail, tail]
    assert children[1].blocks == [full, tail]
    assert len({parent.blocks[1], children[0].blocks[1], tail}) == 3
    assert manager.take_copies() == []


def test_a_copys_source_lives_until_the_step_is_done() -> None:
    manager = KvManager(4, 16, FINGERPRINT)
    parent, child = computed(manager, range(20)), sequence(range(20))
    manager.fork(parent, child)
    tail = parent.blocks[1]
    parent.tokens.append(5)
    assert manager.grow(parent, 21)
    manager.free(child)  # preempted in the same step
    other = sequence(range(500, 530))
    assert manager.grow(other, 16)
    assert not manager.grow(other, 30)
    assert tail not in (*other.blocks, *parent.blocks)
    assert manager.take_copies() == [(tail, parent.blocks[1])]
    assert manager.take_copies() == []  # of a step ahead
    manager.end_step()
    assert manager.grow(other, 30)
    assert tail in other.blocks


def test_pinning_costs_the_idle_blocks() -> None:
    manager = KvManager(4, 16, FINGERPRINT)
    first = computed(manager, range(48))
    again = sequence(range(48))
    hits = manager.find(again, 47)
    assert manager.cost(again, 48, hits) == 1
    manager.free(first)
    assert manager.cost(again, 48, hits) == 3
    manager.pin(again, hits)
    assert again.num_computed == 32
    assert manager.num_free == 2


def test_truncating_keeps_the_blocks_beyond_the_computed_ones() -> None:
    manager = KvManager(8, 16, FINGERPRINT)
    first = computed(manager, range(32))
    seq = sequence(range(60))
    manager.pin(seq, manager.find(seq, 60))
    assert manager.grow(seq, 60)
    own = seq.blocks[2:]
    manager.truncate(seq, 59)
    assert seq.blocks == [*first.blocks, *own]
    manager.truncate(seq, 31)
    assert seq.blocks == [first.blocks[0], *own]
    assert seq.num_computed == 16
    assert manager.pool.refs[first.blocks[1]] == 1


def test_a_listener_hears_runs_and_removals() -> None:
    heard: Any = Heard()
    manager = KvManager(6, 32, FINGERPRINT, listener=heard)
    first = computed(manager, range(70), salt="s")
    ids = first.block_ids
    assert heard.runs == [
        StoredRun(parent=NO_PARENT, ids=tuple(ids[:4]), token_ids=tuple(range(64)), extra_keys=("salt:s",))
    ]
    longer = computed(manager, range(130), salt="s")
    assert heard.runs[1].parent == ids[3]
    assert heard.runs[1].token_ids == tuple(range(64, 128))
    manager.free(first)
    manager.free(longer)
    assert manager.grow(sequence(range(900, 1000)), 100)
    assert heard.gone == [longer.block_ids[7], longer.block_ids[5]][: len(heard.gone)]
    assert heard.gone
