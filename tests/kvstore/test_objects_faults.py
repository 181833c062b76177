"""The S3 tier on a server that fails: retries within a budget, and the breaker."""

import asyncio
import random

import pytest

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.tiers.base import Missing, TierFailed
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
    within,
)

pytestmark = pytest.mark.unit


# Faults that pass, and that stay


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SLOW_DOWN, Fault.RESET, Fault.TRUNCATED])
async def test_a_fault_that_passes_is_not_seen(make: Open, server: FaultyS3, rng: random.Random, fault: Fault) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    if fault is not Fault.TRUNCATED:
        server.fail(fault, 2)
    await tier.put(info, data)
    requests = server.count()
    server.fail(fault, 3)
    assert await read(tier, info) == data
    assert server.count("GET") == 4
    assert tier.num_retries == requests - 1 + 3
    if fault is not Fault.TRUNCATED:
        server.fail(fault)
    await tier.remove(info.id)
    check(tier, server, [])
    assert tier.healthy


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.ERROR, "500 InternalError"),
        (Fault.SLOW_DOWN, "503 SlowDown"),
        (Fault.RESET, "error sending request"),
        (Fault.TRUNCATED, "body"),
    ],
)
async def test_a_fault_that_stays_is_named(
    make: Open, server: FaultyS3, rng: random.Random, fault: Fault, reason: str
) -> None:
    tier, (info, data) = await make(attempts=3, failures_to_open=5), make_block(rng, SIZE)
    await tier.put(info, data)
    server.always(fault)
    into = bytearray(SIZE)
    await fails(tier.get(info.id, memoryview(into)), reason, "attempt 3 of 3")
    assert server.count("GET") == 3
    assert into == bytes(SIZE)
    assert tier.num_corrupt == 0
    server.always(None)
    assert await read(tier, info) == data


@pytest.mark.parametrize("fault", [Fault.DENIED, Fault.BAD])
async def test_a_refusal_is_not_repeated(make: Open, server: FaultyS3, rng: random.Random, fault: Fault) -> None:
    tier, blocks = await make(failures_to_open=9), make_blocks(rng, 2)
    (info, data), other = blocks
    await tier.put(info, data)
    server.always(fault)
    for call in (tier.get(info.id, memoryview(bytearray(SIZE))), tier.put(*other), (await make(opened=False)).open()):
        before = server.count()
        error = await fails(call, *([] if fault is Fault.BAD else ["credentials are refused", "AccessDenied"]))
        assert server.count() == before + 1
        assert "hidden" not in error.message
    assert tier.used_bytes == OBJECT, "a put that was refused holds nothing"
    server.always(None)
    assert await read(tier, info) == data


async def test_a_put_that_finds_no_place_has_failed(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier = await make()
    server.fail(Fault.GONE)
    await fails(tier.put(*make_block(rng, SIZE)), "404 NoSuchThing", "attempt 1")
    check(tier, server, [])


async def test_a_hang_ends_with_the_budget(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(time_budget_s=0.8, attempts=3), make_blocks(rng, 2)
    (info, data), other = blocks
    await tier.put(info, data)
    server.always(Fault.HANG)
    for method, call in (("GET", read(tier, info)), ("PUT", tier.put(*other))):
        before = server.count(method)
        async with within(0.8):
            await fails(call, "no answer")
        assert before + 2 <= server.count(method) <= before + 3
    server.always(None)
    assert await read(tier, info) == data


async def test_a_hang_that_passes_is_not_seen(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(time_budget_s=2.0), make_block(rng, SIZE)
    server.fail(Fault.HANG)
    async with within(2.0):
        await tier.put(info, data)
    assert server.count() == 2
    check(tier, server, [info])


async def test_pauses_stay_within_the_budget(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier = await make(time_budget_s=0.5, attempts=50, backoff_s=0.05)
    server.always(Fault.SLOW_DOWN)
    async with within(0.5):
        await fails(tier.put(*make_block(rng, SIZE)), "SlowDown")
    assert 2 <= server.count() <= 6


async def test_waiting_for_a_turn_is_within_the_budget(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(time_budget_s=0.4, concurrency=1, attempts=1, failures_to_open=9), make_blocks(rng, 3)
    server.always(Fault.HANG)
    async with within(0.4):
        errors = await asyncio.gather(*(tier.put(info, data) for info, data in blocks), return_exceptions=True)
    assert all(isinstance(error, TierFailed) for error in errors)
    assert server.count() <= 2


# The breaker


async def test_breaker_opens_and_a_probe_closes_it(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"attempts": 1, "failures_to_open": 3, "pause_s": 2.0, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(**options), make_block(rng, SIZE)
    await tier.put(info, data)
    server.always(Fault.ERROR)
    for number in range(3):
        assert tier.healthy, number
        await fails(read(tier, info), "500 InternalError")
    assert (tier.healthy, tier.failed_until) == (False, 1002.0)
    assert "500 InternalError" in tier.failure
    before = server.count()
    for call in (read(tier, info), tier.put(*make_block(rng, SIZE))):
        await fails(call, "left alone", "500 InternalError")
    with pytest.raises(Missing):
        await tier.get(BlockId(bytes(16)), memoryview(bytearray(SIZE)))
    assert await tier.put(info, data) == [], "it is there"
    assert server.count() == before

    await until(lambda: manual.sleeping() == 1)
    manual.advance(2.0)
    await until(lambda: tier.failed_until == 1006.0)
    assert server.requests[before:] == [("LIST", "")], "a probe, which failed: the next is after 4 s"
    server.always(None)
    await fails(read(tier, info), "left alone")
    await until(lambda: manual.sleeping() == 1)
    manual.advance(4.0)
    await until(lambda: tier.healthy)
    assert (tier.failed_until, tier.failure) == (None, "")
    assert await read(tier, info) == data


async def test_only_failures_in_a_row_open_it(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(attempts=1, failures_to_open=3), make_block(rng, SIZE)
    await tier.put(info, data)
    for _ in range(3):
        server.fail(Fault.ERROR, 2)
        for _ in range(2):
            await fails(read(tier, info))
        assert await read(tier, info) == data
    assert tier.healthy


async def test_it_opens_again(make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime) -> None:
    tier, (info, data) = (
        await make(attempts=1, failures_to_open=1, clock=manual.clock, sleep=manual.sleep),
        make_block(rng, SIZE),
    )
    await tier.put(info, data)
    for _ in range(3):
        server.fail(Fault.RESET)
        await fails(read(tier, info))
        await until(lambda: manual.sleeping() == 1)
        manual.advance(2.0)
        await until(lambda: tier.healthy)
        assert await read(tier, info) == data
