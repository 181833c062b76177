"""The S3 tier: against a server that fails on demand, whose every request is seen, and against a real one."""

import asyncio
import contextlib
import dataclasses
import enum
import random
import signal
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import msgspec
import obstore
import pytest

from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore.block import BlockInfo, checksum
from kvrelay.kvstore.policy import Lru, make_policy
from kvrelay.kvstore.tiers import objects
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES
from kvrelay.kvstore.tiers.objects import ObjectTier, S3Access, block_key, object_bytes, parse_key

if TYPE_CHECKING:  # pytest is to import it first, to rewrite its assertions
    from tests.fixtures_s3 import S3Server


unit = pytest.mark.unit
integration = pytest.mark.integration

Open = Callable[..., Awaitable[ObjectTier]]
KIB = 1 << 10
MIB = 1 << 20
SIZE = 64 * KIB
OBJECT = PAGE_BYTES + SIZE


class Fault(enum.Enum):
    ERROR = (500, "InternalError")
    SLOW_DOWN = (503, "SlowDown")
    DENIED = (403, "AccessDenied")
    BAD = (400, "InvalidRequest")
    GONE = (404, "NoSuchThing")
    RESET = "closes the connection instead of an answer"
    HANG = "does nothing and does not answer"
    LOST = "does it and does not answer"
    LATE = "does it when told to, and does not answer"
    TRUNCATED = "ends before the length it has announced"
    FLIPPED = "one bit of the answer's body is wrong"


@dataclasses.dataclass
class Request:
    method: str
    key: str
    query: dict[str, list[str]]
    body: bytes


class FaultyS3:
    """One bucket in memory, as much of S3 as the tier asks for, and one fault a request where some are due."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.requests: list[tuple[str, str]] = []
        self.page_keys = 1000
        self.most_bytes = 0
        self.most_at_once = 0
        self.late = asyncio.Event()
        self._faults: dict[str, deque[Fault | None]] = {}
        self._always: dict[str, Fault] = {}
        self._at_once = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(self, fault: Fault, times: int = 1, method: str = "") -> None:
        """The next requests, of one method or of any."""
        self._faults.setdefault(method, deque()).extend([fault] * times)

    def script(self, method: str, faults: Iterable[Fault | None]) -> None:
        """What comes of the next requests of a method, one each."""
        self._faults.setdefault(method, deque()).extend(faults)

    def always(self, fault: Fault | None, method: str = "") -> None:
        self._always.pop(method, None)
        if fault is not None:
            self._always[method] = fault

    def count(self, method: str = "") -> int:
        return sum(method in ("", name) for name, _ in self.requests)

    @property
    def stored_bytes(self) -> int:
        return sum(len(data) for data, _ in self.objects.values())

    def _due(self, method: str) -> Fault | None:
        for name in (method, ""):
            if self._faults.get(name):
                return self._faults[name].popleft()
        return self._always.get(method, self._always.get(""))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._answer(await self._receive(reader), reader, writer):
                    pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _receive(self, reader: asyncio.StreamReader) -> Request:
        start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = start.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        url = urlsplit(target)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        assert bucket == "bucket", f"{bucket} is asked for"
        return Request("LIST" if method == "GET" and not key else method, key, parse_qs(url.query), body)

    async def _answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        self.requests.append((request.method, request.key))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            fault = self._due(request.method)
            if fault in (Fault.HANG, Fault.LOST, Fault.LATE):
                if fault is Fault.LOST:
                    self._do(request)
                await reader.read(1)
                if fault is Fault.LATE:
                    await self.late.wait()
                    self._do(request)
                return False
            if fault is Fault.RESET:
                return False
            status, body = (
                self._error(*fault.value) if isinstance(getattr(fault, "value", ""), tuple) else self._do(request)
            )
            await asyncio.sleep(0)
        finally:
            self._at_once -= 1
        if fault is Fault.FLIPPED:
            body = body[:-100] + bytes([body[-100] ^ 4]) + body[-99:]
        lines = (
            f"HTTP/1.1 {status} X",
            f"Content-Length: {len(body)}",
            'ETag: "1"',
            f"Last-Modified: {formatdate(usegmt=True)}",
        )
        writer.write(
            "\r\n".join((*lines, "", "")).encode() + (body[: len(body) // 2] if fault is Fault.TRUNCATED else body)
        )
        await writer.drain()
        if fault is Fault.TRUNCATED:
            writer.close()
            await writer.wait_closed()
            return False
        return True

    def _error(self, status: int, code: str) -> tuple[int, bytes]:
        return status, f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()

    def _do(self, request: Request) -> tuple[int, bytes]:
        if request.method == "LIST":
            return 200, self._list(request.query).encode()
        if request.method == "PUT":
            self.objects[request.key] = (request.body, time.time())
            self.most_bytes = max(self.most_bytes, self.stored_bytes)
            return 200, b""
        if request.method == "DELETE":
            self.objects.pop(request.key, None)
            return 204, b""
        if request.key not in self.objects:
            return self._error(404, "NoSuchKey")
        return 200, self.objects[request.key][0]

    def _list(self, query: dict[str, list[str]]) -> str:
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = sorted(key for key in self.objects if key.startswith(query["prefix"][0]) and key > after)
        page, more = keys[: self.page_keys], len(keys) > self.page_keys
        contents = ""
        for key in page:
            data, written = self.objects[key]
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(written)) + f".{int(written % 1 * 1000):03d}Z"
            contents += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><LastModified>{stamp}</LastModified>"
                '<ETag>"1"</ETag></Contents>'
            )
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"


class ManualTime:
    """Passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, future))
        await future

    def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [future for when, future in self._sleepers if when <= self.now]
        self._sleepers = [(when, future) for when, future in self._sleepers if when > self.now]
        for future in due:
            if not future.done():
                future.set_result(None)

    def sleeping(self) -> int:
        return sum(not future.done() for _, future in self._sleepers)


