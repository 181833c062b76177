"""One attachment to a node's kvstore: its arena, mapped, and the questions that are under way. See kvstore.proto, `Attach`.

A part of the arena is this pod's from when the store has said so until it is told otherwise. Where an answer comes for which no one waits
any more, what it grants is given back. The stream is ended only when nothing here reads or writes the arena (`idle`): the store
gives the parts to others at once.
"""

import asyncio
import itertools
import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np

from kvrelay.common.errors import Internal, TransferFailed
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.engine.connector.base import Memory, Room, Run, Stored
from kvrelay.transfer.block import BlockInfo
from kvrelay.transfer.segments import head
from kvrelay.v1 import kvstore_pb2 as pb

MAX_OUTGOING = 4096
"""Messages that wait to be written; beyond them the store does not read."""
NO_ROOM = -2
"""In place of an offset; another negative number: the store has the block."""
TIERS = {pb.TIER_CPU: "cpu", pb.TIER_FILE: "file", pb.TIER_S3: "s3", pb.TIER_PEER: "peer"}


def map_arena(path: str, size: int) -> Memory:
    """Takes a while where it is large: its pages are mapped here, and not in the midst of copies.

    Raises OSError, ValueError where it is not there or of another size.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_size != size:
            raise ValueError(f"the arena {path} is not of {size} bytes")
        return np.frombuffer(mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
    finally:
        os.close(descriptor)


class Session:
    """Calls are for the event loop. After `lose` all that was asked is answered with nothing, and nothing more is taken."""

    def __init__(
        self,
        outgoing: "asyncio.Queue[pb.AttachRequest]",
        arena: Memory,
        fingerprint: Fingerprint,
        shape: str,
        readable: Iterable[KvDtype],
    ) -> None:
        """What is put into `outgoing` goes to the store, in order."""
        self._outgoing = outgoing
        self.gone = asyncio.Event()
        self._arena = arena
        self._fingerprint = fingerprint
        self._shape = shape
        self._readable = frozenset(readable)
        self._numbers = itertools.count(1)
        self._finds: dict[int, asyncio.Future[Sequence[Run]]] = {}
        self._begins: dict[int, asyncio.Future[Sequence[int]]] = {}
        self._loads: dict[int, asyncio.Queue[pb.Loaded]] = {}
        self._out = 0
        """Parts of the arena that someone here reads or writes."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def arena_bytes(self) -> int:
        return len(self._arena)

    @property
    def lost(self) -> bool:
        return self.gone.is_set()

    # Questions.

    def find(self, ids: Sequence[BlockId], first: int) -> "asyncio.Future[Sequence[Run]]":
        call, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._finds[call] = future
        future.add_done_callback(lambda _: self._finds.pop(call, None))
        self.send(pb.AttachRequest(find=pb.FindBlocks(call=call, first=first, ids=b"".join(ids))))
        return future

    async def begin(self, ids: Sequence[BlockId], in_heads: Sequence[BlockId], size: int) -> tuple[list[Room], bool]:
        """A room for each that the store takes, and whether for some it had none. Raises TransferFailed for what cannot be true."""
        call = next(self._numbers)
        future: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self._begins[call] = future
        message = pb.BeginBlocks(call=call, ids=b"".join(ids), heads=b"".join(in_heads), size=size)
        self.send(pb.AttachRequest(begin=message))
        try:
            offsets = await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the answer came in the same moment
                self._give_up(future.result())
            raise
        finally:
            del self._begins[call]
        return self._rooms(offsets, len(ids), size), NO_ROOM in offsets

    def load(self, ids: Sequence[BlockId], first: int) -> tuple[int, "asyncio.Queue[pb.Loaded]"]:
        """The call's number, and what comes of it; an answer with `end` is the last."""
        call, answers = next(self._numbers), asyncio.Queue[pb.Loaded]()
        self._loads[call] = answers
        self.send(pb.AttachRequest(load=pb.LoadBlocks(call=call, first=first, ids=b"".join(ids))))
        return call, answers

    def end_load(self, call: int, answers: "asyncio.Queue[pb.Loaded]") -> None:
        """What was given and not taken, and what still comes, goes back."""
        while not answers.empty():
            self._give_back(block.offset for block in answers.get_nowait().blocks)
        if self._loads.pop(call, None) is not None:
            self.send(pb.AttachRequest(cancel=pb.CancelLoad(call=call)))

    # Parts of the arena.

    def stored(self, ids: Sequence[BlockId], first: int, blocks: Sequence[pb.LoadedBlock]) -> list[Stored]:
        """The blocks of a load that lie at `ids[first]` and after it. Raises TransferFailed, ValueError for what cannot be true."""
        if self.lost:
            return []
        found = []
        for at, block in enumerate(blocks, first):
            info = BlockInfo(
                id=ids[at],
                head=head(ids, at),
                fingerprint=self._fingerprint,
                shape=self._shape,
                dtype=KvDtype(block.dtype),
                size=block.size,
                checksum=block.checksum,
            )
            if info.dtype not in self._readable or block.encoding != pb.ENCODING_EXACT:
                raise TransferFailed(f"a block of {block.dtype}, which was not asked for")
            found.append(Stored(info, self._part(block.offset, block.size), block.offset))
        self._took(len(found))
        return found

    def _rooms(self, offsets: Sequence[int], count: int, size: int) -> list[Room]:
        if self.lost:
            return []
        if len(offsets) > count:
            raise TransferFailed(f"room for {len(offsets)} blocks, where {count} were asked for")
        rooms = [Room(i, self._part(offset, size), offset) for i, offset in enumerate(offsets) if offset >= 0]
        self._took(len(rooms))
        return rooms

    def release(self, offsets: Sequence[int]) -> None:
        self._took(-len(offsets))
        self._give_back(offsets)

    def commit(self, offsets: Sequence[int], checksums: Sequence[int], given_up: Sequence[int] = ()) -> None:
        self._took(-len(offsets) - len(given_up))
        message = pb.CommitBlocks(offsets=offsets, checksums=checksums, given_up=given_up)
        self.send(pb.AttachRequest(commit=message))

    def corrupt(self, offsets: Sequence[int]) -> None:
        self.send(pb.AttachRequest(corrupt=pb.CorruptBlocks(offsets=offsets)))

    async def idle(self) -> None:
        """Returns when nothing here reads or writes the arena."""
        await self._idle.wait()

    def _part(self, offset: int, size: int) -> Memory:
        if not 0 < size <= len(self._arena) - offset:
            raise TransferFailed(f"{size} bytes at {offset} are not in the arena")
        return self._arena[offset : offset + size]

    def _took(self, count: int) -> None:
        self._out += count
        if self._out:
            self._idle.clear()
        else:
            self._idle.set()

    def _give_up(self, offsets: Sequence[int]) -> None:
        message = pb.CommitBlocks(given_up=[offset for offset in offsets if offset >= 0])
        if message.given_up:
            self.send(pb.AttachRequest(commit=message))

    def _give_back(self, offsets: Iterable[int]) -> None:
        message = pb.ReleaseBlocks(offsets=offsets)
        if message.offsets:
            self.send(pb.AttachRequest(release=message))

    # The stream.

    def send(self, message: pb.AttachRequest) -> None:
        if self.lost:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.lose()

    def receive(self, message: pb.AttachResponse) -> None:
        """Raises TransferFailed for what cannot be true: then the session is to end."""
        match message.WhichOneof("kind"):
            case "found":
                found = self._finds.get(message.found.call)
                if found is not None and not found.done():
                    found.set_result([_run(run) for run in message.found.runs])
            case "begun":
                offsets = message.begun.offsets
                begun = self._begins.get(message.begun.call)
                if begun is not None and not begun.done():
                    begun.set_result(offsets)
                else:
                    self._give_up(offsets)
            case "loaded":
                answers = self._loads.get(message.loaded.call)
                if answers is not None:
                    answers.put_nowait(message.loaded)
                else:
                    self._give_back(block.offset for block in message.loaded.blocks)
                if message.loaded.end:
                    self._loads.pop(message.loaded.call, None)
            case kind:
                raise TransferFailed(f"the store said {kind}, which makes no sense here")

    def lose(self) -> None:
        """There is no store behind it any more."""
        if self.lost:
            return
        self.gone.set()
        for find in [find for find in self._finds.values() if not find.done()]:
            find.set_result(())
        for begin in [begin for begin in self._begins.values() if not begin.done()]:
            begin.set_result(())
        for call, answers in self._loads.items():
            answers.put_nowait(pb.Loaded(call=call, end=True))
        self._loads.clear()


def _run(run: pb.FoundRun) -> Run:
    return Run(TIERS.get(run.tier, "unknown"), run.num_blocks, run.num_bytes, run.seconds)


def attached(message: pb.AttachResponse) -> pb.Attached:
    """Raises Internal where the first answer is another."""
    if message.WhichOneof("kind") != "attached":
        raise Internal("the store did not answer the hello")
    return message.attached
