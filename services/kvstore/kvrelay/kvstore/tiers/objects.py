"""The tier of objects in an S3-compatible store. What an object and its name are: `objectkey`; how it gets there: `bucket`."""

import asyncio
import logging
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from kvrelay.common.ids import BlockId
from kvrelay.common.tasks import end_task
from kvrelay.kvstore.policy import Policy
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.kvstore.tiers.blockfile import ID_BYTES, encode_header
from kvrelay.kvstore.tiers.bucket import MAX_PAUSE_S, Breaker, Bucket, Refused, S3Access, Sleep, now, short
from kvrelay.kvstore.tiers.objectkey import block_key, object_bytes, parse_key, verify
from kvrelay.transfer.block import BlockInfo

log = logging.getLogger(__name__)

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Room:
    """Bytes below a limit, lent in order of asking."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.wanted_bytes = 0
        """Of those who wait."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def ask(self, size: int) -> "asyncio.Future[None]":
        """Done when the bytes are the caller's, who gives them back in the end, or withdraws before."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, granted))
        self.wanted_bytes += size
        self._serve()
        return granted

    def withdraw(self, size: int, granted: "asyncio.Future[None]") -> None:
        if (size, granted) not in self._waiting:
            self.give(size)
            return
        self._waiting.remove((size, granted))
        self.wanted_bytes -= size
        self._serve()

    def give(self, size: int) -> None:
        self.used_bytes -= size
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self.limit_bytes:
            size, granted = self._waiting.popleft()
            self.wanted_bytes -= size
            self.used_bytes += size
            if not granted.done():  # else it is cancelled, and withdraws
                granted.set_result(None)


class _Leaving:
    """An object that is to be deleted."""

    task: asyncio.Task[None]

    def __init__(self, num_bytes: int, settling: bool) -> None:
        self.num_bytes = num_bytes
        self.settling = settling
        """No attempt is made yet, and the bytes do not count as coming free."""
        self.attempt: asyncio.Future[TierFailed | None] = asyncio.get_running_loop().create_future()
        """The attempt that is under way or to come, or else the last with what came of it."""

    @property
    def at_rest(self) -> bool:
        return self.settling or self.attempt.done()

    async def outcome(self, deadline: float) -> None:
        """Of the attempt. Raises TierFailed."""
        attempt = self.attempt
        await asyncio.wait((attempt,), timeout=deadline - now())
        error = attempt.result() if attempt.done() else TierFailed("what is to be deleted is not deleted in time")
        if error is not None:
            raise TierFailed(error.message)


class ObjectTier:
    """Keeps what `base.Tier` says, under a prefix that is this tier's alone. A block's bytes include its object's
    header.

    Each key is in at most one of three states, and its bytes count in each: *being written*, from when it got room
    until its PUT has ended; *in the index*, of which the policy knows exactly the same; *leaving*, owned by a task that
    deletes it, again and again if need be, until the tier is closed: what is still there then is found by the next
    `open`. A PUT that failed or was cancelled may reach the store all the same, even after a DELETE: its object leaves
    too, but only `time_budget_s` later.

    A call takes `time_budget_s` at most, retries and waiting included, and then raises TierFailed; `open` takes that
    for each page. Payloads are copied and hashed on the event loop: a quarter of a millisecond for 2 MB. Multipart
    uploads that nobody finished show in no listing: a bucket should have a lifecycle rule against them.
    """

    name = "s3"

    def __init__(
        self,
        url: str,
        limit_bytes: int,
        policy: Policy,
        *,
        access: S3Access,
        prefix: str = "",
        concurrency: int = 16,
        time_budget_s: float = 5.0,
        attempts: int = 4,
        backoff_s: float = 0.05,
        multipart_bytes: int = 8 << 20,
        failures_to_open: int = 3,
        pause_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`url` is s3://bucket/path; `prefix`, as a rule the node's id, goes behind the path. `clock` and `sleep` are
        the breaker's and the deletions'. Raises ValueError."""
        parts = urlsplit(url)
        self.prefix = "/".join(filter(None, (parts.path.strip("/"), prefix.strip("/"))))
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"the store's URL must be s3://bucket or s3://bucket/path, not {url!r}")
        if not all(_SEGMENT.fullmatch(segment) for segment in self.prefix.split("/")):
            raise ValueError(
                f"the prefix {self.prefix!r} must be letters, digits, '.', '_' and '-' between its slashes"
            )
        if min(limit_bytes, concurrency, attempts, failures_to_open) < 1 or min(time_budget_s, backoff_s, pause_s) <= 0:
            raise ValueError("limits, counts and times must be positive")
        if multipart_bytes < 5 << 20:
            raise ValueError(f"the parts of an upload have at least 5 MiB, not {multipart_bytes} bytes")
        self.limit_bytes = limit_bytes
        self.time_budget_s = time_budget_s
        self.num_corrupt = 0
        self._policy = policy
        self._concurrency = concurrency
        self._multipart_bytes = multipart_bytes
        self._sleep = sleep
        self._breaker = Breaker(failures_to_open, pause_s, self._probe, clock, sleep)
        self._bucket = Bucket(
            parts.netloc,
            access,
            self._breaker,
            concurrency=concurrency,
            timeout_s=time_budget_s,
            attempts=attempts,
            backoff_s=backoff_s,
        )
        self._room = Room(limit_bytes)
        self._open = False
        self._index: dict[BlockId, BlockInfo] = {}
        self._writing: dict[BlockId, asyncio.Future[None]] = {}
        self._asking: dict[BlockId, None] = {}
        """Who waits for room, in order. While there are any, enough for them leaves, or the index is empty."""
        self._leaving: dict[str, _Leaving] = {}
        self._leaving_bytes = 0
        """Of what leaves and does not settle."""
        self._evicted: dict[BlockId, BlockInfo] = {}
        """What no put has given yet: one that fails leaves what it evicted to the next."""

    @property
    def used_bytes(self) -> int:
        return self._room.used_bytes

    @property
    def healthy(self) -> bool:
        """Whether calls go to the store at all."""
        return self._breaker.failed_until is None

    @property
    def failed_until(self) -> float | None:
        """When a store that failed is probed next, in the clock's time."""
        return self._breaker.failed_until

    @property
    def failure(self) -> str:
        """Why it is not healthy."""
        return "" if self.healthy else self._breaker.reason

    @property
    def num_retries(self) -> int:
        return self._bucket.num_retries

    def key(self, info: BlockInfo) -> str:
        """Where in the bucket this tier keeps the block: for another node's `get_at`."""
        return block_key(self.prefix, info)

    def __len__(self) -> int:
        return len(self._index)

    def ids(self) -> list[BlockId]:
        return list(self._index)

    def find(self, block_id: BlockId) -> BlockInfo | None:
        return self._index.get(block_id)

    async def open(self) -> list[BlockInfo]:
        """Before it has succeeded nothing is stored; after that it is refused. The longest ago written come first, and
        go first where there is more than the limit. What lies under the prefix and is not named as a block is left
        alone and not counted; what has another size than its name says is deleted."""
        if self._open or self._room.used_bytes:
            raise Refused("the tier has been opened before")
        found: list[tuple[float, int, BlockInfo]] = []
        strange: list[str] = []
        async for page in self._bucket.list(self.prefix, self.time_budget_s):
            for meta in page:
                if (info := parse_key(self.prefix, meta["path"])) is None:
                    strange.append(meta["path"])
                else:
                    found.append((meta["last_modified"].timestamp(), meta["size"], info))
        if strange:
            log.warning("%d objects are not blocks, such as %s", len(strange), strange[0])
        self._breaker.close()
        for number, (_, size, info) in enumerate(sorted(found, key=lambda one: one[0])):
            self._take_over(info, size)
            if number % 1000 == 999:
                await asyncio.sleep(0)
        await self._trim()
        self._evicted.clear()
        self._open = True
        return list(self._index.values())

    def _take_over(self, info: BlockInfo, size: int) -> None:
        """Of two objects of one block, of different dtypes say, the later stays."""
        num_bytes = max(size, object_bytes(info))
        self._room.used_bytes += num_bytes
        if size != object_bytes(info):
            self.num_corrupt += 1
            self._leave(info, num_bytes)
            return
        if (older := self._index.get(info.id)) is not None:
            self._forget(older)
            self._leave(older, object_bytes(older))
        self._index[info.id] = info
        self._policy.stored(info.id, num_bytes)

    async def _trim(self) -> None:
        """What cannot be deleted now counts, so that nothing is stored before it can be."""
        while self._room.used_bytes > self.limit_bytes:
            leaving = self._evict_for(BlockId(bytes(ID_BYTES)), self._concurrency) or list(self._leaving.values())
            assert leaving, "what counts is in the index or leaves"
            try:
                for one in leaving:
                    await one.outcome(now() + self.time_budget_s)
            except TierFailed as error:
                log.warning("the tier holds more than its limit: %s", error.message)
                return

    async def get(self, block_id: BlockId, into: memoryview) -> BlockInfo:
        info = self._index.get(block_id)
        if info is None:
            raise Missing(f"block {block_id.hex()} is not in the {self.name} tier")
        try:
            await self.get_at(self.key(info), info, into)
        except Missing:
            if self._forget(info):
                self._room.give(object_bytes(info))
            raise
        except Corrupt:
            if self._forget(info):
                self._leave(info, object_bytes(info))
            raise
        if self._index.get(block_id) is info:
            self._policy.used(block_id)
        return info

    async def get_at(self, key: str, info: BlockInfo, into: memoryview) -> None:
        """Reads a block of any tier of the bucket, of which this is `key(info)`. Where it is another's, it is that
        one's to count, and to delete if it is corrupt. Nothing is written to `into` before all is verified. Raises
        Missing, Corrupt, TierFailed."""
        if into.nbytes < info.size:
            raise ValueError(f"{into.nbytes} bytes are too few for a block of {info.size}")
        try:
            data = await self._bucket.get(key, object_bytes(info), now() + self.time_budget_s)
            into.cast("B")[: info.size] = verify(memoryview(data), info)
        except Corrupt as error:
            self.num_corrupt += 1
            log.warning("%s is corrupt: %s", short(key), error.message)
            raise Corrupt(f"{short(key)}: {error.message}") from None

    async def put(self, info: BlockInfo, data: memoryview) -> list[BlockInfo]:
        if data.nbytes != info.size:
            raise ValueError(f"{data.nbytes} bytes for a block of {info.size}")
        deadline = now() + self.time_budget_s
        await self._written(info.id, deadline)
        if info.id in self._index:
            return []
        if not self._open:
            raise Refused("the tier is not open: how much it holds is not known")
        self._breaker.check()
        writing = self._writing[info.id] = asyncio.get_running_loop().create_future()
        try:
            await self._write(info, data, deadline)
        finally:
            del self._writing[info.id]
            writing.set_result(None)
        evicted, self._evicted = self._evicted, {}
        if self._asking:  # when they asked, there was nothing to evict
            self._evict_for(next(iter(self._asking)))
        return list(evicted.values())

    async def _written(self, block_id: BlockId, deadline: float) -> None:
        """Waits for puts of the block that are under way."""
        while (other := self._writing.get(block_id)) is not None:
            done, _ = await asyncio.wait((other,), timeout=deadline - now())
            if not done:
                raise Refused(f"another put of block {block_id.hex()} is under way")

    async def _write(self, info: BlockInfo, data: memoryview, deadline: float) -> None:
        header, size = encode_header(info), object_bytes(info)
        revived = await self._make_room(info, deadline)
        try:
            await self._bucket.put(self.key(info), (header, data), self._multipart_bytes, deadline)
        except BaseException as error:
            if isinstance(error, Refused) and not revived:
                self._room.give(size)
            else:
                self._leave(info, size, self.time_budget_s)
            raise
        self._index[info.id] = info
        self._policy.stored(info.id, size)
        self._evicted.pop(info.id, None)

    async def _make_room(self, info: BlockInfo, deadline: float) -> bool:
        """Reserves the object's bytes; no deletion of it is under way then. Whether it may be in the store already."""
        size = object_bytes(info)
        if size > self.limit_bytes:
            raise Refused(f"a block of {size} bytes is larger than the tier, of {self.limit_bytes}")
        try:
            async with asyncio.timeout_at(deadline):
                if await self._revive(self.key(info), size):
                    return True
                granted = self._room.ask(size)
                self._asking[info.id] = None
                try:
                    for leaving in self._evict_for(info.id):
                        await leaving.outcome(deadline)
                    await granted
                except BaseException:  # cancelled as well: who waits no more must not be granted room
                    self._room.withdraw(size, granted)
                    raise
                finally:
                    del self._asking[info.id]
        except TimeoutError:
            raise Refused(f"no room for {size} bytes: what leaves for them is not deleted in time") from None
        return False

    def _evict_for(self, incoming: BlockId, at_most: int = sys.maxsize) -> list[_Leaving]:
        """Evicts until there is room for all who wait once what leaves has left."""
        evicted: list[_Leaving] = []
        while self._room.used_bytes + self._room.wanted_bytes - self._leaving_bytes > self.limit_bytes:
            victim = self._policy.victim(incoming, self._index.__contains__) if len(evicted) < at_most else None
            if victim is None:
                break
            info = self._evicted[victim] = self._index.pop(victim)
            self._policy.evicted(victim)
            evicted.append(self._leave(info, object_bytes(info)))
        return evicted

    async def remove(self, block_id: BlockId) -> None:
        """Also where it is being put: after that. It is not found any more even if the deletion fails, which is then
        tried again."""
        deadline = now() + self.time_budget_s
        await self._written(block_id, deadline)
        info = self._index.get(block_id)
        if info is not None and self._forget(info):
            await self._leave(info, object_bytes(info)).outcome(deadline)

    def _forget(self, info: BlockInfo) -> bool:
        """False where it is not in the index any more."""
        if self._index.get(info.id) is not info:
            return False
        del self._index[info.id]
        self._policy.removed(info.id)
        return True

    def _leave(self, info: BlockInfo, size: int, settle_s: float = 0.0) -> _Leaving:
        key = self.key(info)
        assert key not in self._leaving, "an object leaves once"
        leaving = self._leaving[key] = _Leaving(size, settle_s > 0)
        self._leaving_bytes += 0 if leaving.settling else size
        leaving.task = asyncio.create_task(self._delete(key, leaving, settle_s), name="s3-delete")
        return leaving

    def _left(self, key: str, leaving: _Leaving) -> None:
        del self._leaving[key]
        self._leaving_bytes -= 0 if leaving.settling else leaving.num_bytes

    async def _revive(self, key: str, size: int) -> bool:
        """Whether the object was leaving, and `size` bytes are the caller's now. An attempt to delete it ends first."""
        while (leaving := self._leaving.get(key)) is not None:
            if leaving.at_rest:
                leaving.task.cancel()
                self._left(key, leaving)
                self._room.give(leaving.num_bytes - size)
                return True
            await asyncio.wait((leaving.attempt,))
        return False

    async def _delete(self, key: str, leaving: _Leaving, settle_s: float) -> None:
        if leaving.settling:
            await self._sleep(settle_s)
            leaving.settling = False
            self._leaving_bytes += leaving.num_bytes
        pause_s = 1.0
        while not await self._deleted(key, leaving.attempt):
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            leaving.attempt = asyncio.get_running_loop().create_future()
        self._left(key, leaving)
        self._room.give(leaving.num_bytes)

    async def _deleted(self, key: str, attempt: "asyncio.Future[TierFailed | None]") -> bool:
        outcome: TierFailed | None = TierFailed(f"DELETE {short(key)}: the tier was closed")
        try:
            await self._bucket.delete(key, now() + self.time_budget_s)
            outcome = None
        except TierFailed as error:
            outcome = error
        finally:
            attempt.set_result(outcome)
        return outcome is None

    async def _probe(self) -> None:
        await self._bucket.probe(f"{self.prefix}/probe", now() + self.time_budget_s)

    async def close(self) -> None:
        """When all calls have ended."""
        self._open = False
        await self._breaker.stop()
        for leaving in list(self._leaving.values()):
            await end_task(leaving.task)
