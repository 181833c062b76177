"""Random blocks, and reading them back from a tier, for the tests of all tiers."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.tiers.base import Tier
from kvrelay.transfer.block import BlockInfo, checksum


def make_block(rng: random.Random, size: int, **fields: Any) -> tuple[BlockInfo, memoryview]:
    payload = memoryview(rng.randbytes(size))
    block_id = BlockId(rng.randbytes(16))
    given: dict[str, Any] = {"head": block_id, "fingerprint": Fingerprint("f" * 64), "shape": "5d0c"} | fields
    info = BlockInfo(id=block_id, dtype=KvDtype.BFLOAT16, size=size, **given)
    return msgspec.structs.replace(info, checksum=checksum(info, payload)), payload


async def read(tier: Tier, info: BlockInfo) -> bytes:
    into = bytearray(b"\xa5" * (info.size + 8))
    assert await tier.get(info.id, memoryview(into)) == info
    assert into[info.size :] == b"\xa5" * 8
    return bytes(into[: info.size])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)
