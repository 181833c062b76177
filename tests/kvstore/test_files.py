"""The file tier, on real filesystems: what it keeps, its limit, restarts."""

import asyncio
import os
import random
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.kvstore.policy import Lru, make_policy
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES, occupied_bytes
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo
from tests.kvstore.blocks import make_block, read, until
from tests.kvstore.file_tier import MIB, Hang, Open, begun, check_disk, contents, files_of, flip, path_of

pytestmark = pytest.mark.unit


# What goes in comes out


@pytest.mark.parametrize("direct", [False, "auto"])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_001, 4 * MIB])
async def test_gives_back_what_was_put(opened: Open, rng: random.Random, direct: bool | str, size: int) -> None:
    tier = await opened(direct=direct)
    info, payload = make_block(rng, size)
    assert tier.find(info.id) is None
    assert await tier.put(info, memoryview(b"x" + bytes(payload))[1:]) == []
    assert await read(tier, info) == payload
    check_disk(tier, [info])


async def test_a_file_is_a_header_page_and_whole_pages_of_payload(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 5000)
    await tier.put(info, payload)
    file = contents(path_of(tier, info))
    assert path_of(tier, info).endswith(f"/{info.id.hex()[:2]}/{info.id.hex()}.kv")
    body = msgspec.msgpack.encode(info)
    assert file[: 16 + len(body)] == b"KVRBLOCK" + struct.pack("<II", 1, len(body)) + body
    assert struct.unpack("<Q", file[4088:4096])[0] == xxhash.xxh3_64_intdigest(file[:4088])
    assert file[4096:] == bytes(payload).ljust(8192, b"\0")


@pytest.mark.parametrize(("written", "read_back"), [(False, "auto"), ("auto", False)])
async def test_direct_and_buffered_files_are_the_same(
    opened: Open, rng: random.Random, written: bool | str, read_back: bool | str
) -> None:
    info, payload = make_block(rng, 10_000)
    tier = await opened(direct=written)
    await tier.put(info, payload)
    await tier.close()
    assert await read(await opened(direct=read_back), info) == payload


async def test_where_the_filesystem_takes_no_direct_io_it_is_buffered(
    opened: Open, rng: random.Random, mount: Callable[..., Path]
) -> None:
    directory = mount("ramfs")
    with pytest.raises(TierFailed, match="Invalid argument"):
        await opened(directory, direct=True)
    tier = await opened(directory, direct="auto")
    info, payload = make_block(rng, 10_000)
    await tier.put(info, payload)
    assert await read(tier, info) == payload


