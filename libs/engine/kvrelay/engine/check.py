"""The invariants of the blocks and of who holds them. Tests check after every step; a debug mode when idle."""

from collections import Counter
from collections.abc import Iterable, Iterator

from kvrelay.engine.ledger import Ledger
from kvrelay.engine.manager import KvManager
from kvrelay.engine.pool import BlockPool
from kvrelay.engine.scheduler import Scheduler
from kvrelay.engine.sequence import Sequence, State


def violations(manager: KvManager, scheduler: Scheduler, ledger: Ledger) -> list[str]:
    """What is wrong, in words; empty: whole. Costs about a microsecond a block and a held block."""
    sequences = list(_sequences(ledger))
    found = list(_references(manager.pool, sequences, [*manager.sources, *manager.lent]))
    found += _free_blocks(manager.pool)
    found += _cache(manager.pool)
    for seq in sequences:
        found += _sequence(manager, seq)
    found += _queues(scheduler, ledger, sequences)
    return found


def _sequences(ledger: Ledger) -> Iterator[Sequence]:
    for entry in (*ledger.entries.values(), *ledger.ending.values()):
        yield from entry.sequences
    yield from ledger.doomed
    yield from ledger.unloading


def _references(pool: BlockPool, sequences: Iterable[Sequence], sources: Iterable[int]) -> Iterator[str]:
    held = Counter(sources)
    for seq in sequences:
        held.update(seq.blocks)
    for block, refs in enumerate(pool.refs):
        if refs != held[block]:
            yield f"block {block} has {refs} references and {held[block]} holders"


def _free_blocks(pool: BlockPool) -> Iterator[str]:
    free = Counter([*pool.blank, *pool.idle])
    for block, refs in enumerate(pool.refs):
        if free[block] != (refs == 0):
            yield f"block {block} has {refs} references and is {free[block]} times among the free ones"
    yield from (f"free block {block} has a key and is not idle" for block in pool.blank if pool.keys[block] is not None)
    yield from (f"idle block {block} has no key" for block in pool.idle if pool.keys[block] is None)


def _cache(pool: BlockPool) -> Iterator[str]:
    for key, block in pool.cached.items():
        if pool.keys[block] != key:
            yield f"the cache leads to block {block}, which has another key"
    if len(pool.cached) != sum(key is not None for key in pool.keys):
        yield "a block has a key that does not lead to it"


def _sequence(manager: KvManager, seq: Sequence) -> Iterator[str]:
    name = f"choice {seq.choice} of {seq.request.request_id}"
    if len(set(seq.blocks)) < len(seq.blocks):
        yield f"{name} holds a block twice"
    if seq.num_computed > min(len(seq.tokens), len(seq.blocks) * manager.block_size):
        yield f"{name} has {seq.num_computed} tokens computed, {len(seq.tokens)} in all, in {len(seq.blocks)} blocks"
    full = min(seq.num_computed // manager.block_size, len(seq.blocks))
    for block, key in zip(seq.blocks, manager.keys(seq, 0, full), strict=False):
        if manager.pool.keys[block] not in (None, key):
            yield f"{name} holds block {block}, which is cached as another's"
    for block in seq.blocks[full:]:
        if manager.pool.keys[block] is not None:
            yield f"{name} may write block {block}, which is cached"


def _queues(scheduler: Scheduler, ledger: Ledger, sequences: Iterable[Sequence]) -> Iterator[str]:
    queued = Counter([*scheduler.running, *scheduler.waiting, *scheduler.loading])
    known = set(sequences)
    for seq, count in queued.items():
        if count > 1 or seq not in known:
            yield f"choice {seq.choice} of {seq.request.request_id} is queued {count} times, known: {seq in known}"
    for name, queue, state in (
        ("running", scheduler.running, State.RUNNING),
        ("waiting", scheduler.waiting, State.WAITING),
        ("loading", scheduler.loading, State.LOADING),
    ):
        yield from (f"a {name} sequence is {seq.state.name}" for seq in queue if seq.state is not state)
    if any(a.rank > b.rank for a, b in zip(scheduler.waiting, scheduler.waiting[1:], strict=False)):
        yield "the queue is out of order"
    for seq in known:
        if seq.state in (State.RUNNING, State.WAITING, State.LOADING) and not queued[seq]:
            yield f"choice {seq.choice} of {seq.request.request_id} is {seq.state.name} in no queue"
    yield from (f"request {key} is alive without sequences" for key, e in ledger.entries.items() if not e.sequences)
