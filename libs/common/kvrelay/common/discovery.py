"""Who serves: pods register in Redis under leases, routers keep the set of those whose lease lives.

    kvrelay:{cluster}:pods         set of pod ids
    kvrelay:{cluster}:pod:{id}     a `PodRecord` as JSON, with a time to live: the lease
    kvrelay:{cluster}:mark         random; when it is gone or another, Redis has lost its memory
    kvrelay:{cluster}:changes      channel: `up ID EPOCH` and `gone ID EPOCH`

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
from typing import Final, Literal

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


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod says of itself; fixed for an epoch."""

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

    @property
    def pods(self) -> str:
        return f"kvrelay:{self.cluster}:pods"

    @property
    def mark(self) -> str:
        return f"kvrelay:{self.cluster}:mark"

    @property
    def changes(self) -> str:
        return f"kvrelay:{self.cluster}:changes"

    def pod(self, pod_id: str) -> str:
        return f"kvrelay:{self.cluster}:pod:{pod_id}"


def connect(url: str) -> "aioredis.Redis":
    """Connects at the first command. Each command is bounded by COMMAND_SECONDS and not repeated: the loops here do that."""
    client: aioredis.Redis = aioredis.Redis.from_url(
        url,
        socket_timeout=COMMAND_SECONDS,
        socket_connect_timeout=COMMAND_SECONDS,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return client


class Registration:
    """A pod's lease, kept by a task of its own: `start` returns at once, whether or not Redis is there."""

    def __init__(self, url: str, cluster: str, record: PodRecord, retry: RetryPolicy = RetryPolicy()) -> None:
        self._redis = connect(url)
        self._keys = Keys(cluster)
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
            pipe.sadd(self._keys.pods, record.pod_id)
            pipe.set(self._keys.pod(record.pod_id), self._payload, px=int(LEASE_SECONDS * 1000), get=True)
            _, before = await pipe.execute()
        if before != self._payload:
            if before is not None:
                log.warning("pod id %s was another pod's, or another life's of this one", record.pod_id)
            await self._redis.publish(self._keys.changes, f"up {record.pod_id} {record.epoch}")

    async def _forget(self) -> None:
        record = self._record
        keys = (self._keys.pod(record.pod_id), self._keys.pods)
        await self._redis.eval(_FORGET, 2, *keys, self._payload, record.pod_id)
        await self._redis.publish(self._keys.changes, f"gone {record.pod_id} {record.epoch}")


class PodDirectory:
    """The pods of a cluster as a router knows them. Readers see a consistent set without waiting.

    A change is seen at once by its announcement, or by the next poll. A pod whose lease ended is forgotten, unless Redis was
    away or lost its memory less than a lease's time ago.
    """

    def __init__(self, url: str, cluster: str, retry: RetryPolicy = RetryPolicy()) -> None:
        self._redis = connect(url)
        self._keys = Keys(cluster)
        self._retry = retry
        self._pods: dict[PodId, PodRecord] = {}
        self._mark: bytes | None = None
        self._trust_from = 0.0
        """Monotonic time from which a missing lease means a missing pod."""
        self._gone: set[tuple[str, str]] = set()
        """Pod id and epoch of those that left while a poll was under way, which may have seen them yet."""
        self._news = asyncio.Event()
        self._next = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.healthy = False
        """The last poll was answered."""

    def pods(self) -> dict[PodId, PodRecord]:
        """A snapshot; the caller's own."""
        return dict(self._pods)

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

    async def changed(self) -> dict[PodId, PodRecord]:
        """Waits for the next change of the set."""
        await self._next.wait()
        return self.pods()

    async def updates(self) -> AsyncIterator[dict[PodId, PodRecord]]:
        """The set now, and again after each change; a slow reader misses what lay between."""
        while True:
            following = self._next
            yield self.pods()
            await following.wait()

    async def _poll_always(self) -> None:
        failures = 0
        while True:
            try:
                await self._poll()
            except (RedisError, OSError) as error:
                failures += 1
                if failures == 1:
                    log.warning("Redis is away, keeping %d pods: %s", len(self._pods), error)
                self.healthy = False
                self._distrust()
                await asyncio.sleep(self._retry.delay(failures))
                continue
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
            pipe.scard(self._keys.pods)
            _, mark, count = await pipe.execute()
        if count > MAX_PODS:
            raise RedisError(f"{count} pods are registered, over the limit of {MAX_PODS}")
        records = await self._read()
        if mark != self._mark:
            self._mark = mark
            self._distrust()
        self.healthy = True
        if time.monotonic() < self._trust_from:
            records = self._pods | records
        self._adopt({key: record for key, record in records.items() if (key, record.epoch) not in self._gone})

    def _distrust(self) -> None:
        """Leases may be missing for Redis's sake: pods get the time of one lease to register again."""
        self._trust_from = time.monotonic() + LEASE_SECONDS

    async def _read(self) -> dict[PodId, PodRecord]:
        ids = sorted(_text(member) for member in await self._redis.smembers(self._keys.pods))
        async with self._redis.pipeline(transaction=False) as pipe:
            for pod_id in ids:
                pipe.getrange(self._keys.pod(pod_id), 0, MAX_RECORD_BYTES)
            values = await pipe.execute()
        records: dict[PodId, PodRecord] = {}
        lapsed: list[str] = []
        for pod_id, value in zip(ids, values, strict=True):
            if not value:
                lapsed.append(pod_id)
                continue
            record = _decoded(pod_id, value)
            if record is not None:
                records[record.pod_id] = record
        if lapsed:  # a pod that is late adds itself again with its next renewal
            await self._redis.srem(self._keys.pods, *lapsed)
        return records

    def _adopt(self, records: dict[PodId, PodRecord]) -> None:
        if records == self._pods:
            return
        for pod_id in records.keys() - self._pods.keys():
            log.info("pod %s is up at %s", pod_id, records[pod_id].grpc_address)
        for pod_id in self._pods.keys() - records.keys():
            log.info("pod %s is gone", pod_id)
        self._pods = records
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
            case ["gone", pod_id, epoch]:
                record = self._pods.get(PodId(pod_id))
                if record is not None and record.epoch == epoch:
                    self._gone.add((pod_id, epoch))
                    self._adopt({key: value for key, value in self._pods.items() if key != pod_id})
            case ["up", *_]:
                pass
            case _:
                log.warning("not understood on the channel of changes: %r", data[:200])
        self._news.set()


def _text(member: bytes | str) -> str:
    return member.decode("utf-8", "replace") if isinstance(member, bytes) else member


def _decoded(pod_id: str, value: bytes) -> PodRecord | None:
    try:
        record = msgspec.json.decode(value, type=PodRecord)
    except (msgspec.DecodeError, ValueError) as error:
        log.warning("the record of pod %s cannot be read: %s", pod_id, error)
        return None
    return record if record.pod_id == pod_id else None
