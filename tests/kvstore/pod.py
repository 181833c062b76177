"""A pod as a store sees it: attached over gRPC, with the arena mapped, writing and reading blocks with their checksums."""

import asyncio
import contextlib
import itertools
import mmap
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import grpc.aio

from kvrelay.common.access import bearer
from kvrelay.common.blocks import SPAN, BlockHasher
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.common.rpc import CHANNEL_OPTIONS, from_rpc_error
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.transfer.segments import heads
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc

FINGERPRINT = Fingerprint("a" * 64)
SHAPE = "00112233445566ff"
SIZE = 10_000
SECONDS = 20.0


def chain_of(number: int, length: int, fingerprint: str = FINGERPRINT) -> list[BlockId]:
    """The ids of a prompt; different ones share nothing."""
    ids: list[BlockId] = []
    BlockHasher(Fingerprint(fingerprint)).extend(ids, range(number * 1_000_000, number * 1_000_000 + length * SPAN))
    return ids


def payload_of(block_id: BlockId, size: int = SIZE) -> bytes:
    """What is stored under the id, and nothing else ever."""
    return random.Random(block_id).randbytes(size)


@dataclass(frozen=True)
class Block:
    """What a load gave. Its pin is the caller's."""

    id: BlockId
    offset: int
    size: int
    dtype: str
    checksum: int


class Pod:
    """One session. `fingerprint` and the like are those that it says."""

    def __init__(self, channel: grpc.aio.Channel, token: str, hello: pb.AttachHello) -> None:
        self.hello = hello
        self.stub = kvstore_pb2_grpc.KvStoreStub(channel)
        self._call = self.stub.Attach(metadata=bearer(token))
        self._calls = itertools.count(1)
        self._found: dict[int, asyncio.Future[list[pb.FoundRun]]] = {}
        self._begun: dict[int, asyncio.Future[list[int]]] = {}
        self._loads: dict[int, asyncio.Queue[pb.Loaded]] = {}
        self.last_call = 0
        """Of a load."""
        self._reading: asyncio.Task[None] | None = None
        self.attached = pb.Attached()

    async def attach(self) -> None:
        try:
            await self._call.write(pb.AttachRequest(hello=self.hello))
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.InvalidStateError:  # the call ended before the write
            raise from_rpc_error(await self.ended()) from None
        if not isinstance(answer, pb.AttachResponse):
            raise from_rpc_error(await self.ended())
        self.attached = answer.attached
        descriptor = os.open(self.attached.arena_path, os.O_RDWR)
        try:
            self.arena = mmap.mmap(descriptor, self.attached.arena_bytes)
        finally:
            os.close(descriptor)
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Ends the stream, as a pod's end does."""
        self._call.cancel()
        if self._reading is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
            self.arena.close()

    async def ended(self) -> grpc.aio.AioRpcError:
        """What the store ended the stream with."""
        async with asyncio.timeout(SECONDS):
            code, details = await self._call.code(), await self._call.details()
            trailing = await self._call.trailing_metadata()
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while isinstance(answer := await self._call.read(), pb.AttachResponse):
                match answer.WhichOneof("kind"):
                    case "found":
                        self._found.pop(answer.found.call).set_result(list(answer.found.runs))
                    case "begun":
                        self._begun.pop(answer.begun.call).set_result(list(answer.begun.offsets))
                    case "loaded":
                        self._loads[answer.loaded.call].put_nowait(answer.loaded)
        for future in (*self._found.values(), *self._begun.values()):
            future.cancel()
        for queue in self._loads.values():
            queue.put_nowait(pb.Loaded(end=True))

    async def say(self, **message: object) -> None:
        await self._call.write(pb.AttachRequest(**message))  # type: ignore[arg-type]

    # What pods do.

    async def find(self, ids: Sequence[BlockId], first: int = 0) -> list[pb.FoundRun]:
        call = next(self._calls)
        future = self._found[call] = asyncio.get_running_loop().create_future()
        await self.say(find=pb.FindBlocks(call=call, first=first, ids=b"".join(ids)))
        async with asyncio.timeout(SECONDS):
            return await future

    async def num_found(self, ids: Sequence[BlockId], first: int = 0) -> int:
        return sum(run.num_blocks for run in await self.find(ids, first))

    async def begin(self, ids: Sequence[BlockId], size: int = SIZE) -> list[int]:
        """`ids` are a chain from its beginning."""
        call = next(self._calls)
        future = self._begun[call] = asyncio.get_running_loop().create_future()
        begin = pb.BeginBlocks(call=call, ids=b"".join(ids), heads=b"".join(heads(ids)), size=size)
        await self.say(begin=begin)
        async with asyncio.timeout(SECONDS):
            return await future

    def write(self, block_id: BlockId, offset: int, size: int = SIZE) -> int:
        """The checksum of what has been written."""
        payload = payload_of(block_id, size)
        self.arena[offset : offset + size] = payload
        return checksum(self._info(block_id, size, self.hello.dtype), memoryview(payload))

    async def store(self, ids: Sequence[BlockId], size: int = SIZE) -> int:
        """How many of them were wanted."""
        wanted = [(i, offset) for i, offset in zip(ids, await self.begin(ids, size), strict=True) if offset >= 0]
        sums = [self.write(block_id, offset, size) for block_id, offset in wanted]
        await self.say(commit=pb.CommitBlocks(offsets=[offset for _, offset in wanted], checksums=sums))
        return len(wanted)

    async def store_all(self, ids: Sequence[BlockId], size: int = SIZE) -> None:
        """Again and again, until all are there: a store that is full refuses for a while."""
        async with asyncio.timeout(SECONDS):
            while await self.num_found(ids) < len(ids):
                await self.store(ids, size)

    async def load(self, ids: Sequence[BlockId], first: int = 0) -> AsyncIterator[Block]:
        """Ends with the first miss."""
        call = next(self._calls)
        queue = self._loads[call] = asyncio.Queue()
        self.last_call = call
        await self.say(load=pb.LoadBlocks(call=call, first=first, ids=b"".join(ids)))
        following = iter(ids[first:])
        while True:
            async with asyncio.timeout(SECONDS):
                loaded = await queue.get()
            for block in loaded.blocks:
                yield Block(next(following), block.offset, block.size, block.dtype, block.checksum)
            if loaded.end:
                del self._loads[call]
                return

    def whole(self, block: Block) -> bool:
        """The bytes in the arena are what its checksum says; then they must be what was stored."""
        data = self.arena[block.offset : block.offset + block.size]
        if checksum(self._info(block.id, block.size, block.dtype), memoryview(data)) != block.checksum:
            return False
        assert data == payload_of(block.id, block.size), "never a wrong byte"
        return True

    async def read(self, ids: Sequence[BlockId], first: int = 0) -> int:
        """Loads, checks, releases. How many were whole, up to the first that was not."""
        count = 0
        broken = False
        async for block in self.load(ids, first):
            if not self.whole(block):
                broken = True
                await self.say(corrupt=pb.CorruptBlocks(offsets=[block.offset]))
            count += not broken
            await self.say(release=pb.ReleaseBlocks(offsets=[block.offset]))
        return count

    async def stat(self) -> pb.StatResponse:
        return await self.stub.Stat(pb.StatRequest())

    def _info(self, block_id: BlockId, size: int, dtype: str) -> BlockInfo:
        return BlockInfo(
            id=block_id,
            head=block_id,
            fingerprint=Fingerprint(self.hello.fingerprint),
            shape=self.hello.shape,
            dtype=KvDtype(dtype),
            size=size,
        )


