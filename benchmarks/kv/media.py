"""The file and the S3 tier against their media alone: the same sizes, mode and concurrency."""

import asyncio
import functools
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.kv.measure import Medium, all_of, compare, make_blocks
from kvrelay.kvstore.loading import AHEAD_BLOCKS
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES, occupied_bytes
from kvrelay.kvstore.tiers.bucket import S3Access
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.kvstore.tiers.objects import ObjectTier
from kvrelay.transfer.block import checksum
from tests.fixtures_s3 import S3Server

THREADS = 4


class RawFiles:
    """Whole files written, synced and read by as many threads as the tier has: each of them into memory of its own, as blocks are.

    One buffer of a thread would stay in the core's cache, and a read be a half of what it is for anyone who keeps the bytes.
    """

    def __init__(self, folder: Path, payload: np.ndarray, direct: bool) -> None:
        self._folder = folder
        self._payload = payload
        self._flags = os.O_DIRECT if direct else 0
        self._size = occupied_bytes(payload.shape[1])
        self._pool = ThreadPoolExecutor(THREADS)
        self._buffers = make_buffers(len(payload), self._size)

    async def write(self) -> None:
        """New files each time, as the tier's are: what unlinking takes is not a write's."""
        self._folder = self._folder.with_name(self._folder.name + "+")
        self._folder.mkdir()
        await self._all(self._write)

    async def read(self) -> None:
        await self._all(self._read)

    async def check(self) -> None:
        infos, _ = make_blocks(1, 1, 0)
        size = self._payload.shape[1]
        await self._all(lambda i, buffer: checksum(infos[0], buffer[PAGE_BYTES : PAGE_BYTES + size]))

    async def _all(self, work: Callable[[int, memoryview], object]) -> None:
        loop = asyncio.get_running_loop()

        def part(thread: int) -> None:
            for i in range(thread, len(self._payload), THREADS):
                work(i, self._buffers[i])

        await asyncio.gather(*(loop.run_in_executor(self._pool, part, thread) for thread in range(THREADS)))

    def _write(self, i: int, buffer: memoryview) -> None:
        fd = os.open(self._folder / str(i), os.O_WRONLY | os.O_CREAT | self._flags, 0o600)
        os.pwrite(fd, buffer, 0)
        os.fdatasync(fd)
        os.close(fd)

    def _read(self, i: int, buffer: memoryview) -> None:
        fd = os.open(self._folder / str(i), os.O_RDONLY | self._flags)
        os.preadv(fd, [buffer], 0)
        os.close(fd)


def make_buffers(count: int, size: int) -> list[memoryview]:
    """Of one mapping, each page-aligned, as blocks are in memory."""
    room = -(-size // PAGE_BYTES) * PAGE_BYTES
    whole = memoryview(mmap.mmap(-1, count * room))
    return [whole[start : start + size] for start in range(0, count * room, room)]


async def files(folder: Path, count: int, size: int, runs: int, direct: bool) -> list[Medium]:
    """In folders of `folder`, which must not be in memory for the figures to mean anything.

    Of gets as many are under way as of a load that a pod asks for; the threads are as many as the medium's.
    """
    sets = [make_blocks(count, size, seed) for seed in range(runs + 1)]
    raw = RawFiles(folder / "raw", sets[0][1], direct)
    limit = (runs + 2) * count * (size + 2 * PAGE_BYTES)
    tier = FileTier(folder / "tier", limit, make_policy("lru", limit), direct=direct, threads=THREADS, timeout_s=60)
    await tier.open()
    into = make_buffers(count, size)

    def put(run: int) -> Callable[[], object]:
        infos, payload = sets[run]
        return functools.partial(
            all_of, THREADS, [functools.partial(tier.put, info, payload[i].data) for i, info in enumerate(infos)]
        )

    def get(run: int) -> Callable[[], object]:
        works = [functools.partial(tier.get, info.id, into[i]) for i, info in enumerate(sets[run][0])]
        return functools.partial(all_of, AHEAD_BLOCKS, works)

    mode = "direct" if direct else "buffered"
    each = range(runs + 1)
    try:
        puts = await compare(f"file put, {mode}", count * size, runs, [put(run) for run in each], raw.write)
        gets = await compare(f"file get, {mode}", count * size, runs, [get(run) for run in each], raw.read, raw.check)
    finally:
        await tier.close()
    return [puts, gets]


async def objects(folder: Path, count: int, size: int, runs: int, concurrency: int = 16) -> list[Medium]:
    """Against a real server of this machine, and its client alone."""
    server = S3Server(folder)
    server.start()
    try:
        return await _objects(server, count, size, runs, concurrency)
    finally:
        server.kill()


async def _objects(server: S3Server, count: int, size: int, runs: int, concurrency: int) -> list[Medium]:
    access = S3Access(
        endpoint=server.endpoint,
        region="us-east-1",
        access_key_id=server.access_key_id,
        secret_access_key=server.secret_access_key,
    )
    client = access.connect(server.bucket, 60.0)
    sets = [make_blocks(count, size, seed) for seed in range(runs + 1)]
    limit = (runs + 2) * count * (size + 2 * PAGE_BYTES)
    tier = ObjectTier(
        f"s3://{server.bucket}",
        limit,
        make_policy("lru", limit),
        access=access,
        prefix="bench",
        concurrency=concurrency,
        time_budget_s=60.0,
    )
    await tier.open()
    into = [np.empty(size, np.uint8) for _ in range(count)]
    infos, payload = sets[0]

    async def raw_put(i: int) -> None:
        await client.put_async(f"raw/{i}", payload[i].data, use_multipart=False)

    async def raw_get(i: int) -> None:
        answer = await client.get_async(f"raw/{i}")
        np.copyto(into[i], np.frombuffer(await answer.bytes_async(), np.uint8))

    async def check() -> None:
        for data in into:
            checksum(infos[0], data.data)

    def all_raw(work: Callable[[int], object]) -> Callable[[], object]:
        return functools.partial(all_of, concurrency, [functools.partial(work, i) for i in range(count)])

    def put(run: int) -> Callable[[], object]:
        infos, data = sets[run]
        works = [functools.partial(tier.put, info, data[i].data) for i, info in enumerate(infos)]
        return functools.partial(all_of, concurrency, works)

    def get(run: int) -> Callable[[], object]:
        works = [functools.partial(tier.get, info.id, into[i].data) for i, info in enumerate(sets[run][0])]
        return functools.partial(all_of, concurrency, works)

    each = range(runs + 1)
    try:
        puts = await compare("s3 put", count * size, runs, [put(run) for run in each], all_raw(raw_put))
        gets = await compare("s3 get", count * size, runs, [get(run) for run in each], all_raw(raw_get), check)
    finally:
        await tier.close()
    return [puts, gets]