def make_block(rng: random.Random, size: int = SIZE, **fields: Any) -> tuple[BlockInfo, memoryview]:
    payload = memoryview(rng.randbytes(size))
    block_id = BlockId(rng.randbytes(16))
    given: dict[str, Any] = {"head": block_id, "fingerprint": Fingerprint("f" * 64), "shape": "5d0c"} | fields
    info = BlockInfo(id=block_id, dtype=KvDtype.BFLOAT16, size=size, **given)
    return msgspec.structs.replace(info, checksum=checksum(info, payload)), payload


def make_blocks(rng: random.Random, count: int, size: int = SIZE) -> list[tuple[BlockInfo, memoryview]]:
    return [make_block(rng, size) for _ in range(count)]


async def read(tier: ObjectTier, info: BlockInfo) -> bytes:
    into = bytearray(b"\xa5" * (info.size + 8))
    assert await tier.get(info.id, memoryview(into)) == info
    assert into[info.size :] == b"\xa5" * 8
    return bytes(into[: info.size])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """And some for a busy machine."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds + 1


async def fails(call: Awaitable[object], *words: str) -> TierFailed:
    with pytest.raises(TierFailed) as caught:
        await call
    assert all(word in caught.value.message for word in words), caught.value.message
    return caught.value


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture
def manual() -> ManualTime:
    return ManualTime()


@pytest.fixture
async def server() -> AsyncIterator[FaultyS3]:
    server = FaultyS3()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def closing() -> AsyncIterator[Callable[[ObjectTier], ObjectTier]]:
    """Closes tiers in the end."""
    tiers: list[ObjectTier] = []

    def keep(tier: ObjectTier) -> ObjectTier:
        tiers.append(tier)
        return tier

    yield keep
    for tier in tiers:
        await tier.close()


@pytest.fixture
def make(server: FaultyS3, closing: Callable[[ObjectTier], ObjectTier]) -> Open:
    async def make_tier(limit_bytes: int = 64 * MIB, *, opened: bool = True, **options: Any) -> ObjectTier:
        access = S3Access(endpoint=server.endpoint, region="us-east-1", access_key_id="who", secret_access_key="hidden")
        given = {"policy": Lru(), "access": access, "prefix": "node-1", "backoff_s": 0.001} | options
        tier = closing(ObjectTier("s3://bucket/kv", limit_bytes, **given))
        if opened:
            before = server.count()
            await tier.open()
            del server.requests[before:]
        return tier

    return make_tier


def check(tier: ObjectTier, server: FaultyS3, infos: list[BlockInfo]) -> None:
    """These blocks and nothing else are in the store, found and counted."""
    assert {key: len(data) for key, (data, _) in server.objects.items()} == {
        tier.key(info): object_bytes(info) for info in infos
    }
    assert tier.used_bytes == server.stored_bytes <= tier.limit_bytes
    assert all(tier.find(info.id) == info for info in infos)


# Keys and objects


@unit
def test_a_key_says_all_of_a_block(rng: random.Random) -> None:
    info, _ = make_block(rng, head=BlockId(rng.randbytes(16)), encoding="fp8", shape="5/é\0")
    key = block_key("kv/node-1", info)
    assert key.startswith(f"kv/node-1/{info.id.hex()[:2]}/{info.id.hex()}.")
    assert parse_key("kv/node-1", key) == info
    assert len(msgspec.structs.astuple(info)) == 8, "a new field of BlockInfo needs another KEY_VERSION"
    assert all(character.isalnum() or character in "/._-" for character in key)


@unit
def test_a_long_key_is_of_short_names(rng: random.Random) -> None:
    info, _ = make_block(rng, shape="s" * 400)
    key = block_key("kv", info)
    assert max(map(len, key.split("/"))) <= 240
    assert parse_key("kv", key) == info


@unit
def test_what_is_not_a_block_is_no_key(rng: random.Random) -> None:
    info, _ = make_block(rng)
    key = block_key("kv", info)
    for other in (
        "",
        "kv",
        "kv/",
        "kv/ab/notes.txt",
        key[:-1],
        key + "A",
        key + "/",
        key.replace(".1", ".2"),
        "x" + key,
        key[:-3] + "///",
    ):
        assert parse_key("kv", other) is None, other
    folder = info.id.hex()[:2]
    assert parse_key("kv", key.replace(f"/{folder}/", "/zz/")) is None


@unit
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


@unit
def test_access_hides_secrets_and_wants_both_keys() -> None:
    assert "hidden" not in repr(S3Access(access_key_id="who", secret_access_key="hidden", session_token="hidden"))
    with pytest.raises(ValueError, match="together"):
        S3Access(access_key_id="who")
    with pytest.raises(ValueError, match="endpoint"):
        S3Access(endpoint="localhost:9000")


# Calls that succeed


@unit
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


@unit
async def test_buffers_of_wrong_sizes_are_refused(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
    with pytest.raises(ValueError):
        await tier.put(info, data[1:])
    await tier.put(info, data)
    with pytest.raises(ValueError):
        await tier.get(info.id, memoryview(bytearray(SIZE - 1)))
    assert server.count() == 1


@unit
async def test_puts_of_one_block_are_one(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
    await asyncio.gather(*(tier.put(info, data) for _ in range(5)))
    assert server.count() == 1
    check(tier, server, [info])


@unit
async def test_requests_at_a_time_are_bounded(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(concurrency=3), make_blocks(rng, 20)
    await asyncio.gather(*(tier.put(info, data) for info, data in blocks))
    assert 1 < server.most_at_once <= 3
    assert await asyncio.gather(*(read(tier, info) for info, _ in blocks)) == [data for _, data in blocks]
    assert server.most_at_once <= 3


@unit
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


@unit
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


@unit
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


@unit
async def test_open_evicts_the_oldest_over_the_limit(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(), make_blocks(rng, 9)
    for age, (info, data) in enumerate(blocks):
        await tier.put(info, data)
        server.objects[tier.key(info)] = (server.objects[tier.key(info)][0], 1e9 - age)
    again = await make(opened=False, limit_bytes=4 * OBJECT + 1, concurrency=2)
    assert await again.open() == [info for info, _ in reversed(blocks[:4])]
    check(again, server, [info for info, _ in blocks[:4]])
    assert await again.put(*make_block(rng)) == [blocks[3][0]]


@unit
async def test_open_that_cannot_evict_stores_nothing(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(), make_blocks(rng, 4)
    for info, data in blocks:
        await tier.put(info, data)
    server.always(Fault.DENIED, "DELETE")
    again = await make(opened=False, limit_bytes=2 * OBJECT, time_budget_s=0.3)
    left = await again.open()
    assert len(left) == 2
    assert again.used_bytes == 4 * OBJECT
    await fails(again.put(*make_block(rng)))
    assert server.count("PUT") == 4


@unit
async def test_open_leaves_what_is_not_its_own(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
    await tier.put(info, data)
    server.objects["kv/node-1/README"] = (b"of another", 0.0)
    short, _ = make_block(rng)
    server.objects[tier.key(short)] = (bytes(100), 0.0)
    again = await make(opened=False)
    assert await again.open() == [info]
    await until(lambda: again.used_bytes == OBJECT)
    assert set(server.objects) == {tier.key(info), "kv/node-1/README"}
    assert again.num_corrupt == 1
    await fails(again.open(), "opened before")


@unit
async def test_a_block_takes_the_place_of_its_remains(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data), (longer, payload) = await make(opened=False), make_block(rng), make_block(rng)
    server.objects[tier.key(info)] = (bytes(100), 0.0)
    server.objects[tier.key(longer)] = (bytes(OBJECT + 100), 0.0)
    server.always(Fault.ERROR, "DELETE")
    assert await tier.open() == []
    await until(lambda: server.count("DELETE") == 8)
    await asyncio.gather(tier.put(info, data), tier.put(longer, payload))
    check(tier, server, [info, longer])


@unit
async def test_of_two_objects_of_a_block_the_later_stays(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(opened=False), make_block(rng)
    newer = msgspec.structs.replace(info, dtype=KvDtype.FLOAT16)
    newer = msgspec.structs.replace(newer, checksum=checksum(newer, data))
    for written, stored in ((2e9, newer), (1e9, info)):
        server.objects[tier.key(stored)] = (objects.encode_header(stored) + data, written)
    assert await tier.open() == [newer]
    await until(lambda: tier.used_bytes == OBJECT)
    check(tier, server, [newer])
    assert await read(tier, newer) == data


@unit
async def test_nothing_is_stored_before_it_is_open(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(opened=False), make_block(rng)
    await fails(tier.put(info, data), "not open")
    with pytest.raises(Missing):
        await tier.get(info.id, memoryview(bytearray(SIZE)))
    await tier.remove(info.id)
    assert server.count() == 0


# Reading another node's blocks


@unit
async def test_blocks_of_another_node_are_read_by_their_key(make: Open, server: FaultyS3, rng: random.Random) -> None:
    mine, other, (info, data) = await make(), await make(prefix="node-2"), make_block(rng)
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


@unit
async def test_flipped_bit_is_corrupt_and_deleted(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
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
    other, payload = make_block(rng)
    yield "another block", objects.encode_header(other) + payload
    yield "another's header", objects.encode_header(other) + data
    renamed = msgspec.structs.replace(info, encoding="fp8")
    yield "another encoding", objects.encode_header(renamed) + data


@unit
async def test_whatever_is_wrong_with_an_object_is_corrupt(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
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


@unit
async def test_what_someone_deleted_is_missing(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
    await tier.put(info, data)
    server.objects.clear()
    with pytest.raises(Missing):
        await tier.get(info.id, memoryview(bytearray(SIZE)))
    assert tier.find(info.id) is None
    check(tier, server, [])
    assert tier.healthy


# Faults that pass, and that stay


@unit
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SLOW_DOWN, Fault.RESET, Fault.TRUNCATED])
async def test_a_fault_that_passes_is_not_seen(make: Open, server: FaultyS3, rng: random.Random, fault: Fault) -> None:
    tier, (info, data) = await make(), make_block(rng)
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


@unit
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
    tier, (info, data) = await make(attempts=3, failures_to_open=5), make_block(rng)
    await tier.put(info, data)
    server.always(fault)
    into = bytearray(SIZE)
    await fails(tier.get(info.id, memoryview(into)), reason, "attempt 3 of 3")
    assert server.count("GET") == 3
    assert into == bytes(SIZE)
    assert tier.num_corrupt == 0
    server.always(None)
    assert await read(tier, info) == data


@unit
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


@unit
async def test_a_put_that_finds_no_place_has_failed(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier = await make()
    server.fail(Fault.GONE)
    await fails(tier.put(*make_block(rng)), "404 NoSuchThing", "attempt 1")
    check(tier, server, [])


@unit
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


@unit
async def test_a_hang_that_passes_is_not_seen(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(time_budget_s=2.0), make_block(rng)
    server.fail(Fault.HANG)
    async with within(2.0):
        await tier.put(info, data)
    assert server.count() == 2
    check(tier, server, [info])


@unit
async def test_pauses_stay_within_the_budget(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier = await make(time_budget_s=0.5, attempts=50, backoff_s=0.05)
    server.always(Fault.SLOW_DOWN)
    async with within(0.5):
        await fails(tier.put(*make_block(rng)), "SlowDown")
    assert 2 <= server.count() <= 6


@unit
async def test_waiting_for_a_turn_is_within_the_budget(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(time_budget_s=0.4, concurrency=1, attempts=1, failures_to_open=9), make_blocks(rng, 3)
    server.always(Fault.HANG)
    async with within(0.4):
        errors = await asyncio.gather(*(tier.put(info, data) for info, data in blocks), return_exceptions=True)
    assert all(isinstance(error, TierFailed) for error in errors)
    assert server.count() <= 2


# The breaker


@unit
async def test_breaker_opens_and_a_probe_closes_it(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"attempts": 1, "failures_to_open": 3, "pause_s": 2.0, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(**options), make_block(rng)
    await tier.put(info, data)
    server.always(Fault.ERROR)
    for number in range(3):
        assert tier.healthy, number
        await fails(read(tier, info), "500 InternalError")
    assert (tier.healthy, tier.failed_until) == (False, 1002.0)
    assert "500 InternalError" in tier.failure
    before = server.count()
    for call in (read(tier, info), tier.put(*make_block(rng))):
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


@unit
async def test_only_failures_in_a_row_open_it(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(attempts=1, failures_to_open=3), make_block(rng)
    await tier.put(info, data)
    for _ in range(3):
        server.fail(Fault.ERROR, 2)
        for _ in range(2):
            await fails(read(tier, info))
        assert await read(tier, info) == data
    assert tier.healthy


@unit
async def test_it_opens_again(make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime) -> None:
    tier, (info, data) = (
        await make(attempts=1, failures_to_open=1, clock=manual.clock, sleep=manual.sleep),
        make_block(rng),
    )
    await tier.put(info, data)
    for _ in range(3):
        server.fail(Fault.RESET)
        await fails(read(tier, info))
        await until(lambda: manual.sleeping() == 1)
        manual.advance(2.0)
        await until(lambda: tier.healthy)
        assert await read(tier, info) == data


# Limit, eviction, cancellation


@unit
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


@unit
async def test_the_least_recently_used_goes(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(limit_bytes=3 * OBJECT), make_blocks(rng, 4)
    for info, data in blocks[:3]:
        await tier.put(info, data)
    await read(tier, blocks[0][0])
    assert await tier.put(*blocks[3]) == [blocks[1][0]]
    check(tier, server, [info for info, _ in (blocks[0], *blocks[2:])])


@unit
async def test_a_block_larger_than_the_tier_is_refused(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, blocks = await make(limit_bytes=2 * OBJECT), make_blocks(rng, 2)
    for info, data in blocks:
        await tier.put(info, data)
    for _ in range(5):
        await fails(tier.put(*make_block(rng, 2 * OBJECT - PAGE_BYTES + 1)), "larger than the tier")
    assert tier.healthy
    check(tier, server, [info for info, _ in blocks])


@unit
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


@unit
async def test_remove_that_fails_is_done_later(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    tier, (info, data) = await make(attempts=1, clock=manual.clock, sleep=manual.sleep), make_block(rng)
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


@unit
async def test_remove_waits_for_a_put(make: Open, server: FaultyS3, rng: random.Random) -> None:
    tier, (info, data) = await make(), make_block(rng)
    put = asyncio.create_task(tier.put(info, data))
    await until(lambda: server.count("PUT") == 1)
    await tier.remove(info.id)
    assert await put == []
    assert tier.find(info.id) is None
    check(tier, server, [])


@unit
async def test_a_put_that_is_cancelled_leaves_nothing(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"time_budget_s": 3.0, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(limit_bytes=OBJECT, **options), make_block(rng)
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
    other, payload = make_block(rng)
    await tier.put(other, payload)
    check(tier, server, [other])


@unit
async def test_a_put_whose_answer_was_lost_leaves_nothing(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"time_budget_s": 0.3, "attempts": 1, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(**options), make_block(rng)
    server.fail(Fault.LOST)
    await fails(tier.put(info, data), "no answer")
    assert tier.find(info.id) is None
    assert tier.used_bytes == OBJECT == server.stored_bytes
    await until(lambda: manual.sleeping() == 1)
    manual.advance(0.3)
    await until(lambda: tier.used_bytes == 0)
    check(tier, server, [])


@unit
async def test_a_put_after_one_that_failed_takes_its_place(
    make: Open, server: FaultyS3, rng: random.Random, manual: ManualTime
) -> None:
    options = {"time_budget_s": 0.3, "attempts": 1, "clock": manual.clock, "sleep": manual.sleep}
    tier, (info, data) = await make(limit_bytes=OBJECT, **options), make_block(rng)
    server.fail(Fault.LOST)
    await fails(tier.put(info, data), "no answer")
    assert await tier.put(info, data) == []
    manual.advance(9.0)
    assert await read(tier, info) == data
    assert server.count("DELETE") == 0
    check(tier, server, [info])


@unit
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


@unit
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


@unit
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


@integration
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


@integration
async def test_real_multipart(real: Open, rng: random.Random) -> None:
    tier, (info, data) = await real(multipart_bytes=5 * MIB), make_block(rng, 12 * MIB)
    await tier.put(info, data)
    assert await read(tier, info) == data
    assert tier.used_bytes == await listed_bytes(tier)


@integration
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


@integration
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


@integration
@pytest.mark.parametrize(
    ("keys", "code"),
    [({"access_key_id": "nobody"}, "InvalidAccessKeyId"), ({"secret_access_key": "wrong"}, "SignatureDoesNotMatch")],
)
async def test_real_wrong_credentials(real: Open, rng: random.Random, keys: dict[str, str], code: str) -> None:
    tier, (info, _) = await real(keys=keys, opened=False), make_block(rng)
    for call in (tier.open(), tier.get_at(tier.key(info), info, memoryview(bytearray(SIZE)))):
        await fails(call, "credentials are refused", code, "attempt 1")
    assert tier.num_retries == 0
    assert tier.used_bytes == 0


@integration
async def test_real_missing_bucket(real: Open, rng: random.Random) -> None:
    tier, (info, _) = await real(url="s3://nobodys-bucket/kv", opened=False), make_block(rng)
    for call in (tier.open(), tier.get_at(tier.key(info), info, memoryview(bytearray(SIZE)))):
        await fails(call, "there is no bucket 'nobodys-bucket'", "attempt 1")
    assert tier.used_bytes == 0


@integration
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


@integration
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
