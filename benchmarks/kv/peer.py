"""Blocks out of another node's memory over UCX, against UCX alone between two processes.

python -m benchmarks.kv.peer ADDRESS SIZE     the other process, which sends as many messages as each line of its input says
"""

import asyncio
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

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
from tests.fixtures_redis import RedisServer
from tests.kvstore.store_process import StoreProcess

DEPTH = 16
"""Messages under way in the raw measurement."""
KNOWN_SECONDS = 20.0


class Raw:
    """Takes messages into the same buffers again and again."""

    def __init__(self, count: int, size: int) -> None:
        self._buffers = [np.zeros(size, np.uint8) for _ in range(count)]
        self._left = 0
        self._done = asyncio.Event()

    async def start(self) -> None:
        from kvrelay.transfer.ucx import UcxTransport

        self.transport = UcxTransport()
        self.transport.start(self)
        line = (sys.executable, "-m", "benchmarks.kv.peer", self.transport.address.hex(), str(len(self._buffers[0])))
        self._sender = await asyncio.create_subprocess_exec(*line, stdin=asyncio.subprocess.PIPE)

    async def run(self) -> None:
        self._left = len(self._buffers)
        self._done.clear()
        assert self._sender.stdin is not None
        self._sender.stdin.write(f"{self._left}\n".encode())
        await self._done.wait()

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


async def send(address: bytes, size: int) -> None:
    from kvrelay.transfer.ucx import UcxTransport

    class Nothing:
        def accept(self, tag: int, length: int) -> Landing | Verdict:
            return Verdict.DRAIN

    transport = UcxTransport()
    transport.start(Nothing())
    peer = transport.connect(address, lambda error: None)
    data = np.ones(size, np.uint8)
    places = asyncio.Semaphore(DEPTH)

    async def one(tag: int) -> None:
        async with places:
            await peer.send(tag, data)

    while line := await asyncio.to_thread(sys.stdin.readline):
        await asyncio.gather(*(one(tag) for tag in range(int(line))))
    peer.close()
    await transport.close()


async def measure(folder: Path, count: int, size: int, runs: int) -> list[Medium]:
    os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    redis = RedisServer(folder)
    redis.start()
    memory = f"[{{tier: cpu, bytes: {(runs + 2) * count * size * 5 // 4}}}]"
    stores = [StoreProcess(folder, "--tiers", memory, "--redis-url", redis.url, name=name) for name in ("near", "far")]
    no_id = BlockId(bytes(16))
    identity = BlockInfo(
        id=no_id, head=no_id, fingerprint=Fingerprint("b" * 64), shape="0" * 16, dtype=KvDtype.BFLOAT16, size=size
    )
    raw = Raw(count, size)
    try:
        for store in stores:
            store.start()
        near, far = [await attach(store.address, identity) for store in stores]
        await raw.start()
        chains = [
            [BlockId(xxhash.xxh3_128_digest(f"{run} {i}".encode())) for i in range(count)] for run in range(runs + 1)
        ]
        for chain in chains:
            await _put(far, chain, identity)
        payload = np.zeros(size, np.uint8)

        async def check() -> None:
            for _ in range(count):
                checksum(identity, payload.data)

        gets = [functools.partial(_get, near, chain) for chain in chains]
        result = await compare("peer get", count * size, runs, gets, raw.run, check)
        for connector in (near, far):
            await connector.close()
        return [result]
    finally:
        await raw.close()
        for store in stores:
            store.kill()
        redis.kill()


async def _put(connector: KvStoreConnector, ids: Sequence[BlockId], identity: BlockInfo) -> None:
    writing = await connector.begin(ids, heads(ids), identity.size)
    checksums = []
    for room in writing.rooms:
        room.data[:] = room.index % 251
        checksums.append(checksum(msgspec.structs.replace(identity, id=ids[room.index]), room.data.data))
    if len(checksums) < len(ids):
        raise SystemExit("the store has no room")
    writing.commit(writing.rooms, checksums)


async def _get(connector: KvStoreConnector, ids: Sequence[BlockId]) -> None:
    """Once the index says where they are."""
    found = await connector.find(ids, 0)
    async with asyncio.timeout(KNOWN_SECONDS):
        while sum(run.num_spans for run in found) < len(ids):
            await asyncio.sleep(0.01)
            found = await connector.find(ids, 0)
    load, here = connector.load(ids, 0, found), 0
    while spans := await load.next():
        here += len(spans)
        load.release(spans)
    load.close()
    if here < len(ids):
        raise SystemExit(f"{here} of {len(ids)} blocks came")


if __name__ == "__main__":
    uvloop.run(send(bytes.fromhex(sys.argv[1]), int(sys.argv[2])))
