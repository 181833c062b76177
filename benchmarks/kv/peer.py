"""Blocks out of another node's memory over UCX, against UCX alone between two processes.

UCX alone sends each block as a message of its own; the store sends several as one where they lie together.

Both read bytes that lie in as much memory as there are blocks, and write to where something was written before: what a page costs
when it is touched first is in neither. Looking up where the blocks are is `lookup`'s to measure.

python -m benchmarks.kv.peer ADDRESS COUNT SIZE     the other process, which sends COUNT messages for each line of its input
"""

import asyncio
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
import msgspec
import numpy as np
import uvloop
import xxhash

from benchmarks.kv.cpu import attach
from benchmarks.kv.measure import Medium, compare
from kvrelay.common.errors import TransferFailed
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.engine.connector.kvstore import KvStoreConnector
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.transfer.segments import heads
from kvrelay.transfer.transport import Buffer, Landing, Verdict
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc
from tests.fixtures_redis import RedisServer
from tests.kvstore.store_process import StoreProcess

DEPTH = 16
"""Messages under way in the raw measurement."""
KNOWN_SECONDS = 20.0
SHARED = Path("/dev/shm")
"""Where a store's arena lies unless it is told otherwise."""


class Raw:
    """Takes messages into the same buffers again and again."""

    def __init__(self, count: int, size: int) -> None:
        self._buffers = list(np.zeros((count, size), np.uint8))
        self._left = 0
        self._done = asyncio.Event()

    async def start(self) -> None:
        from kvrelay.transfer.ucx import UcxTransport

        self.transport = UcxTransport()
        self.transport.start(self)
        shape = str(len(self._buffers)), str(len(self._buffers[0]))
        line = (sys.executable, "-m", "benchmarks.kv.peer", self.transport.address.hex(), *shape)
        self._sender = await asyncio.create_subprocess_exec(*line, stdin=asyncio.subprocess.PIPE)

    async def run(self) -> None:
        self._left = len(self._buffers)
        self._done.clear()
        assert self._sender.stdin is not None
        self._sender.stdin.write(b"\n")
        await self._done.wait()

    async def check(self, identity: BlockInfo) -> None:
        for buffer in self._buffers:
            checksum(identity, buffer.data)

    async def close(self) -> None:
        assert self._sender.stdin is not None
        self._sender.stdin.close()
        await self._sender.wait()
        await self.transport.close()

    def accept(self, tag: int, length: int) -> Landing | Verdict:
        return _Landing(self, self._buffers[tag])

    def landed(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.set()


class _Landing:
    def __init__(self, raw: Raw, buffer: Buffer) -> None:
        self._raw = raw
        self.buffer = buffer

    def landed(self) -> None:
        self._raw.landed()

    def lost(self, error: TransferFailed) -> None:
        raise SystemExit(error.message)


async def send(address: bytes, count: int, size: int) -> None:
    from kvrelay.transfer.ucx import UcxTransport

    class Nothing:
        def accept(self, tag: int, length: int) -> Landing | Verdict:
            return Verdict.DRAIN

    transport = UcxTransport()
    transport.start(Nothing())
    peer = transport.connect(address, lambda error: None)
    data = np.ones((count, size), np.uint8)
    places = asyncio.Semaphore(DEPTH)

    async def one(tag: int) -> None:
        async with places:
            await peer.send(tag, data[tag])

    while await asyncio.to_thread(sys.stdin.readline):
        await asyncio.gather(*map(one, range(count)))
    peer.close()
    await transport.close()


async def measure(folder: Path, count: int, size: int, runs: int) -> list[Medium]:
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    redis = RedisServer(folder)
    redis.start()
    arenas = tempfile.TemporaryDirectory(dir=SHARED)
    memory = f"[{{tier: cpu, bytes: {(runs + 2) * count * size * 5 // 4}}}]"
    options = ("--tiers", memory, "--redis-url", redis.url, "--arena-directory", arenas.name)
    stores = [StoreProcess(folder, *options, name=name) for name in ("near", "far")]
    no_id = BlockId(bytes(16))
    identity = BlockInfo(
        id=no_id, head=no_id, fingerprint=Fingerprint("b" * 64), shape="0" * 16, dtype=KvDtype.BFLOAT16, size=size
    )
    raw = Raw(count, size)
    try:
        await raw.start()  # first: gRPC's threads do not bear a fork
        for store in stores:
            store.start()
        near, far = [await attach(store.address, identity) for store in stores]
        chains = [
            [BlockId(xxhash.xxh3_128_digest(f"{run} {i}".encode())) for i in range(count)] for run in range(runs + 1)
        ]
        for chain in chains:
            await _put(far, chain, identity)
        async with contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(grpc.aio.insecure_channel(store.address)) for store in stores]
            near_stub, far_stub = map(kvstore_pb2_grpc.KvStoreStub, channels)
            async for _ in far_stub.Verify(pb.VerifyRequest()):
                pass  # it has read all of its pages

            async def forget(chain: Sequence[BlockId]) -> None:
                """The next blocks come where the last ones were."""
                await near_stub.Remove(pb.RemoveRequest(all=True))
                await _known(near, chain)

            gets = [functools.partial(_get, near, chain) for chain in chains]
            prepare = [functools.partial(forget, chain) for chain in chains]
            check = functools.partial(raw.check, identity)
            result = await compare("peer get", count * size, runs, gets, raw.run, check, prepare)
        for connector in (near, far):
            await connector.close()
        return [result]
    finally:
        await raw.close()
        for store in stores:
            store.kill()
        redis.kill()
        arenas.cleanup()


async def _put(connector: KvStoreConnector, ids: Sequence[BlockId], identity: BlockInfo) -> None:
    writing = await connector.begin(ids, heads(ids), identity.size)
    checksums = []
    for room in writing.rooms:
        room.data[:] = room.index % 251
        checksums.append(checksum(msgspec.structs.replace(identity, id=ids[room.index]), room.data.data))
    if len(checksums) < len(ids):
        raise SystemExit("the store has no room")
    writing.commit(writing.rooms, checksums)


async def _known(connector: KvStoreConnector, ids: Sequence[BlockId]) -> None:
    """Returns when the index says where they are, and the store has heard."""
    async with asyncio.timeout(KNOWN_SECONDS):
        while sum(run.num_spans for run in await connector.find(ids, 0)) < len(ids):
            await asyncio.sleep(0.01)


async def _get(connector: KvStoreConnector, ids: Sequence[BlockId]) -> None:
    load, here = connector.load(ids, 0, ()), 0
    while spans := await load.next():
        here += len(spans)
        load.release(spans)
    load.close()
    if here < len(ids):
        raise SystemExit(f"{here} of {len(ids)} blocks came")


if __name__ == "__main__":
    uvloop.run(send(bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
