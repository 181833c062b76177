"""Who serves: pods, and KV stores, register in Redis under leases; others keep the set of those whose lease lives.

    kvrelay:{cluster}:pods             set of pod ids
    kvrelay:{cluster}:pod:{id}         a `PodRecord` as JSON, with a time to live: the lease
    kvrelay:{cluster}:changes          channel: `up ID EPOCH` and `gone ID EPOCH`
    kvrelay:{cluster}:mark             random; when it is gone or another, Redis has lost its memory

Of KV stores (`nodes.NodeRecord`) the same under `nodes`, `node:{id}` and `node-changes`.

Redis may be away, come back empty or hang at any time: pods register again, with the epoch that they had, and routers keep the
pods that they knew until those had the time to do so.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator
from typing import ClassVar, Final, Generic, Literal, Protocol, TypeVar, cast

import msgspec
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvrelay.common.ids import Epoch, Fingerprint, PodId
from kvrelay.common.layout import KvLayout
from kvrelay.common.tasks import end_task

log = logging.getLogger(__name__)

LEASE_SECONDS: Final = 3.0
RENEW_SECONDS: Final = 1.0
POLL_SECONDS: Final = 1.0
COMMAND_SECONDS: Final = 1.0
"""Within which Redis answers, or counts as away."""
LISTEN_SECONDS: Final = 30.0
MAX_PODS: Final = 10_000
MAX_RECORD_BYTES: Final = 64 << 10

PodRole = Literal["prefill", "decode", "both"]

_FORGET: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
  return 1
end
return 0
"""


class Member(Protocol):
    """What a process says of itself; fixed for an epoch. A msgspec struct."""

    KIND: ClassVar[str]

    @property
    def id(self) -> str: ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def grpc_address(self) -> str: ...


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """See `Member`."""

    KIND: ClassVar[str] = "pod"

    pod_id: PodId
    epoch: Epoch
    role: PodRole
    model: str
    fingerprint: Fingerprint
    grpc_address: str
    http_address: str
    layout: KvLayout
    max_model_len: int
    num_blocks: int
    transport: str
    version: str
    tokenizer: str = ""
    """SHA-256 of its tokenizer.json; empty where its checkpoint holds its own."""

    @property
    def id(self) -> PodId:
        return self.pod_id