@contextlib.asynccontextmanager
async def attached(address: str, token: str = "", **fields: object) -> AsyncIterator[Pod]:
    """Raises the KvrelayError that the store refuses it with."""
    given = {"pod_id": "pod", "fingerprint": FINGERPRINT, "shape": SHAPE, "dtype": "float32", "readable": ["float32"]}
    hello = pb.AttachHello(**{**given, **fields})  # type: ignore[arg-type]
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        pod = Pod(channel, token, hello)
        try:
            await pod.attach()
            yield pod
        finally:
            await pod.close()


async def until_stat(pod: Pod, wanted: Callable[[pb.StatResponse], bool], seconds: float = SECONDS) -> pb.StatResponse:
    """Asks until the store's state is as wanted, and whole."""
    async with asyncio.timeout(seconds):
        while not wanted(seen := await pod.stat()):
            await asyncio.sleep(0.01)
    assert list(seen.violations) == []
    return seen


async def hold(address: str) -> None:
    """As a process: pins blocks, begins others, says so, and does nothing more."""
    async with attached(address) as pod:
        await pod.store_all(chain_of(1, 4))
        blocks = [block async for block in pod.load(chain_of(1, 4))]
        assert len(blocks) == 4
        assert min(await pod.begin(chain_of(2, 3))) >= 0
        print("holds", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1]))
