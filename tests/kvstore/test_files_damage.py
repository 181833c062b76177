"""The file tier on files that are damaged and on media that fail."""

import asyncio
import errno
import os
import random
import resource
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES, occupied_bytes
from tests.kvstore.blocks import make_block, read
from tests.kvstore.file_tier import MIB, Open, check_disk, files_of, flip, path_of, remount

pytestmark = pytest.mark.unit


# Bytes that are not those that were stored


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
