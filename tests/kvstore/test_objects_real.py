"""The S3 tier on a real server."""

import asyncio
import random
import signal
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import obstore
import pytest

from kvrelay.kvstore.policy import Lru, make_policy
from kvrelay.kvstore.tiers.base import Missing
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES
from kvrelay.kvstore.tiers.objects import ObjectTier, S3Access, object_bytes
from kvrelay.transfer.block import BlockInfo
from tests.kvstore.blocks import make_block, read, until
from tests.kvstore.faulty_s3 import (
    KIB,
    MIB,
    SIZE,
    Open,
    fails,
    make_blocks,
    within,
)

if TYPE_CHECKING:  # pytest is to import it first, to rewrite its assertions
    from tests.fixtures_s3 import S3Server


pytestmark = pytest.mark.integration


# A real server


@pytest.fixture
def real(s3_server: "S3Server", closing: Callable[[ObjectTier], ObjectTier]) -> Open:
    prefix = uuid.uuid4().hex
    url = f"s3://{s3_server.bucket}/{prefix}"
    keys = {"access_key_id": s3_server.access_key_id, "secret_access_key": s3_server.secret_access_key}

    async def make_tier(limit_bytes: int = 256 * MIB, *, opened: bool = True, **options: Any) -> ObjectTier:
        access = S3Access(endpoint=s3_server.endpoint, region="us-east-1", **keys | options.pop("keys", {}))
        given = {"policy": Lru(), "access": access, "prefix": "node-1", "time_budget_s": 10.0} | options
        tier = closing(ObjectTier(given.pop("url", url), limit_bytes, **given))
        if opened:
            await tier.open()
        return tier

    return make_tier


async def listed_bytes(tier: ObjectTier) -> int:
    """Of all that a listing shows."""
    store = tier._bucket._store
    return sum([meta["size"] async for page in obstore.list(store, tier.prefix) for meta in page])


@pytest.mark.parametrize("upload_checksum", ["SHA256", "CRC64NVME", None])
async def test_real_round_trip_and_restart(
    real: Open, s3_server: "S3Server", rng: random.Random, upload_checksum: Any
) -> None:
    access = S3Access(
        endpoint=s3_server.endpoint,
        region="us-east-1",
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
        upload_checksum=upload_checksum,
    )
    tier, blocks = (
        await real(access=access, opened=False),
        [make_block(rng, size) for size in (1, 300 * KIB, 2 * MIB, 4 * MIB + 1)],
    )
    assert await tier.open() == []
    for info, data in blocks:
        assert await tier.put(info, data) == []
    for info, data in blocks:
        assert await read(tier, info) == data
    await tier.close()

    again = await real(opened=False)
    assert {info.id: info for info in await again.open()} == {info.id: info for info, _ in blocks}
    assert again.used_bytes == sum(object_bytes(info) for info, _ in blocks) == await listed_bytes(again)
    for info, data in blocks:
        assert await read(again, info) == data
    other, into = await real(prefix="node-2"), bytearray(2 * MIB)
    await other.get_at(again.key(blocks[2][0]), blocks[2][0], memoryview(into))
    assert into == blocks[2][1]
    for info, _ in blocks:
        await again.remove(info.id)
    assert again.used_bytes == 0 == await listed_bytes(again)
    with pytest.raises(Missing):
        await other.get_at(again.key(blocks[2][0]), blocks[2][0], memoryview(into))


async def test_real_multipart(real: Open, rng: random.Random) -> None:
    tier, (info, data) = await real(multipart_bytes=5 * MIB), make_block(rng, 12 * MIB)
    await tier.put(info, data)
    assert await read(tier, info) == data
    assert tier.used_bytes == await listed_bytes(tier)


async def test_real_pages(real: Open, rng: random.Random) -> None:
    """More than a page of 1,000; a listing goes on behind a key."""
    tier, blocks = await real(concurrency=32), make_blocks(rng, 1100, size=100)
    await asyncio.gather(*(tier.put(info, data) for info, data in blocks))
    again = await real(opened=False)
    assert {info.id for info in await again.open()} == {info.id for info, _ in blocks}
    keys = sorted(tier.key(info) for info, _ in blocks)
    behind = [
        meta["path"] async for page in obstore.list(tier._bucket._store, tier.prefix, offset=keys[90]) for meta in page
    ]
    assert behind == keys[91:]


