"""The file tier when calls take too long and callers leave; removing, closing, and a random life."""

import asyncio
import contextlib
import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest

from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import Claim, occupied_bytes
from kvrelay.kvstore.tiers.threads import Threads
from tests.kvstore.blocks import make_block, read, until
from tests.kvstore.file_tier import MIB, Hang, Open, begun, check_disk, flip, path_of

pytestmark = pytest.mark.unit


# Calls that take too long, and callers that leave


async def test_a_read_that_hangs(opened: Open, rng: random.Random, hang: Hang) -> None:
    tier = await opened(direct=False)
    (stuck, payload), good = make_block(rng, 10_000), make_block(rng, 10_000)
    await tier.put(stuck, payload)
    await tier.put(*good)
    release = hang(path_of(tier, stuck))
    tier.timeout_s = 0.2
    into = bytearray(10_000)
    with pytest.raises(TierFailed, match="reading a block took longer than"):
        await tier.get(stuck.id, memoryview(into))
    tier.timeout_s = 20.0
    assert await read(tier, good[0]) == good[1]
    await until(release)
    await tier.close()
    assert not any(into)
    assert tier.find(stuck.id) is None


async def test_a_write_that_waits_too_long_for_a_thread(opened: Open, rng: random.Random, hang: Hang) -> None:
    tier = await opened(direct=False, threads=1)
    (stuck, payload), late = make_block(rng, 10_000), make_block(rng, 20_000)
    await tier.put(stuck, payload)
    release = hang(path_of(tier, stuck))
    tier.timeout_s = 0.2
    reading = await begun(read(tier, stuck))
    with pytest.raises(TierFailed, match="storing a block took longer than"):
        await tier.put(*late)
    with pytest.raises(TierFailed):
        await reading
    tier.timeout_s = 20.0
    assert tier.find(late[0].id) is None
    assert tier.used_bytes == occupied_bytes(10_000) + occupied_bytes(20_000)  # until the thread is done with it
    await until(release)
    info, payload = make_block(rng, 1000)
    await until(lambda: tier.find(stuck.id) is None)
    await tier.put(info, payload)
    check_disk(tier, [info])


async def test_a_put_that_waits_too_long_for_room(opened: Open, rng: random.Random, hang: Hang) -> None:
    tier = await opened(direct=False, limit_bytes=2 * occupied_bytes(10_000))
    (stuck, payload), late, small = (make_block(rng, size) for size in (10_000, 20_000, 10_000))
    await tier.put(stuck, payload)
    release = hang(path_of(tier, stuck))
    tier.timeout_s = 0.2
    reading = await begun(read(tier, stuck))
    with pytest.raises(TierFailed, match="storing a block took longer"):
        await tier.put(*late)
    with pytest.raises(TierFailed):
        await reading
    tier.timeout_s = 20.0
    await tier.put(*small)  # it left its turn
    await tier.remove(small[0].id)
    await until(release)
    await until(lambda: tier.used_bytes == 0)
    assert await tier.put(*late) == []
    check_disk(tier, [late[0]])


