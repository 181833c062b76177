"""The CPU tier: a pod's blocks into and out of a real kvstore's arena, against copies and checksums of the same bytes alone."""

import asyncio
import functools
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from benchmarks.kv.measure import Medium, compare
from kvrelay.cli.ports import free_ports
from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.engine.cache import KvCache
from kvrelay.engine.connector.copies import Copier
from kvrelay.engine.connector.kvstore import KvStoreAccess, KvStoreConnector
from kvrelay.engine.connector.stores import BATCH_SPANS
from kvrelay.engine.models.config import ModelConfig
from kvrelay.transfer.block import BlockInfo, checksum
from kvrelay.transfer.segments import heads

READY_SECONDS = 30.0
BLOCK_SIZE = 16


@asynccontextmanager
async def kvstore(folder: Path, tiers: str, redis_url: str = "redis://127.0.0.1:1/0") -> AsyncIterator[str]:
    """The gRPC address of a store's process."""
    grpc_port, http_port = free_ports(2)
    line = [sys.executable, "-m", "kvrelay.kvstore.main", "--tiers", tiers, "--redis-url", redis_url]
    line += ["--grpc-port", str(grpc_port), "--http-port", str(http_port), "--log-level", "warning"]
    with (folder / "kvstore.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*line, stderr=log)
        try:
            yield f"127.0.0.1:{grpc_port}"
        finally:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def attach(address: str, identity: BlockInfo) -> KvStoreConnector:
    """Raises TimeoutError."""
    access = KvStoreAccess(
        address=address,
        pod_id=PodId("bench"),
        fingerprint=identity.fingerprint,
        shape=identity.shape,
        dtype=identity.dtype,
        readable=(identity.dtype,),
    )
    connector = KvStoreConnector(access)
    connector.start()
    async with asyncio.timeout(READY_SECONDS):
        while not connector.ready:
            await asyncio.sleep(0.05)
    return connector


class Pod:
    """A cache of a model's shape and what copies out of it. Everything on the event loop: one thread is measured."""

    def __init__(self, model: ModelConfig, kv_dtype: KvDtype, num_spans: int) -> None:
        span_bytes = block_bytes(model, kv_dtype)
        self.cache = KvCache(model, kv_dtype, BLOCK_SIZE, num_spans * span_bytes)
        self.cache.data.view(-1).view(dtype=self.cache.data.dtype).uniform_()
        no_id = BlockId(bytes(16))
        self.identity = BlockInfo(
            id=no_id, head=no_id, fingerprint=Fingerprint("bench"), shape="0" * 16, dtype=kv_dtype, size=span_bytes
        )
        self.copier = Copier(self.cache, self.identity)
        self.slots = [BLOCK_SIZE * i for i in range(num_spans)]

    async def put(self, connector: KvStoreConnector, ids: Sequence[BlockId]) -> None:
        in_heads = heads(ids)
        for start in range(0, len(ids), BATCH_SPANS):
            piece = slice(start, start + BATCH_SPANS)
            writing = await connector.begin(ids[piece], in_heads[piece], self.identity.size)
            if len(writing.rooms) < len(ids[piece]):
                raise SystemExit("the store has no room: give it more than all runs write")
            infos = [self.copier.info(block_id) for block_id in ids[piece]]
            writing.commit(writing.rooms, self.copier.store(writing.rooms, infos, self.slots[piece]))

    async def get(self, connector: KvStoreConnector, ids: Sequence[BlockId]) -> None:
        load, here = connector.load(ids, 0, await connector.find(ids, 0)), 0
        while spans := await load.next():
            whole, _ = self.copier.load(spans, self.slots[here : here + len(spans)])
            load.release(spans)
            here += whole
        load.close()
        if here < len(ids):
            raise SystemExit(f"{here} of {len(ids)} blocks came back whole")


def block_bytes(model: ModelConfig, kv_dtype: KvDtype) -> int:
    """Of a block of BLOCK_SIZE tokens."""
    return model.num_layers * 2 * BLOCK_SIZE * model.kv_size * kv_dtype.itemsize


async def measure(model: ModelConfig, kv_dtype: KvDtype, num_spans: int, runs: int, folder: Path) -> list[Medium]:
    pod = Pod(model, kv_dtype, num_spans)
    size = pod.identity.size
    source = np.random.default_rng(0).integers(0, 256, (num_spans, size), np.uint8)
    target = np.zeros_like(source)
    chains = [
        [BlockId(xxhash.xxh3_128_digest(f"{run} {i}".encode())) for i in range(num_spans)] for run in range(runs + 1)
    ]

    async def copy() -> None:
        for span in range(num_spans):
            np.copyto(target[span], source[span])

    async def check() -> None:
        info = msgspec.structs.replace(pod.identity, size=size)
        for span in range(num_spans):
            checksum(info, source[span].data)

    room = (runs + 1) * num_spans * size * 5 // 4
    async with kvstore(folder, f"[{{tier: cpu, bytes: {room}}}]") as address:
        connector = await attach(address, pod.identity)
        try:
            puts = [functools.partial(pod.put, connector, chain) for chain in chains]
            gets = [functools.partial(pod.get, connector, chain) for chain in chains]
            put = await compare("cpu put", num_spans * size, runs, puts, copy, check)
            get = await compare("cpu get", num_spans * size, runs, gets, copy, check)
        finally:
            await connector.close()
    return [put, get]
