"""One attached pod: what it looks for, what it reads and writes in the arena, and what is let go when it is gone.

A session owns the pins of the blocks that it was given, and the parts of the arena that it has begun to write. Both end with it, and it
ends only when the pod's connection does: a pod that is merely stopped may go on and write where it was.
"""

import asyncio
import functools
import logging
from collections import Counter, deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

from kvrelay.common.errors import InvalidRequest, Overloaded
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.arena import rounded
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.loading import Loading
from kvrelay.kvstore.memory import Slot
from kvrelay.kvstore.supply import Elsewhere, Hello, Supply
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

MAX_BLOCKS = 65_536
"""Of one message."""
MAX_LOADS = 1024
"""Of one session at a time."""
MAX_FINDS = 1024
"""Of one session at a time, beyond which nothing more is taken in."""
MAX_SESSIONS = 256
MAX_REPLIES = 1024
"""That wait to be sent before nothing more is taken in."""
MAX_BLOCK_BYTES = 1 << 30
GROW_SECONDS = 0.005
"""For which blocks that have come wait for others of their load, unless it has ended: a message costs as much as several blocks."""
PINNED_SHARE = 0.25
"""Of memory, that the loads of a session pin: they wait until it lets go."""
HERE, NO_ROOM = -1, -2
"""In place of an offset: the block is there already, or being written; there is no room for it now."""
WRITING_SHARE = 0.5
"""Of memory, that a session may have begun to write."""


@dataclass(slots=True)
class Run:
    """Blocks of one tier, one after the other."""

    tier: str
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """That bringing them into memory is expected to take."""


@dataclass(slots=True)
class Found:
    call: int
    runs: list[Run]


@dataclass(slots=True)
class Begun:
    call: int
    offsets: list[int]
    """Or `HERE`, or `NO_ROOM`."""


@dataclass(slots=True)
class Loaded:
    """Grows until it is sent."""

    call: int
    slots: list[Slot] = field(default_factory=list)
    end: bool = False
    is_due: bool = False
    """It is among the replies."""


Reply = Found | Begun | Loaded


