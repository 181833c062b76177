"""The S3 tier's limit: evictions, deletions that fail, calls that are cancelled."""

import asyncio
import contextlib
import random

import pytest

from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES
from kvrelay.kvstore.tiers.objects import object_bytes
from kvrelay.transfer.block import BlockInfo
from tests.kvstore.blocks import make_block, read, until
from tests.kvstore.faulty_s3 import (
    OBJECT,
    SIZE,
    Fault,
    FaultyS3,
    ManualTime,
    Open,
    check,
    fails,
    make_blocks,
)

pytestmark = pytest.mark.unit


# Limit, eviction, cancellation


@pytest.mark.parametrize("name", ["lru", "arc"])
async def test_the_limit_holds_at_every_moment(make: Open, server: FaultyS3, rng: random.Random, name: str) -> None:
    limit = 5 * OBJECT + 100
    tier, blocks = await make(limit_bytes=limit, policy=make_policy(name, limit)), make_blocks(rng, 40)
    gone: list[BlockInfo] = []

    async def put(info: BlockInfo, data: memoryview) -> None:
        gone.extend(await tier.put(info, data))
        assert tier.used_bytes <= limit

    await asyncio.gather(*(put(info, data) for info, data in blocks))
    assert server.most_bytes <= limit
    kept = [info for info, _ in blocks if tier.find(info.id)]
    assert len(kept) == 5
    check(tier, server, kept)
    assert len(gone) == 35
    assert {info.id for info in gone} == {info.id for info, _ in blocks} - {info.id for info in kept}
    for info, data in blocks:
        if tier.find(info.id):
            assert await read(tier, info) == data


