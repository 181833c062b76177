"""An S3 server that fails on demand and whose every request is seen, tiers on it, and time by hand."""

import asyncio
import contextlib
import dataclasses
import enum
import random
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from kvrelay.kvstore.policy import Lru
from kvrelay.kvstore.tiers.base import TierFailed
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES
from kvrelay.kvstore.tiers.objects import ObjectTier, S3Access, object_bytes
from kvrelay.transfer.block import BlockInfo
from tests.kvstore.blocks import make_block

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
    key_id: str
    """Whose signature it carries; the signature itself is not looked at."""


class FaultyS3:
    """One bucket in memory, as much of S3 as the tier asks for, and one fault a request where some are due."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.requests: list[tuple[str, str]] = []
        self.page_keys = 1000
        self.most_bytes = 0
        self.most_at_once = 0
        self.late = asyncio.Event()
        self.known_key = ""
        """The one that may ask; empty: any."""
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
        key_id = headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        return Request("LIST" if method == "GET" and not key else method, key, parse_qs(url.query), body, key_id)

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
        if self.known_key not in ("", request.key_id):
            return self._error(403, "InvalidAccessKeyId")
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


@contextlib.contextmanager
def serving() -> Iterator[FaultyS3]:
    """In a thread of its own, for whom real processes ask. What a test changes, it changes between two of their requests."""
    loop, server = asyncio.new_event_loop(), FaultyS3()
    thread = threading.Thread(target=loop.run_forever, name="faulty-s3")
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


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


def make_blocks(rng: random.Random, count: int, size: int = SIZE) -> list[tuple[BlockInfo, memoryview]]:
    return [make_block(rng, size) for _ in range(count)]


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
