"""A tier whose blocks are compressed on their way down: less to write, to read and to keep, for some of a core's time.

What lies below is a block of encoding zstd: the payload's bytes, first those of all elements' lowest byte and so on up, since signs and
exponents are alike and the rest is noise; then zstd. Its header says what it decodes to. A block that does not get smaller stays as it is.
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import zstandard

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.tiers.base import Corrupt, Sinking, Tier, TierFailed
from kvrelay.transfer.block import BlockInfo, checksum

LEVEL = 1
"""Higher ones gain a percent or two on KV, for several times the time."""


def encode(info: BlockInfo, data: memoryview) -> tuple[BlockInfo, bytes] | None:
    """None where it would not be smaller."""
    planes = np.frombuffer(data, np.uint8).reshape(-1, _width(info, info.size)).T
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(np.ascontiguousarray(planes).data)
    if len(packed) >= info.size:
        return None
    encoded = msgspec.structs.replace(
        info, size=len(packed), encoding="zstd", checksum=0, decoded_size=info.size, decoded_checksum=info.checksum
    )
    return msgspec.structs.replace(encoded, checksum=checksum(encoded, memoryview(packed))), packed


def _width(info: BlockInfo, size: int) -> int:
    """Bytes of an element."""
    return 1 if size % info.dtype.itemsize else info.dtype.itemsize


def decoded(info: BlockInfo) -> BlockInfo:
    """What a block is, whose bytes are kept as `info` says."""
    if info.encoding != "zstd":
        return info
    return msgspec.structs.replace(
        info,
        size=info.decoded_size,
        encoding="exact",
        checksum=info.decoded_checksum,
        decoded_size=0,
        decoded_checksum=0,
    )


def decode(info: BlockInfo, packed: memoryview, into: memoryview) -> None:
    """Raises Corrupt for what is no such block, whatever its checksum."""
    size = info.decoded_size
    width = _width(info, size)
    try:
        if zstandard.frame_content_size(packed) != size:
            raise Corrupt(f"{info.id.hex()} decodes to something else than {size} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed, max_output_size=size), np.uint8)
    except zstandard.ZstdError as error:
        raise Corrupt(f"{info.id.hex()} cannot be decoded: {error}") from error
    np.copyto(np.frombuffer(into, np.uint8)[:size].reshape(-1, width), planes.reshape(width, -1).T)


class Compressed:
    """`base.Tier` around another one. `limit_bytes` and `used_bytes` are that one's: of what is kept."""

    def __init__(self, inner: Tier, threads: int = 2) -> None:
        self.name = inner.name
        self.limit_bytes = inner.limit_bytes
        self._inner = inner
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvrelay-zstd")

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    async def open(self) -> Iterable[BlockInfo]:
        return [decoded(info) for info in await self._inner.open()]

    def __len__(self) -> int:
        return len(self._inner)

    def ids(self) -> Iterable[BlockId]:
        return self._inner.ids()

    def find(self, block_id: BlockId) -> BlockInfo | None:
        info = self._inner.find(block_id)
        return None if info is None else decoded(info)

    async def get(self, block_id: BlockId, into: memoryview) -> BlockInfo:
        info = self._inner.find(block_id)
        if info is None or info.encoding != "zstd":
            return await self._inner.get(block_id, into)
        with memoryview(bytearray(info.size)) as packed:
            got = await self._inner.get(block_id, packed)
            if got != info:
                raise TierFailed(f"{block_id.hex()} was another one a moment ago")
            try:
                await asyncio.get_running_loop().run_in_executor(self._pool, decode, info, packed, into)
            except Corrupt:
                await self._inner.remove(block_id)
                raise
        return decoded(info)

    async def put(self, info: BlockInfo, data: memoryview) -> list[BlockInfo]:
        encoded = None
        if info.encoding == "exact":
            encoded = await asyncio.get_running_loop().run_in_executor(self._pool, encode, info, data)
        kept, payload = encoded if encoded is not None else (info, data)
        return [decoded(gone) for gone in await self._inner.put(kept, memoryview(payload))]

    async def remove(self, block_id: BlockId) -> None:
        await self._inner.remove(block_id)

    async def close(self) -> None:
        await self._inner.close()
        self._pool.shutdown(wait=False)


class CompressedSinking(Compressed):
    """Around a tier that can have one below it."""

    def __init__(self, inner: Sinking, threads: int = 2) -> None:
        super().__init__(inner, threads)
        self._sinking = inner

    def coldest(self) -> BlockInfo | None:
        info = self._sinking.coldest()
        return None if info is None else decoded(info)

    async def evict(self, block_id: BlockId) -> None:
        await self._sinking.evict(block_id)
