"""A store in the test's own memory, whose every answer waits until the test lets it come, and may be what a store can do worst.

Nothing of it is readable or writable for longer than a connector promises: what is released, committed or given up is
overwritten at once, so that whoever still uses it is found out.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvrelay.common.ids import BlockId
from kvrelay.engine.connector.base import Load, Memory, Room, Run, Stored, Writing
from kvrelay.transfer.block import BlockInfo, checksum

RUBBISH = 0xA5


@dataclass
class Shelf:
    """What all pods share: blocks by id. A test may take some away at any time."""

    blocks: dict[BlockId, tuple[BlockInfo, bytes]] = field(default_factory=dict)


class MemoryConnector:
    """See `base.Connector`. `rng`: what it does wrong, where `faults` says so; none: it does all at once, and right."""

    def __init__(self, shelf: Shelf, identity: BlockInfo, rng: random.Random | None = None) -> None:
        self.shelf = shelf
        self.identity = identity
        self.ready = True
        self.faults = 0.0
        """How often an answer is none, a load ends early, bytes are wrong, or there is no room."""
        self.num_timeouts = 0
        self.num_given = 0
        """Parts that are out: being read or written."""
        self.num_open = 0
        """Loads that were not closed."""
        self.corrupt_ids: set[BlockId] = set()
        """Which the test has spoilt on the shelf."""
        self.num_corrupt = 0
        self.num_reported = 0
        self.started = self.closed = False
        self.finds: list[int] = []
        """Of each: the span from which on was asked."""
        self.piece = 4
        """Spans at most in one answer of a load."""
        self._rng = rng
        self._gates: list[asyncio.Future[None]] = []
        self.next_offset = 0

    # What the test does.

    @property
    def num_asked(self) -> int:
        """Answers that wait to be let come."""
        return sum(not gate.done() for gate in self._gates)

    def answer(self, which: int = 0) -> None:
        """Lets one come, by its age."""
        self._gates = [gate for gate in self._gates if not gate.done()]
        self._gates[which].set_result(None)

    def at_once(self) -> None:
        """From now on nothing waits and nothing goes wrong."""
        self._rng, self.faults = None, 0.0
        for gate in self._gates:
            if not gate.done():
                gate.set_result(None)

    def happens(self) -> bool:
        return self._rng is not None and self._rng.random() < self.faults

    async def gate(self) -> None:
        if self._rng is not None:
            gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._gates.append(gate)
            await gate

    def pick(self, most: int) -> int:
        return most if self._rng is None else self._rng.randint(1, most)

    # What the engine does.

    def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        assert self.num_given == 0, "something still reads or writes"
        self.closed = True

    async def find(self, ids: Sequence[BlockId], first: int) -> Sequence[Run]:
        self.finds.append(first)
        await self.gate()
        if self.happens():
            return ()
        held = [i for i in ids[first:] if i in self.shelf.blocks]
        count = next((n for n, i in enumerate(ids[first:]) if i not in self.shelf.blocks), len(held))
        if not count:
            return ()
        cut = self.pick(count)
        size = self.identity.size
        runs = [Run("cpu", cut, cut * size, 0.0), Run("file", count - cut, (count - cut) * size, 1e-6)]
        return [run for run in runs if run.num_spans]

    def load(self, ids: Sequence[BlockId], first: int, found: Sequence[Run]) -> Load:
        assert found, "what was not found is not loaded"
        self.num_open += 1
        return _MemoryLoad(self, ids, first)

    async def begin(self, ids: Sequence[BlockId], heads: Sequence[BlockId], size: int) -> Writing:
        assert len(ids) == len(heads)
        assert size == self.identity.size
        await self.gate()
        wanted = [i for i, block_id in enumerate(ids) if block_id not in self.shelf.blocks and not self.happens()]
        rooms = []
        for index in wanted:
            rooms.append(Room(index, np.full(size, RUBBISH, np.uint8), self.next_offset))
            self.next_offset += size
        self.num_given += len(rooms)
        return _MemoryWriting(self, list(ids), rooms)


class _MemoryLoad:
    def __init__(self, store: MemoryConnector, ids: Sequence[BlockId], first: int) -> None:
        self._store = store
        self._ids = ids
        self._next = first
        self._out: dict[int, Memory] = {}
        self._wrong: set[int] = set()
        self._closed = False

    async def next(self) -> Sequence[Stored]:
        assert not self._closed
        await self._store.gate()
        if self._store.happens():
            return ()
        spans: list[Stored] = []
        for block_id in self._ids[self._next :][: self._store.pick(self._store.piece)]:
            if (held := self._store.shelf.blocks.get(block_id)) is None:
                break
            spans.append(self._give(*held))
        self._next += len(spans)
        return spans

    def _give(self, info: BlockInfo, payload: bytes) -> Stored:
        store = self._store
        data = np.frombuffer(bytearray(payload), np.uint8)
        offset = store.next_offset
        store.next_offset += len(payload)
        if info.id in store.corrupt_ids:
            self._wrong.add(offset)
        if store.happens():
            data[len(data) // 3] ^= 16
            self._wrong.add(offset)
            store.num_corrupt += 1
        self._out[offset] = data
        store.num_given += 1
        return Stored(info, data, offset)

    def release(self, spans: Sequence[Stored]) -> None:
        for span in spans:
            self._out.pop(span.offset)[:] = RUBBISH
            self._store.num_given -= 1

    def corrupt(self, spans: Sequence[Stored]) -> None:
        """As a store does, it believes only who still holds what it complains of."""
        for span in spans:
            assert span.offset in self._out, "complained of after its release"
            assert span.offset in self._wrong
            self._store.num_reported += 1

    def close(self) -> None:
        assert not self._closed
        assert not self._out, "closed before all was released"
        self._closed = True
        self._store.num_open -= 1


class _MemoryWriting:
    def __init__(self, store: MemoryConnector, ids: list[BlockId], rooms: list[Room]) -> None:
        self.rooms: Sequence[Room] = rooms
        self.is_refused = False
        self._store = store
        self._ids = ids
        self._open = {room.offset for room in rooms}

    def commit(self, rooms: Sequence[Room], checksums: Sequence[int]) -> None:
        for room, value in zip(rooms, checksums, strict=True):
            info = msgspec.structs.replace(self._store.identity, id=self._ids[room.index], checksum=value)
            payload = room.data.tobytes()
            assert checksum(info, memoryview(payload)) == value
            self._store.shelf.blocks[info.id] = info, payload
        self._end(rooms)

    def give_up(self, rooms: Sequence[Room]) -> None:
        self._end(rooms)

    def _end(self, rooms: Sequence[Room]) -> None:
        for room in rooms:
            self._open.remove(room.offset)
            room.data[:] = RUBBISH
            self._store.num_given -= 1
