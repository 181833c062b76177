"""The file tier, on real filesystems: what it keeps, what it refuses to give, and what is on the disk meanwhile."""

import asyncio
import contextlib
import errno
import os
import random
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import xxhash

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.block import BlockInfo, checksum
from kvrelay.kvstore.policy import Lru, make_policy
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import LOCK_NAME, PAGE_BYTES, Claim, occupied_bytes
from kvrelay.kvstore.tiers.files import FileTier

pytestmark = pytest.mark.unit

Open = Callable[..., Any]
Hang = Callable[[str], Callable[[], bool]]
MIB = 1 << 20
T = TypeVar("T")


def make_block(rng: random.Random, size: int) -> tuple[BlockInfo, memoryview]:
    payload = memoryview(rng.randbytes(size))
    block_id = BlockId(rng.randbytes(16))
    info = BlockInfo(
        id=block_id,
        head=block_id,
        fingerprint=Fingerprint("model"),
        shape="5d0c",
        dtype=KvDtype.BFLOAT16,
        size=size,
    )
    return msgspec.structs.replace(info, checksum=checksum(info, payload)), payload


def files_of(directory: Path) -> dict[str, int]:
    """Lengths of all files but the lock, by path; a file that goes meanwhile is left out."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found[os.path.join(folder, name)] = os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    assert found.pop(str(directory / LOCK_NAME), 0) == 0
    return found


def check_disk(tier: FileTier, infos: list[BlockInfo]) -> None:
    """These blocks and nothing else are in the directory, found and counted."""
    files = files_of(Path(tier.directory))
    assert files == {path_of(tier, info): occupied_bytes(info.size) for info in infos}
    assert tier.used_bytes == sum(files.values()) <= tier.limit_bytes
    assert all(tier.find(info.id) == info for info in infos)


def path_of(tier: FileTier, info: BlockInfo) -> str:
    return os.path.join(tier.directory, blockfile.relative_path(info.id))


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


async def read(tier: FileTier, info: BlockInfo) -> bytes:
    into = bytearray(b"\xa5" * (info.size + 8))
    assert await tier.get(info.id, memoryview(into)) == info
    assert into[info.size :] == b"\xa5" * 8
    return bytes(into[: info.size])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A call whose own task has begun as well."""
    task = asyncio.create_task(work)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Opens tiers, of one directory unless told, and closes them in the end."""
    tiers = []

    async def open_tier(directory: Path = tmp_path / "blocks", **options: Any) -> FileTier:
        given = {"limit_bytes": 64 * MIB, "policy": Lru(), "direct": "auto", "threads": 3, "timeout_s": 20.0} | options
        tier = FileTier(directory, **given)
        tiers.append(tier)
        await tier.open()
        return tier

    yield open_tier
    for tier in tiers:
        await tier.close()


@pytest.fixture
def hang(tmp_path: Path) -> Iterator[Hang]:
    """Who opens this file hangs from now on, until the function given says that it has let someone go, who finds it empty then."""
    pipes: list[Path] = []

    def release(pipe: Path) -> bool:
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # no one is there
            return False
        return True

    def replace(path: str) -> Callable[[], bool]:
        pipe = tmp_path / f"pipe{len(pipes)}"
        os.mkfifo(pipe)
        os.unlink(path)
        os.link(pipe, path)
        pipes.append(pipe)
        return lambda: release(pipe)

    yield replace
    for pipe in pipes:
        release(pipe)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    mounted: list[Path] = []

    def make(kind: str, options: str = "rw") -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", kind, "-o", options, "kvrelay-test", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


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


# Bytes that are not those that were stored


def flip(path: str | Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@pytest.mark.parametrize("direct", [False, "auto"])
async def test_a_flipped_bit_anywhere_is_found(opened: Open, rng: random.Random, direct: bool | str) -> None:
    tier = await opened(direct=direct)
    for number in range(120):
        info, payload = make_block(rng, rng.randrange(1, 40_000))
        await tier.put(info, payload)
        start, end = ((0, PAGE_BYTES), (PAGE_BYTES, occupied_bytes(info.size)))[number % 2]
        flip(path_of(tier, info), rng.randrange(8 * start, 8 * end))
        into = bytearray(info.size)
        with pytest.raises(Corrupt):
            await tier.get(info.id, memoryview(into))
        assert not any(into)
        check_disk(tier, [])


def test_a_flipped_bit_anywhere_in_a_header_is_found(rng: random.Random) -> None:
    info, _ = make_block(rng, 10_000)
    page = bytearray(blockfile.encode_header(info))
    assert blockfile.decode_header(memoryview(page)) == info
    for bit in range(8 * PAGE_BYTES):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(blockfile.Damaged):
            blockfile.decode_header(memoryview(page))
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(msgspec.structs.replace(make_block(random.Random(1), 5)[0], id=BlockId(b"short"))),
        msgspec.msgpack.encode(msgspec.structs.replace(make_block(random.Random(1), 5)[0], size=-1)),
    ],
)
def test_a_header_that_says_no_block_is_refused(body: bytes) -> None:
    for magic, version, length in ((b"KVRBLOCK", 1, len(body)), (b"KVRBLOCK", 2, len(body)), (b"KVRBLOCK", 1, 5000)):
        page = (struct.pack("<8sII", magic, version, length) + body).ljust(4088, b"\0")
        page += struct.pack("<Q", xxhash.xxh3_64_intdigest(page))
        with pytest.raises(blockfile.Damaged):
            blockfile.decode_header(memoryview(page))


@pytest.mark.parametrize("direct", [False, "auto"])
@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 8192, 12_287, 16_384])
async def test_a_file_of_another_length_is_found(
    opened: Open, rng: random.Random, direct: bool | str, length: int
) -> None:
    tier = await opened(direct=direct)
    info, payload = make_block(rng, 5000)
    await tier.put(info, payload)
    os.truncate(path_of(tier, info), length)
    with pytest.raises(Corrupt, match=f"{length} bytes long instead of 12288"):
        await read(tier, info)
    check_disk(tier, [])
    await tier.put(info, payload)
    assert await read(tier, info) == payload


async def test_another_block_in_its_place_is_found(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    (one, payload), (two, _) = make_block(rng, 10_000), make_block(rng, 10_000)
    for info in (one, two):
        await tier.put(info, payload)
    os.replace(path_of(tier, one), path_of(tier, two))
    with pytest.raises(Corrupt, match="another block"):
        await read(tier, two)
    with pytest.raises(Missing, match="removed by someone else"):
        await read(tier, one)
    check_disk(tier, [])


async def test_what_was_never_right_is_found(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    await tier.put(msgspec.structs.replace(info, checksum=info.checksum ^ 1), payload)
    with pytest.raises(Corrupt, match="payload"):
        await tier.get(info.id, memoryview(bytearray(10_000)))


async def test_readers_of_one_damaged_file_all_hear_of_it(opened: Open, rng: random.Random) -> None:
    tier = await opened(threads=4)
    info, payload = make_block(rng, 300_000)
    for _ in range(10):
        await tier.put(info, payload)
        flip(path_of(tier, info), 8 * 5000)
        readers = await asyncio.gather(*(read(tier, info) for _ in range(6)), return_exceptions=True)
        assert all(isinstance(error, Corrupt | Missing) for error in readers)
        check_disk(tier, [])


# A medium that fails


@pytest.mark.parametrize("direct", [False, "auto"])
async def test_a_full_disk(opened: Open, rng: random.Random, mount: Callable[..., Path], direct: bool | str) -> None:
    tier = await opened(mount("tmpfs", f"size={MIB}"), direct=direct, threads=8)
    blocks = [make_block(rng, 100_000) for _ in range(16)]
    stored = []
    results = await asyncio.gather(*(tier.put(*block) for block in blocks), return_exceptions=True)
    for (info, _), result in zip(blocks, results, strict=True):
        if isinstance(result, TierFailed):
            assert "No space left on device" in str(result)
            assert tier.find(info.id) is None
        else:
            assert result == []
            stored.append(info)
    assert 0 < len(stored) <= 10
    check_disk(tier, stored)
    await tier.remove(stored[0].id)
    await tier.put(*blocks[[info for info, _ in blocks].index(stored[0])])
    check_disk(tier, stored)


async def test_a_file_that_may_not_be_as_large(opened: Open, rng: random.Random) -> None:
    tier = await opened(limit_bytes=100_000)
    small = [make_block(rng, 40_000) for _ in range(2)]
    for block in small:
        await tier.put(*block)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(TierFailed, match="File too large"):
            await tier.put(*make_block(rng, 70_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_disk(tier, [])
    # What went for the block that failed is given with the next, if it is not back.
    assert await tier.put(*small[0]) == [small[1][0]]
    check_disk(tier, [small[0][0]])


async def test_a_disk_that_turns_read_only(opened: Open, rng: random.Random, mount: Callable[..., Path]) -> None:
    directory = mount("tmpfs", "size=8M")
    tier = await opened(directory, limit_bytes=2 * occupied_bytes(10_000))
    first, second, third = (make_block(rng, 10_000) for _ in range(3))
    await tier.put(*first)
    remount(directory, "ro")
    words = "Read-only file system"
    with pytest.raises(TierFailed, match=words):  # there is room, but no file can be made
        await tier.put(*second)
    remount(directory, "rw")
    await tier.put(*second)
    remount(directory, "ro")
    with pytest.raises(TierFailed, match=words):  # nothing can be evicted
        await tier.put(*third)
    with pytest.raises(TierFailed, match=words):
        await tier.remove(first[0].id)
    check_disk(tier, [first[0], second[0]])
    assert await read(tier, first[0]) == first[1]
    await tier.close()
    tier = await opened(directory, limit_bytes=2 * occupied_bytes(10_000))
    assert await read(tier, second[0]) == second[1]
    remount(directory, "rw")
    await tier.put(*third)
    assert tier.find(third[0].id)
    empty = mount("tmpfs", "ro,size=8M")
    with pytest.raises(TierFailed, match=words):
        await opened(empty)


@pytest.fixture
def append_only() -> Iterator[Callable[[str], None]]:
    """Makes a folder one in which files are made, and none renamed or removed."""
    folders = []

    def make(folder: str) -> None:
        try:
            done = subprocess.run(["chattr", "+a", folder], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no chattr command")
        if done.returncode:
            pytest.skip(f"no folder can be made append-only here: {done.stderr.strip()}")
        folders.append(folder)

    yield make
    for folder in folders:
        subprocess.run(["chattr", "-a", folder], check=True)


async def test_what_cannot_be_removed_stays_counted(
    opened: Open, rng: random.Random, append_only: Callable[[str], None]
) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    append_only(os.path.dirname(path_of(tier, info)))
    with pytest.raises(TierFailed, match="Operation not permitted"):
        await tier.put(info, payload)
    assert tier.find(info.id) is None
    assert tier.used_bytes == occupied_bytes(10_000) == sum(files_of(Path(tier.directory)).values())
    await tier.close()
    with pytest.raises(TierFailed, match="Operation not permitted"):
        await opened()


async def test_an_error_of_a_read(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    await tier.put(info, payload)
    path = path_of(tier, info)
    os.rename(path, f"{tier.directory}/aside")
    os.symlink(path, path)
    with pytest.raises(TierFailed, match=f"{tier.directory}: reading a block: {os.strerror(errno.ELOOP)}"):
        await read(tier, info)
    os.rename(f"{tier.directory}/aside", path)
    assert await read(tier, info) == payload  # an error is not the block's end
    check_disk(tier, [info])


async def test_a_folder_that_is_gone(opened: Open, rng: random.Random) -> None:
    tier = await opened()
    info, payload = make_block(rng, 10_000)
    os.rmdir(os.path.dirname(path_of(tier, info)))
    with pytest.raises(TierFailed, match="No such file or directory"):
        await tier.put(info, payload)
    check_disk(tier, [])


async def test_a_file_that_is_gone(opened: Open, rng: random.Random) -> None:
    tier = await opened(limit_bytes=2 * occupied_bytes(10_000))
    blocks = [make_block(rng, 10_000) for _ in range(4)]
    for block in blocks[:2]:
        await tier.put(*block)
    os.unlink(path_of(tier, blocks[0][0]))
    with pytest.raises(Missing):
        await read(tier, blocks[0][0])
    check_disk(tier, [blocks[1][0]])
    os.unlink(path_of(tier, blocks[1][0]))
    await tier.put(*blocks[2])
    assert await tier.put(*blocks[3]) == [blocks[1][0]]  # evicting it is no error
    check_disk(tier, [blocks[2][0], blocks[3][0]])


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