class Session:
    """Calls are for one event loop. What raises InvalidRequest changed nothing, and the session is to be closed."""

    def __init__(self, chain: Chain, elsewhere: Elsewhere, hello: Hello) -> None:
        self.hello = hello
        self.closed = False
        self.leaving = False
        """Nothing more is found, given or begun."""
        self.num_pins = 0
        self.pinned_bytes = 0
        self._chain = chain
        self._supply = Supply(chain, elsewhere, hello)
        self._pins: dict[int, tuple[Slot, int]] = {}
        """How many of each block, by its offset."""
        self._writing: dict[int, Slot] = {}
        self._writing_bytes = 0
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """All that is under way."""
        self._released = asyncio.Event()
        self._replies: deque[Reply] = deque()
        self._growing: dict[int, Loaded] = {}
        """Of each load, what more of it can still go into."""
        self._replied = asyncio.Event()
        self._roomier = asyncio.Event()

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    @property
    def num_tasks(self) -> int:
        """Loads and finds under way."""
        return len(self._tasks)

    @property
    def num_replies(self) -> int:
        """Not sent yet."""
        return len(self._replies)

    # What the pod asks.

    def find(self, call: int, first: int, ids: Sequence[BlockId]) -> None:
        if not self._supply.lacks(ids, first):
            self._reply(Found(call, self._runs(ids[first:])))
        else:
            self._work(self._find(call, first, ids), f"find {call}")

    async def _find(self, call: int, first: int, ids: Sequence[BlockId]) -> None:
        try:
            await self._supply.look(ids, first)
        finally:
            self._reply(Found(call, self._runs(ids[first:])))

    def _runs(self, ids: Sequence[BlockId]) -> list[Run]:
        runs: list[Run] = []
        for block_id in ids if not self.leaving else ():
            found = self._supply.find(block_id)
            if found is None:
                break
            info, tier, health = found
            if not runs or runs[-1].tier != tier:
                runs.append(Run(tier))
            runs[-1].num_blocks += 1
            runs[-1].num_bytes += info.size
            runs[-1].seconds += info.size / health.pace.bytes_per_second if health is not None else 0.0
        return runs

    def load(self, call: int, first: int, ids: Sequence[BlockId]) -> None:
        if call in self._loads:
            raise InvalidRequest(f"call {call} is under way already", "load.call")
        if len(self._loads) >= MAX_LOADS:
            raise InvalidRequest(f"over {MAX_LOADS} loads at a time", "load.call")
        task = self._loads[call] = self._work(self._load(call, first, ids), f"load {call}")
        task.add_done_callback(functools.partial(self._load_ended, call))

    async def _load(self, call: int, first: int, ids: Sequence[BlockId]) -> None:
        if not self.leaving:
            await Loading(self._supply, ids, first, self, functools.partial(self._give, call)).run()

    def _work(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._worked)
        return task

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._roomier.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)  # a fault of ours: a miss for the pod

    def cancel(self, call: int) -> None:
        """A load that has ended meanwhile is none."""
        if call in self._loads:
            self._loads[call].cancel()

    def release(self, offsets: Sequence[int]) -> None:
        counts = Counter(offsets)
        for offset, count in counts.items():
            if count > self._pins.get(offset, (None, 0))[1]:
                raise InvalidRequest(f"offset {offset} is not pinned {count} times", "release.offsets")
        for offset, count in counts.items():
            self._unpin(offset, count)

    def begin(self, call: int, ids: Sequence[BlockId], heads: Sequence[BlockId], size: int) -> None:
        if not 0 < size <= min(MAX_BLOCK_BYTES, self._chain.memory.limit_bytes):
            raise InvalidRequest(f"blocks of {size} bytes do not fit", "begin.size")
        hello = self.hello
        offsets = []
        for block_id, head in zip(ids, heads, strict=True):
            info = BlockInfo(
                id=block_id,
                head=head,
                fingerprint=hello.fingerprint,
                shape=hello.shape,
                dtype=hello.dtype,
                size=size,
            )
            offsets.append(self._begin(info))
        self._reply(Begun(call, offsets))

    def commit(self, offsets: Sequence[int], checksums: Sequence[int], given_up: Sequence[int]) -> None:
        done = [*offsets, *given_up]
        if len(checksums) != len(offsets):
            raise InvalidRequest(f"{len(checksums)} checksums for {len(offsets)} offsets", "commit.checksums")
        if len(set(done)) != len(done) or not self._writing.keys() >= set(done):
            raise InvalidRequest("an offset is not begun, or stands there twice", "commit.offsets")
        for offset, checksum in zip(offsets, checksums, strict=True):
            self._chain.commit(self._written(offset), checksum)
        for offset in given_up:
            self._chain.give_up(self._written(offset))

    def corrupt(self, offsets: Sequence[int]) -> None:
        """The pins stay the pod's to release."""
        if not self._pins.keys() >= set(offsets):
            raise InvalidRequest("an offset is not pinned", "corrupt.offsets")
        for offset in set(offsets):
            self._chain.distrust(self._pins[offset][0])

    # What it is told.

    async def next_reply(self) -> Reply:
        while not self._replies:
            self._replied.clear()
            await self._replied.wait()
        reply = self._replies.popleft()
        if isinstance(reply, Loaded) and self._growing.get(reply.call) is reply:
            del self._growing[reply.call]
        self._roomier.set()
        return reply

    async def room(self) -> None:
        """Returns when so little is under way, and to be said, that more may be asked."""
        while len(self._replies) >= MAX_REPLIES or len(self._tasks) - len(self._loads) >= MAX_FINDS:
            self._roomier.clear()
            await self._roomier.wait()

    # Its end.

    def leave(self) -> None:
        """The store is about to end: nothing new, so that the session comes to hold nothing."""
        self.leaving = True
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """The pod is gone. At once, but for what its loads have under way: see `ended`."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        for offset, (_, count) in list(self._pins.items()):
            self._unpin(offset, count)
        for offset in list(self._writing):
            self._chain.give_up(self._written(offset))

    async def ended(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    # As the reader of its loads.

    def fits(self, ahead_bytes: int, num_bytes: int) -> bool:
        held = self.pinned_bytes + ahead_bytes
        return not held or held + rounded(num_bytes) <= PINNED_SHARE * self._chain.memory.limit_bytes

    async def let_go(self) -> None:
        self._released.clear()
        await self._released.wait()

    # Parts.

    def _give(self, call: int, slot: Slot) -> None:
        if self.closed:
            self._chain.release(slot)
            return
        _, count = self._pins.get(slot.offset, (slot, 0))
        self._pins[slot.offset] = slot, count + 1
        self.num_pins += 1
        self.pinned_bytes += rounded(slot.info.size)
        self._loaded(call).slots.append(slot)

    def _loaded(self, call: int) -> Loaded:
        """The reply that more of the load can still go into."""
        reply = self._growing.get(call)
        if reply is None:
            reply = self._growing[call] = Loaded(call)
            asyncio.get_running_loop().call_later(GROW_SECONDS, self._due, reply)
        return reply

    def _due(self, reply: Loaded) -> None:
        if not reply.is_due:
            reply.is_due = True
            self._reply(reply)

    def _load_ended(self, call: int, task: asyncio.Task[None]) -> None:
        del self._loads[call]
        reply = self._loaded(call)
        reply.end = True
        del self._growing[call]
        self._due(reply)

    def _reply(self, reply: Reply) -> None:
        self._replies.append(reply)
        self._replied.set()

    def _unpin(self, offset: int, count: int) -> None:
        slot, pins = self._pins[offset]
        if pins == count:
            del self._pins[offset]
        else:
            self._pins[offset] = slot, pins - count
        self.num_pins -= count
        self.pinned_bytes -= count * rounded(slot.info.size)
        for _ in range(count):
            self._chain.release(slot)
        self._released.set()

    def _begin(self, info: BlockInfo) -> int:
        found = self._chain.find(info.id)
        if found is not None and self.hello.reads(found[0]):
            return HERE
        limit = WRITING_SHARE * self._chain.memory.limit_bytes
        if self.leaving or (self._writing and self._writing_bytes + rounded(info.size) > limit):
            return NO_ROOM
        slot = self._chain.begin(info)
        if slot is None:
            return HERE if self._chain.has(info.id) else NO_ROOM
        self._writing[slot.offset] = slot
        self._writing_bytes += rounded(info.size)
        return slot.offset

    def _written(self, offset: int) -> Slot:
        slot = self._writing.pop(offset)
        self._writing_bytes -= rounded(slot.info.size)
        return slot


class Sessions:
    """All of a store."""

    def __init__(self, chain: Chain, elsewhere: Elsewhere) -> None:
        self._chain = chain
        self._elsewhere = elsewhere
        self._open: set[Session] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, hello: Hello) -> Session:
        """Raises Overloaded. To be closed by `close`."""
        if len(self._open) >= MAX_SESSIONS:
            raise Overloaded(f"{MAX_SESSIONS} pods are attached already")
        session = Session(self._chain, self._elsewhere, hello)
        self._open.add(session)
        return session

    def close(self, session: Session) -> None:
        self._open.discard(session)
        session.close()

    @property
    def num_pins(self) -> int:
        return sum(session.num_pins for session in self._open)

    @property
    def num_writing(self) -> int:
        return sum(session.num_writing for session in self._open)

    @property
    def busy(self) -> bool:
        """Some session holds something of the arena, or is about to."""
        return any(session.num_pins or session.num_writing or session.num_tasks for session in self._open)

    def leave(self) -> None:
        for session in self._open:
            session.leave()