Id = TypeVar("Id", bound=str)
Record = TypeVar("Record", bound=Member)


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait after the n-th failure in a row: exponential, capped, with jitter downwards."""

    initial_seconds: float = 0.1
    multiplier: float = 2.0
    maximum_seconds: float = 1.0
    jitter: float = 0.2

    def delay(self, failures: int) -> float:
        """Seconds; `failures` counts from 1."""
        longest = min(self.maximum_seconds, self.initial_seconds * self.multiplier ** min(failures - 1, 32))
        return longest * (1.0 - self.jitter * random.random())


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    cluster: str
    kind: str

    @property
    def members(self) -> str:
        return f"kvrelay:{self.cluster}:{self.kind}s"

    @property
    def mark(self) -> str:
        return f"kvrelay:{self.cluster}:mark"

    @property
    def changes(self) -> str:
        return f"kvrelay:{self.cluster}:" + ("changes" if self.kind == PodRecord.KIND else f"{self.kind}-changes")

    def member(self, member_id: str) -> str:
        return f"kvrelay:{self.cluster}:{self.kind}:{member_id}"


def connect(url: str, connection_class: type[aioredis.Connection] = aioredis.Connection) -> "aioredis.Redis":
    """Connects at the first command. Each command is bounded by COMMAND_SECONDS and not repeated: the loops here do that.

    `connection_class` is not for a URL with TLS, which has its own.
    """
    client: aioredis.Redis = aioredis.Redis.from_url(
        url,
        connection_class=connection_class,
        socket_timeout=COMMAND_SECONDS,
        socket_connect_timeout=COMMAND_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return client


class Registration:
    """A process's lease, kept by a task of its own: `start` returns at once, whether or not Redis is there."""

    def __init__(self, url: str, cluster: str, record: Member, retry: RetryPolicy = RetryPolicy()) -> None:
        self._redis = connect(url)
        self._keys = Keys(cluster, record.KIND)
        self._record = record
        self._payload = msgspec.json.encode(record)
        self._retry = retry
        self._task: asyncio.Task[None] | None = None
        self.registered = asyncio.Event()
        """Set while the last renewal succeeded."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name="registration")

    async def stop(self) -> None:
        """Gives the lease back and says so. Bounded by a few COMMAND_SECONDS; never raises for Redis."""
        if self._task is not None:
            await end_task(self._task)
            self._task = None
            try:
                await self._forget()
            except (RedisError, OSError) as error:
                log.warning("could not give the lease back, it will run out: %s", error)
        self.registered.clear()
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _keep(self) -> None:
        failures = 0
        while True:
            try:
                await self._renew()
            except (RedisError, OSError) as error:
                failures += 1
                self.registered.clear()
                if failures == 1:
                    log.warning("cannot renew the lease, trying on: %s", error)
                await asyncio.sleep(self._retry.delay(failures))
                continue
            if failures:
                log.info("the lease is renewed again")
            failures = 0
            self.registered.set()
            await asyncio.sleep(RENEW_SECONDS)

    async def _renew(self) -> None:
        record = self._record
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.sadd(self._keys.members, record.id)
            pipe.set(self._keys.member(record.id), self._payload, px=int(LEASE_SECONDS * 1000), get=True)
            _, before = await pipe.execute()
        if before != self._payload:
            if before is not None:
                log.warning("%s id %s was another's, or another life's of this one", record.KIND, record.id)
            await self._redis.publish(self._keys.changes, f"up {record.id} {record.epoch}")

    async def _forget(self) -> None:
        record = self._record
        keys = (self._keys.member(record.id), self._keys.members)
        await self._redis.eval(_FORGET, 2, *keys, self._payload, record.id)
        await self._redis.publish(self._keys.changes, f"gone {record.id} {record.epoch}")


class Directory(Generic[Id, Record]):
    """The members of one kind as another process knows them. Readers see a consistent set without waiting.

    A change is seen at once by its announcement, or by the next poll. A member whose lease ended is forgotten, unless Redis was
    away or lost its memory less than a lease's time ago.
    """

    def __init__(self, url: str, cluster: str, kind: type[Record], retry: RetryPolicy = RetryPolicy()) -> None:
        self._redis = connect(url)
        self._keys = Keys(cluster, kind.KIND)
        self._kind = kind
        self._retry = retry
        self._members: dict[Id, Record] = {}
        self._mark: bytes | None = None
        self._trust_from = 0.0
        """Monotonic time from which a missing lease means a missing member."""
        self._gone: set[tuple[str, str]] = set()
        """Id and epoch of those that left while a poll was under way, which may have seen them yet."""
        self._news = asyncio.Event()
        self._next = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.healthy = False
        """The last poll was answered."""

    def members(self) -> dict[Id, Record]:
        """A snapshot; the caller's own."""
        return dict(self._members)

    async def start(self) -> None:
        """Returns after the first poll, answered or not."""
        with contextlib.suppress(RedisError, OSError):
            await self._poll()
        self._tasks = [
            asyncio.create_task(self._poll_always(), name="directory-poll"),
            asyncio.create_task(self._listen_always(), name="directory-listen"),
        ]

    async def stop(self) -> None:
        await asyncio.gather(*map(end_task, self._tasks))
        self._tasks = []
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def changed(self) -> dict[Id, Record]:
        """Waits for the next change of the set."""
        await self._next.wait()
        return self.members()

    async def updates(self) -> AsyncIterator[dict[Id, Record]]:
        """The set now, and again after each change; a slow reader misses what lay between."""
        while True:
            following = self._next
            yield self.members()
            await following.wait()

    async def _poll_always(self) -> None:
        failures = 0
        while True:
            try:
                await self._poll()
            except (RedisError, OSError) as error:
                failures += 1
                if failures == 1:
                    log.warning("Redis is away, keeping %d %ss: %s", len(self._members), self._keys.kind, error)
                self.healthy = False
                self._distrust()
                await asyncio.sleep(self._retry.delay(failures))
                continue
            if failures:
                log.info("Redis is back, there are %d %ss", len(self._members), self._keys.kind)
            failures = 0
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):  # wait_for may lose a cancellation in Python 3.11
                    await self._news.wait()

    async def _poll(self) -> None:
        self._gone.clear()
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._keys.mark, secrets.token_hex(8), nx=True)
            pipe.get(self._keys.mark)
            pipe.scard(self._keys.members)
            _, mark, count = await pipe.execute()
        if count > MAX_PODS:
            raise RedisError(f"{count} {self._keys.kind}s are registered, over the limit of {MAX_PODS}")
        records = await self._read()
        if mark != self._mark:
            self._mark = mark
            self._distrust()
        self.healthy = True
        if time.monotonic() < self._trust_from:
            records = self._members | records
        self._adopt({key: record for key, record in records.items() if (key, record.epoch) not in self._gone})

    def _distrust(self) -> None:
        """Leases may be missing for Redis's sake: members get the time of one lease to register again."""
        self._trust_from = time.monotonic() + LEASE_SECONDS

    async def _read(self) -> dict[Id, Record]:
        ids = sorted(_text(member) for member in await self._redis.smembers(self._keys.members))
        async with self._redis.pipeline(transaction=False) as pipe:
            for member_id in ids:
                pipe.getrange(self._keys.member(member_id), 0, MAX_RECORD_BYTES)
            values = await pipe.execute()
        records: dict[Id, Record] = {}
        lapsed: list[str] = []
        for member_id, value in zip(ids, values, strict=True):
            if not value:
                lapsed.append(member_id)
                continue
            record = _decoded(member_id, value, self._kind)
            if record is not None:
                records[cast("Id", member_id)] = record
        if lapsed:  # a member that is late adds itself again with its next renewal
            await self._redis.srem(self._keys.members, *lapsed)
        return records

    def _adopt(self, records: dict[Id, Record]) -> None:
        if records == self._members:
            return
        for member_id in records.keys() - self._members.keys():
            log.info("%s %s is up at %s", self._keys.kind, member_id, records[member_id].grpc_address)
        for member_id in self._members.keys() - records.keys():
            log.info("%s %s is gone", self._keys.kind, member_id)
        self._members = records
        self._next.set()
        self._next = asyncio.Event()

    async def _listen_always(self) -> None:
        failures = 0
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._keys.changes)
                    failures = 0
                    while True:
                        message = await channel.get_message(timeout=LISTEN_SECONDS)
                        if message is not None:
                            self._hear(message["data"])
            except (RedisError, OSError):  # the poll logs it, and finds what was missed
                failures += 1
                await asyncio.sleep(self._retry.delay(failures))

    def _hear(self, data: bytes) -> None:
        match data.decode("utf-8", "replace").split(" "):
            case ["gone", member_id, epoch]:
                record = self._members.get(cast("Id", member_id))
                if record is not None and record.epoch == epoch:
                    self._gone.add((member_id, epoch))
                    self._adopt({key: value for key, value in self._members.items() if key != member_id})
            case ["up", *_]:
                pass
            case _:
                log.warning("not understood on the channel of changes: %r", data[:200])
        self._news.set()


class PodDirectory(Directory[PodId, PodRecord]):
    """The pods of a cluster as a router knows them."""

    def __init__(self, url: str, cluster: str, retry: RetryPolicy = RetryPolicy()) -> None:
        super().__init__(url, cluster, PodRecord, retry)

    def pods(self) -> dict[PodId, PodRecord]:
        return self.members()


def _text(member: bytes | str) -> str:
    return member.decode("utf-8", "replace") if isinstance(member, bytes) else member


def _decoded(member_id: str, value: bytes, kind: type[Record]) -> Record | None:
    try:
        record = msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("the record of %s %s cannot be read: %s", kind.KIND, member_id, error)
        return None
    return record if record.id == member_id else None