class LeavesWhenAsked(Claim):
    """Whose caller leaves just before the thread asks for the `count`th time whether it is still there."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def check(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.abandoned = True
        super().check()


@pytest.mark.parametrize("count", [1, 2])
def test_a_write_whose_caller_left_leaves_nothing(tmp_path: Path, rng: random.Random, count: int) -> None:
    info, payload = make_block(rng, 10_000)
    header = blockfile.encode_header(info)
    with pytest.raises(blockfile.Abandoned):
        blockfile.write_block(
            str(tmp_path / "block"), str(tmp_path / "temporary"), header, payload, LeavesWhenAsked(count), 0
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_read_whose_caller_left_changes_nothing(tmp_path: Path, rng: random.Random, count: int) -> None:
    info, payload = make_block(rng, 10_000)
    path, into = str(tmp_path / "block"), bytearray(10_000)
    blockfile.write_block(path, f"{path}.tmp", blockfile.encode_header(info), payload, Claim(), 0)
    with pytest.raises(blockfile.Abandoned):
        blockfile.read_block(path, info, memoryview(into), LeavesWhenAsked(count), 0)
    assert not any(into)
    blockfile.read_block(path, info, memoryview(into), LeavesWhenAsked(3), 0)
    assert into == payload


def test_a_read_whose_caller_left_judges_and_changes_nothing_that_is_the_callers(
    tmp_path: Path, rng: random.Random
) -> None:
    info, payload = make_block(rng, 10_000)
    path, into = str(tmp_path / "block"), bytearray(10_000)
    blockfile.write_block(path, f"{path}.tmp", blockfile.encode_header(info), payload, Claim(), 0)
    flip(path, 8 * 5000)
    with pytest.raises(blockfile.Abandoned):  # what does not match may be what the caller has written there since
        blockfile.read_block(path, info, memoryview(into), LeavesWhenAsked(3), 0)
    assert sum(a != b for a, b in zip(into, payload, strict=True)) == 1


def test_a_read_that_the_page_cache_does_not_have(tmp_path: Path, rng: random.Random) -> None:
    info, payload = make_block(rng, 100_000)
    path, into = str(tmp_path / "block"), bytearray(100_000)
    blockfile.write_block(path, f"{path}.tmp", blockfile.encode_header(info), payload, Claim(), 0)
    for start in (0, 40_960):  # nothing, and the beginning
        with open(path, "rb") as file:
            file.read()
            os.posix_fadvise(file.fileno(), start, 0, os.POSIX_FADV_DONTNEED)
        blockfile.read_block(path, info, memoryview(into), Claim(), 0)
        assert into == payload
        into[:] = bytes(100_000)


async def test_threads_that_are_closed() -> None:
    threads = Threads(1, "test")
    begun, go_on = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go_on.wait(20)
        return "done"

    running, waiting = (asyncio.create_task(threads.run(work)) for _ in range(2))
    await until(begun.is_set)
    threads.close()
    with pytest.raises(OSError, match="closed"):
        await waiting
    with pytest.raises(OSError, match="closed"):
        await threads.run(work)
    go_on.set()
    assert await running == "done"


def test_what_cannot_be_removed_is_said(tmp_path: Path, rng: random.Random) -> None:
    info, payload = make_block(rng, 10_000)

    class Hinders(Claim):
        def check(self) -> None:
            if (tmp_path / "temporary").exists():
                (tmp_path / "temporary").unlink()
                (tmp_path / "temporary").mkdir()
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(blockfile.Remains, match="Input/output error"):
        blockfile.write_block(
            str(tmp_path / "b"), str(tmp_path / "temporary"), blockfile.encode_header(info), payload, Hinders(), 0
        )


def wait_without_the_loop(path: str) -> None:
    deadline = time.monotonic() + 20
    while not os.path.exists(path):
        assert time.monotonic() < deadline


async def test_a_caller_that_leaves_when_the_file_is_in_place(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    storing = await begun(tier.put(info, payload))
    wait_without_the_loop(path_of(tier, info))  # which so does not hear of it
    storing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await storing
    await tier.close()
    check_disk(tier, [])


async def test_a_cancelled_put_leaves_nothing_and_the_next_writes(opened: Open, rng: random.Random) -> None:
    tier = await opened(threads=1)
    for delay in range(30):
        info, payload = make_block(rng, 50_000)
        first, second = (asyncio.create_task(tier.put(info, payload)) for _ in range(2))
        for _ in range(delay):
            await asyncio.sleep(0)
        first.cancel()
        assert await second == []
        assert await read(tier, info) == payload
        await tier.remove(info.id)
        check_disk(tier, [])


# Removing and closing


async def test_remove(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    await tier.remove(info.id)
    for _ in range(2):
        await tier.put(info, payload)
        await tier.remove(info.id)
        check_disk(tier, [])
    storing = await begun(tier.put(info, payload))
    await tier.remove(info.id)
    await storing
    check_disk(tier, [])


async def test_close_waits_for_what_runs(opened: Open, rng: random.Random) -> None:
    tier = await opened(limit_bytes=MIB)
    blocks = [make_block(rng, 100_000) for _ in range(4)]
    storing = [asyncio.create_task(tier.put(*block)) for block in blocks]
    await asyncio.sleep(0.001)
    await tier.close()
    await tier.close()
    results = await asyncio.gather(*storing, return_exceptions=True)
    assert all(result == [] or isinstance(result, TierFailed) for result in results)
    for call in (
        tier.put(*blocks[0]),
        tier.get(blocks[0][0].id, memoryview(bytearray(1))),
        tier.remove(blocks[0][0].id),
    ):
        with pytest.raises(TierFailed, match="not open"):
            await call
    again = await opened()
    check_disk(again, [info for (info, _), result in zip(blocks, results, strict=True) if result == []])


async def test_close_does_not_wait_for_ever(opened: Open, rng: random.Random, hang: Hang) -> None:
    tier = await opened(direct=False)
    info, payload = make_block(rng, 10_000)
    await tier.put(info, payload)
    tier.timeout_s = 0.2
    release = hang(path_of(tier, info))
    with pytest.raises(TierFailed):
        await read(tier, info)
    started = asyncio.get_running_loop().time()
    await tier.close()
    assert asyncio.get_running_loop().time() - started < 5
    with pytest.raises(TierFailed, match="still runs"):
        await tier.open()
    with pytest.raises(TierFailed, match="in use by another process"):
        await opened()
    await until(release)

    async def reopens() -> bool:
        try:
            await opened()
        except TierFailed:
            return False
        return True

    async with asyncio.timeout(20):
        while not await reopens():
            await asyncio.sleep(0.01)


async def test_a_random_life(opened: Open, rng: random.Random) -> None:
    """Puts, gets, removals, damage, cancellations and restarts at once: a get is right or says why not, and the accounts close."""
    blocks = [make_block(rng, rng.randrange(60_000)) for _ in range(40)]
    tier = await opened(limit_bytes=500_000, threads=4, policy=make_policy("arc", 500_000))

    async def live(number: int) -> None:
        for _ in range(60):
            info, payload = rng.choice(blocks)
            action = rng.choice(("put", "put", "get", "get", "remove", "damage", "cancel"))
            if action == "put":
                await tier.put(info, payload)
            elif action == "remove":
                await tier.remove(info.id)
            elif action == "damage":
                with contextlib.suppress(FileNotFoundError):
                    flip(path_of(tier, info), rng.randrange(8 * occupied_bytes(info.size)))
            elif action == "cancel":
                task = asyncio.create_task(tier.put(info, payload))
                await asyncio.sleep(rng.choice((0, 0.001, 0.003)))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                with contextlib.suppress(Missing, Corrupt):
                    assert await read(tier, info) == payload
            assert tier.used_bytes <= tier.limit_bytes

    for _ in range(3):
        await asyncio.gather(*(live(number) for number in range(6)))
        await tier.close()
        check_disk(tier, [info for info, _ in blocks if tier.find(info.id)])
        tier = await opened(limit_bytes=500_000, threads=4, policy=make_policy("arc", 500_000))
