"""The S3 tier on a server that sees every request: names, calls, opening, integrity."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvrelay.common.ids import BlockId
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.policy import Lru
from kvrelay.kvstore.tiers import objects
from kvrelay.kvstore.tiers.base import Corrupt, Missing
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES
from kvrelay.kvstore.tiers.objects import ObjectTier, S3Access, block_key, parse_key
from kvrelay.transfer.block import BlockInfo, checksum
from tests.kvstore.blocks import make_block, read, until
from tests.kvstore.faulty_s3 import (
    KIB,
    MIB,
    OBJECT,
    SIZE,
    Fault,
    FaultyS3,
    Open,
    check,
    fails,
    make_blocks,
)

pytestmark = pytest.mark.unit


# Keys and objects


def test_a_key_says_all_of_a_block(rng: random.Random) -> None:
    info, _ = make_block(rng, SIZE, head=BlockId(rng.randbytes(16)), encoding="zstd", shape="5/é\0")
    key = block_key("kv/node-1", info)
    assert key.startswith(f"kv/node-1/{info.id.hex()[:2]}/{info.id.hex()}.")
    assert parse_key("kv/node-1", key) == info
    assert len(msgspec.structs.astuple(info)) == 10, "a new field of BlockInfo needs another KEY_VERSION"
    assert all(character.isalnum() or character in "/._-" for character in key)


def test_a_long_key_is_of_short_names(rng: random.Random) -> None:
    info, _ = make_block(rng, SIZE, shape="s" * 400)
    key = block_key("kv", info)
    assert max(map(len, key.split("/"))) <= 240
    assert parse_key("kv", key) == info


def test_what_is_not_a_block_is_no_key(rng: random.Random) -> None:
    info, _ = make_block(rng, SIZE)
    key = block_key("kv", info)
    for other in (
        "",
        "kv",
        "kv/",
        "kv/ab/notes.txt",
        key[:-1],
        key + "A",
        key + "/",
        key.replace(".2", ".1"),
        "x" + key,
        key[:-3] + "///",
    ):
        assert parse_key("kv", other) is None, other
    folder = info.id.hex()[:2]
    assert parse_key("kv", key.replace(f"/{folder}/", "/zz/")) is None


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("http://bucket/kv", {}),
        ("s3:///kv", {}),
        ("s3://bucket", {"prefix": ""}),
        ("s3://bucket/a%20b", {}),
        ("s3://bucket/kv", {"prefix": "../node"}),
        ("s3://bucket/kv", {"concurrency": 0}),
        ("s3://bucket/kv", {"time_budget_s": 0.0}),
        ("s3://bucket/kv", {"multipart_bytes": MIB}),
    ],
)
def test_wrong_options_are_refused(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ObjectTier(url, MIB, Lru(), access=S3Access(), **options)


def test_access_hides_secrets_and_wants_both_keys() -> None:
    assert "hidden" not in repr(S3Access(access_key_id="who", secret_access_key="hidden", session_token="hidden"))
    with pytest.raises(ValueError, match="together"):
        S3Access(access_key_id="who")
    with pytest.raises(ValueError, match="endpoint"):
        S3Access(endpoint="localhost:9000")


# Calls that succeed


async def test_round_trip_one_request_each(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier = await make(opened=False)
    assert await tier.open() == []
    (info, data), (other, _) = make_blocks(rng, 2)
    assert await tier.put(info, data) == []
    assert await tier.put(info, data) == []
    assert await read(tier, info) == data
    check(tier, server, [info])
    with pytest.raises(Missing):
        await tier.get(other.id, memoryview(bytearray(SIZE)))
    await tier.remove(info.id)
    await tier.remove(info.id)
    assert tier.find(info.id) is None
    check(tier, server, [])
    assert Counter(method for method, _ in server.requests) == {"LIST": 1, "PUT": 1, "GET": 1, "DELETE": 1}


async def test_buffers_of_wrong_sizes_are_refused(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    with pytest.raises(ValueError):
        await tier.put(info, data[1:])
    await tier.put(info, data)
    with pytest.raises(ValueError):
        await tier.get(info.id, memoryview(bytearray(SIZE - 1)))
    assert server.count() == 1


async def test_puts_of_one_block_are_one(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    await asyncio.gather(*(tier.put(info, data) for _ in range(5)))
    assert server.count() == 1
    check(tier, server, [info])


async def test_requests_at_a_time_are_bounded(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(concurrency=3), make_blocks(rng, 20)
    await asyncio.gather(*(tier.put(info, data) for info, data in blocks))
    assert 1 < server.most_at_once <= 3
    assert await asyncio.gather(*(read(tier, info) for info, _ in blocks)) == [data for _, data in blocks]
    assert server.most_at_once <= 3


async def test_other_calls_go_on_beside_one_that_hangs(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(concurrency=2), make_blocks(rng, 3)
    for info, data in blocks:
        await tier.put(info, data)
    server.fail(Fault.HANG)
    hanging = asyncio.create_task(read(tier, blocks[0][0]))
    await until(lambda: server.count("GET") == 1)
    for info, data in blocks[1:]:
        assert await read(tier, info) == data
    assert not hanging.done()
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert await read(tier, blocks[0][0]) == blocks[0][1]


# Opening


async def test_open_finds_all_by_listing_alone(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(), make_blocks(rng, 7, size=KIB)
    for info, data in blocks:
        await tier.put(info, data)
    other = await make(prefix="node-10")
    await other.put(*make_block(rng, KIB))
    await tier.close()
    server.requests.clear()
    server.page_keys = 2
    again = await make(opened=False)
    assert {info.id: info for info in await again.open()} == {info.id: info for info, _ in blocks}
    assert again.used_bytes == 7 * (PAGE_BYTES + KIB)
    assert Counter(method for method, _ in server.requests) == {"LIST": 4}
    for info, data in blocks:
        assert await read(again, info) == data


async def test_open_goes_on_behind_a_failure(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(), make_blocks(rng, 5, size=KIB)
    for info, data in blocks:
        await tier.put(info, data)
    server.page_keys = 2
    for fault in (Fault.ERROR, Fault.RESET, Fault.TRUNCATED):
        server.fail(fault, method="LIST")
        assert len(await (await make(opened=False)).open()) == 5
    server.always(Fault.SLOW_DOWN)
    again = await make(opened=False)
    await fails(again.open(), "SlowDown", "attempt 4 of 4")
    server.always(None)
    server.script("LIST", [None, *[Fault.ERROR] * 4])
    await fails(again.open(), "InternalError", "attempt 4 of 4")
    assert len(await again.open()) == 5
    check(again, server, [info for info, _ in blocks])


async def test_open_evicts_the_oldest_over_the_limit(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(), make_blocks(rng, 9)
    for age, (info, data) in enumerate(blocks):
        await tier.put(info, data)
        server.objects[tier.key(info)] = (server.objects[tier.key(info)][0], 1e9 - age)
    again = await make(opened=False, limit_bytes=4 * OBJECT + 1, concurrency=2)
    assert await again.open() == [info for info, _ in reversed(blocks[:4])]
    check(again, server, [info for info, _ in blocks[:4]])
    assert await again.put(*make_block(rng, SIZE)) == [blocks[3][0]]


async def test_open_that_cannot_evict_stores_nothing(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(), make_blocks(rng, 4)
    for info, data in blocks:
        await tier.put(info, data)
    server.always(Fault.DENIED, "DELETE")
    again = await make(opened=False, limit_bytes=2 * OBJECT, time_budget_s=0.3)
    left = await again.open()
    assert len(left) == 2
    assert again.used_bytes == 4 * OBJECT
    await fails(again.put(*make_block(rng, SIZE)))
    assert server.count("PUT") == 4


async def test_open_leaves_what_is_not_its_own(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    await tier.put(info, data)
    server.objects["kv/node-1/README"] = (b"of another", 0.0)
    short, _ = make_block(rng, SIZE)
    server.objects[tier.key(short)] = (bytes(100), 0.0)
    again = await make(opened=False)
    assert await again.open() == [info]
    await until(lambda: again.used_bytes == OBJECT)
    assert set(server.objects) == {tier.key(info), "kv/node-1/README"}
    assert again.num_corrupt == 1
    await fails(again.open(), "opened before")


async def test_a_block_takes_the_place_of_its_remains(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data), (longer, payload) = await make(opened=False), make_block(rng, SIZE), make_block(rng, SIZE)
    server.objects[tier.key(info)] = (bytes(100), 0.0)
    server.objects[tier.key(longer)] = (bytes(OBJECT + 100), 0.0)
    server.always(Fault.ERROR, "DELETE")
    assert await tier.open() == []
    await until(lambda: server.count("DELETE") == 8)
    await asyncio.gather(tier.put(info, data), tier.put(longer, payload))
    check(tier, server, [info, longer])


async def test_of_two_objects_of_a_block_the_later_stays(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(opened=False), make_block(rng, SIZE)
    newer = msgspec.structs.replace(info, dtype=KvDtype.FLOAT16)
    newer = msgspec.structs.replace(newer, checksum=checksum(newer, data))
    for written, stored in ((2e9, newer), (1e9, info)):
        server.objects[tier.key(stored)] = (objects.encode_header(stored) + data, written)
    assert await tier.open() == [newer]
    await until(lambda: tier.used_bytes == OBJECT)
    check(tier, server, [newer])
    assert await read(tier, newer) == data


async def test_nothing_is_stored_before_it_is_open(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(opened=False), make_block(rng, SIZE)
    await fails(tier.put(info, data), "not open")
    with pytest.raises(Missing):
        await tier.get(info.id, memoryview(bytearray(SIZE)))
    await tier.remove(info.id)
    assert server.count() == 0


# Reading another node's blocks


async def test_blocks_of_another_node_are_read_by_their_key(make: Open, server: FaultyS3, rng: random.Random) -> None:
    mine, other, (info, data) = await make(), await make(prefix="node-2"), make_block(rng, SIZE)
    await other.put(info, data)
    key, into = other.key(info), bytearray(SIZE)
    await mine.get_at(key, info, memoryview(into))
    assert into == data
    assert mine.find(info.id) is None
    assert mine.used_bytes == 0
    await mine.put(info, data)
    server.objects[key] = (bytes(OBJECT), 0.0)
    with pytest.raises(Corrupt):
        await mine.get_at(key, info, memoryview(into))
    assert mine.num_corrupt == 1
    assert key in server.objects, "it is its owner's to delete"
    assert await read(mine, info) == data
    await other.remove(info.id)
    with pytest.raises(Missing):
        await mine.get_at(key, info, memoryview(into))


# Integrity


async def test_flipped_bit_is_corrupt_and_deleted(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    await tier.put(info, data)
    server.fail(Fault.FLIPPED)
    into = bytearray(SIZE)
    with pytest.raises(Corrupt, match="checksum"):
        await tier.get(info.id, memoryview(into))
    assert into == bytes(SIZE)
    assert tier.num_corrupt == 1
    assert tier.find(info.id) is None
    await until(lambda: tier.used_bytes == 0)
    check(tier, server, [])
    assert await tier.put(info, data) == []
    assert await read(tier, info) == data


def damages(info: BlockInfo, data: memoryview, good: bytes, rng: random.Random) -> Iterator[tuple[str, bytes]]:
    for at in (0, 8, 12, 20, PAGE_BYTES - 1, PAGE_BYTES, len(good) - 1):
        yield f"a bit at {at}", good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    yield "a byte less", good[:-1]
    yield "a byte more", good + b"\0"
    yield "nothing", b""
    yield "zeros at the end", good[:-KIB] + bytes(KIB)
    yield "leaves swapped", good[:PAGE_BYTES] + good[PAGE_BYTES + 16 * KIB :] + good[PAGE_BYTES : PAGE_BYTES + 16 * KIB]
    other, payload = make_block(rng, SIZE)
    yield "another block", objects.encode_header(other) + payload
    yield "another's header", objects.encode_header(other) + data
    renamed = msgspec.structs.replace(info, encoding="zstd")
    yield "another encoding", objects.encode_header(renamed) + data


async def test_whatever_is_wrong_with_an_object_is_corrupt(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    key = tier.key(info)
    await tier.put(info, data)
    for number, (what, damaged) in enumerate(damages(info, data, server.objects[key][0], rng), 1):
        server.objects[key] = (damaged, 0.0)
        into = bytearray(SIZE)
        with pytest.raises(Corrupt):
            await tier.get(info.id, memoryview(into))
        assert into == bytes(SIZE), what
        assert tier.num_corrupt == number, what
        await until(lambda: not server.objects)
        await tier.put(info, data)
    check(tier, server, [info])


async def test_what_someone_deleted_is_missing(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng, SIZE)
    await tier.put(info, data)
    server.objects.clear()
    with pytest.raises(Missing):
        await tier.get(info.id, memoryview(bytearray(SIZE)))
    assert tier.find(info.id) is None
    check(tier, server, [])
    assert tier.healthy