async def test_real_eviction_holds_the_limit(real: Open, rng: random.Random) -> None:
    size = 256 * KIB
    limit = 8 * (size + PAGE_BYTES)
    tier, blocks = await real(limit_bytes=limit, policy=make_policy("arc", limit)), make_blocks(rng, 40, size)
    gone: list[BlockInfo] = []

    async def put(info: BlockInfo, data: memoryview) -> None:
        gone.extend(await tier.put(info, data))
        assert tier.used_bytes <= limit
        assert await listed_bytes(tier) <= limit

    await asyncio.gather(*(put(info, data) for info, data in blocks))
    kept = [(info, data) for info, data in blocks if tier.find(info.id)]
    assert len(kept) == 8
    assert len(gone) == 32
    assert tier.used_bytes == limit == await listed_bytes(tier)
    for info, data in kept:
        assert await read(tier, info) == data


@pytest.mark.parametrize(
    ("keys", "code"),
    [({"access_key_id": "nobody"}, "InvalidAccessKeyId"), ({"secret_access_key": "wrong"}, "SignatureDoesNotMatch")],
)
async def test_real_wrong_credentials(real: Open, rng: random.Random, keys: dict[str, str], code: str) -> None:
    tier, (info, _) = await real(keys=keys, opened=False), make_block(rng, SIZE)
    for call in (tier.open(), tier.get_at(tier.key(info), info, memoryview(bytearray(SIZE)))):
        await fails(call, "credentials are refused", code, "attempt 1")
    assert tier.num_retries == 0
    assert tier.used_bytes == 0


async def test_real_missing_bucket(real: Open, rng: random.Random) -> None:
    tier, (info, _) = await real(url="s3://nobodys-bucket/kv", opened=False), make_block(rng, SIZE)
    for call in (tier.open(), tier.get_at(tier.key(info), info, memoryview(bytearray(SIZE)))):
        await fails(call, "there is no bucket 'nobodys-bucket'", "attempt 1")
    assert tier.used_bytes == 0


async def test_real_server_killed_and_back(real: Open, s3_server: "S3Server", rng: random.Random) -> None:
    tier, blocks = await real(time_budget_s=2.0, pause_s=0.1), make_blocks(rng, 4)
    for info, data in blocks[:3]:
        await tier.put(info, data)
    s3_server.kill()
    for info, _ in blocks[:3]:
        async with within(2.0):
            await fails(read(tier, info), "error sending request")
    assert not tier.healthy
    async with within(0.0):
        await fails(tier.put(*blocks[3]), "left alone")
    await asyncio.to_thread(s3_server.start)
    await until(lambda: tier.healthy)
    await tier.put(*blocks[3])
    for info, data in blocks:
        assert await read(tier, info) == data
    assert {info.id for info in await (await real(opened=False)).open()} == {info.id for info, _ in blocks}


async def test_real_server_stopped_and_back(real: Open, s3_server: "S3Server", rng: random.Random) -> None:
    tier, blocks = await real(time_budget_s=1.0, pause_s=0.1, failures_to_open=2), make_blocks(rng, 3)
    (info, data), other, third = blocks
    await tier.put(info, data)
    s3_server.send_signal(signal.SIGSTOP)
    try:
        async with within(1.0):
            await fails(read(tier, info), "no answer")
        async with within(1.0):
            await fails(tier.put(*other), "no answer")
        assert not tier.healthy
        async with within(0.0):
            await fails(tier.put(*third), "left alone")
    finally:
        s3_server.send_signal(signal.SIGCONT)
    await until(lambda: tier.healthy)
    assert await read(tier, info) == data
    await until(lambda: tier.used_bytes == object_bytes(info))
    assert await listed_bytes(tier) == object_bytes(info), "what the put had sent before is deleted"