async def test_the_least_recently_used_goes(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(limit_bytes=3 * OBJECT), make_blocks(rng, 4)
    for info, data in blocks[:3]:
        await tier.put(info, data)
    await read(tier, blocks[0][0])
    assert await tier.put(*blocks[3]) == [blocks[1][0]]
    check(tier, server, [info for info, _ in (blocks[0], *blocks[2:])])


async def test_a_block_larger_than_the_tier_is_refused(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(limit_bytes=2 * OBJECT), make_blocks(rng, 2)
    for info, data in blocks:
        await tier.put(info, data)
    for _ in range(5):
        await fails(tier.put(*make_block(rng, 2 * OBJECT - PAGE_BYTES + 1)), "larger than the tier")
    assert tier.healthy
    check(tier, server, [info for info, _ in blocks])


async def test_what_cannot_be_deleted_counts(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {
        "attempts": 1,
        "failures_to_open": 99,
        "time_budget_s": 0.5,
        "clock": manual.clock,
        "sleep": manual.sleep,
    }
    tier, blocks = await make(limit_bytes=3 * OBJECT, **options), make_blocks(rng, 6)
    for info, data in blocks[:3]:
        await tier.put(info, data)
    server.always(Fault.ERROR, "DELETE")
    for info, data in blocks[3:5]:
        await fails(tier.put(info, data))
    assert [tier.find(info.id) is not None for info, _ in blocks] == [False, True, True, False, False, False]
    assert tier.used_bytes == 3 * OBJECT == server.stored_bytes
    assert server.count("PUT") == 3
    server.always(None, "DELETE")
    manual.advance(1.0)
    await until(lambda: tier.used_bytes == 2 * OBJECT)
    assert await tier.put(*blocks[5]) == [blocks[0][0]], "what a put evicted that failed"
    check(tier, server, [info for info, _ in (*blocks[1:3], blocks[5])])


async def test_remove_that_fails_is_done_later(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    tier, (info, data) = await make(attempts=1, clock=manual.clock, sleep=manual.sleep), make_block(rng, SIZE)
    await tier.put(info, data)
    server.fail(Fault.ERROR, 2, "DELETE")
    await fails(tier.remove(info.id), "500 InternalError")
    assert tier.find(info.id) is None
    assert tier.used_bytes == OBJECT
    for pause_s in (1.0, 2.0):
        await until(lambda: manual.sleeping() == 1)
        manual.advance(pause_s)
    await until(lambda: tier.used_bytes == 0)
    check(tier, server, [])


async def test_remove_waits_for_a_put(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    put = asyncio.create_task(tier.put(info, data))
    await until(lambda: server.count("PUT") == 1)
    await tier.remove(info.id)
    assert await put == []
    assert tier.find(info.id) is None
    check(tier, server, [])


async def test_a_put_that_is_cancelled_leaves_nothing(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"time_budget_s": 3.0, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(limit_bytes=OBJECT, **options), make_block(rng, SIZE)
    server.fail(Fault.LATE)
    put = asyncio.create_task(tier.put(info, data))
    await until(lambda: server.count("PUT") == 1)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert tier.find(info.id) is None
    assert tier.used_bytes == OBJECT, "it may yet reach the store"
    server.late.set()
    await until(lambda: len(server.objects) == 1)
    manual.advance(2.9)
    await asyncio.sleep(0)
    assert server.count("DELETE") == 0
    manual.advance(0.2)
    await until(lambda: tier.used_bytes == 0)
    check(tier, server, [])
    other, payload = make_block(rng, SIZE)
    await tier.put(other, payload)
    check(tier, server, [other])


async def test_a_put_whose_answer_was_lost_leaves_nothing(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"time_budget_s": 0.3, "attempts": 1, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(**options), make_block(rng, SIZE)
    server.fail(Fault.LOST)
    await fails(tier.put(info, data), "no answer")
    assert tier.find(info.id) is None
    assert tier.used_bytes == OBJECT == server.stored_bytes
    await until(lambda: manual.sleeping() == 1)
    manual.advance(0.3)
    await until(lambda: tier.used_bytes == 0)
    check(tier, server, [])


async def test_a_put_after_one_that_failed_takes_its_place(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"time_budget_s": 0.3, "attempts": 1, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(limit_bytes=OBJECT, **options), make_block(rng, SIZE)
    server.fail(Fault.LOST)
    await fails(tier.put(info, data), "no answer")
    assert await tier.put(info, data) == []
    manual.advance(9.0)
    assert await read(tier, info) == data
    assert server.count("DELETE") == 0
    check(tier, server, [info])


async def test_a_block_that_comes_back_waits_for_its_deletion(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(limit_bytes=OBJECT, time_budget_s=1.0), make_blocks(rng, 2)
    (info, data), (other, payload) = blocks
    await tier.put(info, data)
    server.fail(Fault.LATE, method="DELETE")
    evicting = asyncio.create_task(tier.put(other, payload))
    await until(lambda: server.count("DELETE") == 1)
    back = asyncio.create_task(tier.put(info, data))
    server.late.set()
    gone = [*await evicting, *await back]
    kept = [block for block, _ in blocks if tier.find(block.id)]
    assert len(kept) == 1
    check(tier, server, kept)
    assert {block.id for block in gone} >= {block.id for block, _ in blocks} - {kept[0].id}


async def test_puts_that_are_cancelled_at_any_moment_leak_nothing(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    limit = 4 * OBJECT
    tier = await make(limit_bytes=limit, concurrency=3, clock=manual.clock, sleep=manual.sleep)
    blocks = make_blocks(rng, 60)
    tasks = [asyncio.create_task(tier.put(info, data)) for info, data in blocks]
    for task in rng.sample(tasks, 40):
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, list | asyncio.CancelledError) for result in results)
    assert server.most_bytes <= limit

    def at_rest() -> bool:
        manual.advance(10.0)
        return tier.used_bytes == sum(object_bytes(info) for info, _ in blocks if tier.find(info.id))

    await until(at_rest)
    check(tier, server, [info for info, _ in blocks if tier.find(info.id)])
    more = make_blocks(rng, 6)
    for info, data in more:
        await tier.put(info, data)
    check(tier, server, [info for info, _ in more[2:]])


async def test_random_faults_break_no_account(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    limit = 6 * OBJECT
    options = {"time_budget_s": 1.0, "attempts": 2, "failures_to_open": 10**6}
    tier = await make(limit_bytes=limit, clock=manual.clock, sleep=manual.sleep, **options)
    blocks = dict(make_blocks(rng, 12))
    payloads = {info.id: data for info, data in blocks.items()}
    faults = [Fault.ERROR, Fault.SLOW_DOWN, Fault.RESET, Fault.DENIED, Fault.TRUNCATED, Fault.BAD]

    async def one() -> None:
        info = rng.choice(list(blocks))
        if rng.random() < 0.3:
            server.fail(rng.choice(faults))
        with contextlib.suppress(TierFailed, Missing, Corrupt):
            match rng.randrange(4):
                case 0 | 1:
                    await tier.put(info, payloads[info.id])
                case 2:
                    assert await read(tier, info) == payloads[info.id]
                case 3:
                    await tier.remove(info.id)
        manual.advance(rng.random())
        assert tier.used_bytes <= limit

    for _ in range(40):
        await asyncio.gather(*(one() for _ in range(8)))
    assert server.most_bytes <= limit
    server._faults.clear()

    def at_rest() -> bool:
        manual.advance(100.0)
        return tier.used_bytes == sum(object_bytes(info) for info in blocks if tier.find(info.id))

    await until(at_rest)
    check(tier, server, [info for info in blocks if tier.find(info.id)])