async def test_storing_what_is_there_does_nothing(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    await tier.put(info, payload)
    before = os.stat(path_of(tier, info))
    assert await tier.put(info, payload) == []
    assert os.stat(path_of(tier, info)) == before
    check_disk(tier, [info])


async def test_puts_of_one_block_at_once_write_it_once(opened: Open, rng: random.Random) -> None:
    tier = await opened(limit_bytes=2 * occupied_bytes(10_000), threads=8)
    info, payload = make_block(rng, 10_000)
    other, other_payload = make_block(rng, 10_000)
    gave = await asyncio.gather(*(tier.put(info, payload) for _ in range(8)), tier.put(other, other_payload))
    assert gave == [[]] * 9  # eight files of it would not have had room
    check_disk(tier, [info, other])


async def test_a_get_while_the_block_is_stored_is_whole_or_missing(opened: Open, rng: random.Random) -> None:
    tier = await opened(threads=4)
    seen = {True: 0, False: 0}
    for _ in range(20):
        info, payload = make_block(rng, 200_000)
        put = asyncio.create_task(tier.put(info, payload))
        while not put.done():
            try:
                assert await read(tier, info) == payload
                seen[True] += 1
            except Missing:
                seen[False] += 1
            await asyncio.sleep(0)
        assert await read(tier, info) == payload
    assert seen[False] > 20


async def test_what_cannot_be_right_is_refused(opened: Open, rng: random.Random) -> None:
    tier = await opened(limit_bytes=100_000)
    info, payload = make_block(rng, 10_000)
    with pytest.raises(ValueError, match="9999 bytes for a block of 10000"):
        await tier.put(info, payload[1:])
    with pytest.raises(ValueError, match="too many for a page"):
        await tier.put(msgspec.structs.replace(info, fingerprint=Fingerprint("x" * 5000)), payload)
    with pytest.raises(TierFailed, match="over the limit"):
        await tier.put(*make_block(rng, 100_001))
    check_disk(tier, [])
    await tier.put(info, payload)
    with pytest.raises(ValueError, match="9999 bytes for a block of 10000"):
        await tier.get(info.id, memoryview(bytearray(9999)))
    for options in ({"limit_bytes": 0}, {"threads": 0}, {"timeout_s": 0}):
        with pytest.raises(ValueError):
            await opened(**options)


# Room


@pytest.mark.parametrize("policy", ["lru", "arc"])
async def test_evicts_what_the_policy_says_and_gives_it(opened: Open, rng: random.Random, policy: str) -> None:
    room = occupied_bytes(10_000)
    tier = await opened(limit_bytes=3 * room + 100, policy=make_policy(policy, 3 * room + 100))
    blocks = [make_block(rng, 10_000) for _ in range(5)]
    for info, payload in blocks[:3]:
        assert await tier.put(info, payload) == []
    await read(tier, blocks[0][0])
    assert await tier.put(*blocks[3]) == [blocks[1][0]]
    assert await tier.put(*blocks[4]) == [blocks[2][0]]
    assert tier.find(blocks[1][0].id) is None
    with pytest.raises(Missing):
        await read(tier, blocks[1][0])
    check_disk(tier, [blocks[index][0] for index in (0, 3, 4)])


async def test_evicts_several_for_a_larger_one(opened: Open, rng: random.Random) -> None:
    tier = await opened(limit_bytes=4 * occupied_bytes(10_000))
    small = [make_block(rng, 10_000) for _ in range(4)]
    for block in small:
        await tier.put(*block)
    info, payload = make_block(rng, 2 * occupied_bytes(10_000) + 1 - PAGE_BYTES)
    assert await tier.put(info, payload) == [block[0] for block in small[:3]]
    check_disk(tier, [small[3][0], info])


async def write_all(tier: FileTier, rng: random.Random, total_bytes: int) -> None:
    """By 8 writers at once, blocks of all sizes, each once, some read back; at the end the accounts are right."""
    kept: dict[BlockId, BlockInfo] = {}
    left = total_bytes

    async def write() -> None:
        nonlocal left
        while left > 0:
            info, payload = make_block(rng, rng.choice((1, 30_000, rng.randrange(120_000))))
            left -= occupied_bytes(info.size)
            evicted = await tier.put(info, payload)
            kept[info.id] = info
            for gone in evicted:
                del kept[gone.id]
            try:
                assert await read(tier, info) == payload
            except Missing:
                assert tier.find(info.id) is None

    await asyncio.gather(*(write() for _ in range(8)))
    check_disk(tier, list(kept.values()))


async def test_the_limit_holds_at_every_moment(opened: Open, rng: random.Random, tmp_path: Path) -> None:
    """Two listings, one after the other: what is in both was there all the time between, as blocks come once here."""
    tier = await opened(limit_bytes=MIB, threads=8)
    sums, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            first, second = (files_of(tmp_path / "blocks") for _ in range(2))
            still = {path.partition(".kv")[0] for path in second}
            sums.append(sum(size for path, size in first.items() if path.partition(".kv")[0] in still))
            assert tier.used_bytes <= tier.limit_bytes

    watching = asyncio.create_task(asyncio.to_thread(watch))
    try:
        await write_all(tier, rng, 10 * tier.limit_bytes)
    finally:
        done.set()
        await watching
    assert len(sums) > 10
    assert 0.5 * tier.limit_bytes < max(sums) <= tier.limit_bytes


@pytest.mark.parametrize("direct", [False, "auto"])
async def test_a_filesystem_as_large_as_the_limit_never_runs_full(
    opened: Open, rng: random.Random, mount: Callable[..., Path], direct: bool | str
) -> None:
    """The kernel counts: one page too many at any moment and a put fails."""
    tier = await opened(mount("tmpfs", f"size={MIB}"), limit_bytes=MIB, threads=8, direct=direct)
    await write_all(tier, rng, 20 * MIB)


async def test_a_block_that_is_read_is_not_evicted(opened: Open, rng: random.Random, hang: Hang) -> None:
    tier = await opened(limit_bytes=2 * occupied_bytes(10_000), direct=False)
    one, two, three, four = (make_block(rng, 10_000) for _ in range(4))
    await tier.put(*one)
    await tier.put(*two)
    release_one = hang(path_of(tier, one[0]))
    reading_one = await begun(read(tier, one[0]))
    assert await tier.put(*three) == [two[0]]
    # Where all are being read, a put waits.
    release_three = hang(path_of(tier, three[0]))
    reading_three = await begun(read(tier, three[0]))
    storing = await begun(tier.put(*four))
    await asyncio.sleep(0.05)
    assert not storing.done()
    assert tier.find(one[0].id)
    assert tier.find(three[0].id)
    await until(release_three)
    assert await storing == []
    await until(release_one)
    for reading in (reading_one, reading_three):
        with pytest.raises(Corrupt):
            await reading
    check_disk(tier, [four[0]])


async def test_a_block_that_is_read_counts_until_it_is_not(opened: Open, rng: random.Random, hang: Hang) -> None:
    tier = await opened(direct=False)
    info, payload = make_block(rng, 10_000)
    await tier.put(info, payload)
    release = hang(path_of(tier, info))
    reading = await begun(read(tier, info))
    await asyncio.sleep(0.05)  # on a very slow machine the thread finds no file, and has nothing open
    await tier.remove(info.id)
    assert tier.find(info.id) is None
    assert reading.done() or tier.used_bytes == occupied_bytes(info.size)
    await until(lambda: release() or reading.done())
    with pytest.raises((Corrupt, Missing)):
        await reading
    assert tier.used_bytes == 0


# Restarts


async def test_a_restart_keeps_the_blocks_and_their_order(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    blocks = [make_block(rng, rng.randrange(50_000)) for _ in range(20)]
    for age, (info, payload) in enumerate(blocks):
        await tier.put(info, payload)
        os.utime(path_of(tier, info), ns=(0, 10**18 + age))
    await tier.close()
    again = FileTier(tier.directory, tier.limit_bytes, Lru(), direct="auto", threads=2, timeout_s=20)
    assert await again.open() == [info for info, _ in blocks]
    check_disk(again, [info for info, _ in blocks])
    for info, payload in blocks:
        assert await read(again, info) == payload
    await again.close()


@pytest.mark.parametrize("direct", [False, "auto"])
async def test_a_lowered_limit_drops_the_oldest(opened: Open, rng: random.Random, direct: bool | str) -> None:
    tier = await opened()
    blocks = [make_block(rng, 10_000) for _ in range(6)]
    for age, (info, payload) in enumerate(blocks):
        await tier.put(info, payload)
        os.utime(path_of(tier, info), ns=(0, 10**18 + age))
    await tier.close()
    tier = await opened(limit_bytes=3 * occupied_bytes(10_000) + 5, direct=direct)
    check_disk(tier, [info for info, _ in blocks[3:]])
    assert await tier.put(*blocks[0]) == [blocks[3][0]]


async def test_open_removes_what_is_no_block(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    blocks = [make_block(rng, 10_000) for _ in range(6)]
    for block in blocks:
        await tier.put(*block)
    await tier.close()
    whole, short, long, flipped, misplaced, late = (Path(path_of(tier, info)) for info, _ in blocks)
    os.truncate(short, 12_000)
    with long.open("ab") as file:
        file.write(b"\0" * 4096)
    flip(flipped, 8 * 20)
    misplaced.rename(misplaced.with_name("0" * 32 + ".kv"))
    flip(late, 8 * 5000)
    folder = whole.parent
    (folder / f"{whole.name}.deadbeef-1.tmp").write_bytes(whole.read_bytes())
    (folder / "notes.txt").write_text("stray")
    (folder / "empty.kv").touch()
    (folder / "link.kv").symlink_to(whole)
    (folder / "folder.kv").mkdir()
    (folder / "folder.kv" / "deep").touch()
    os.mkfifo(folder / "fifo.kv")
    tier = await opened()
    check_disk(tier, [blocks[0][0], blocks[5][0]])
    assert os.listdir(folder) == [whole.name]
    with pytest.raises(Corrupt):  # only headers are read at the start
        await read(tier, blocks[5][0])


async def test_a_directory_of_other_things_is_left_alone(opened: Open, tmp_path: Path) -> None:
    directory = tmp_path / "home"
    (directory / "ab").mkdir(parents=True)
    (directory / "ab" / "thesis.txt").write_text("years of work")
    with pytest.raises(TierFailed, match="not empty and not a kvstore's"):
        await opened(directory)
    assert files_of(directory) == {str(directory / "ab" / "thesis.txt"): 13}


SECOND = """
import asyncio, sys
from kvrelay.kvstore.policy import Lru
from kvrelay.kvstore.tiers.base import TierFailed
from kvrelay.kvstore.tiers.files import FileTier
async def main():
    tier = FileTier(sys.argv[1], 1 << 20, Lru(), direct="auto", threads=1, timeout_s=20)
    print(len(await tier.open()), "blocks")
    await tier.close()
try:
    asyncio.run(main())
except TierFailed as error:
    print(error)
"""


async def test_a_second_process_is_refused(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    await tier.put(*make_block(rng, 10_000))

    def second() -> str:
        command = [sys.executable, "-c", SECOND, tier.directory]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert await asyncio.to_thread(second) == f"{tier.directory}: opening: the directory is in use by another process"
    with pytest.raises(TierFailed, match="open already"):
        await tier.open()
    await tier.close()
    assert await asyncio.to_thread(second) == "1 blocks"
    assert len(await tier.open()) == 1
