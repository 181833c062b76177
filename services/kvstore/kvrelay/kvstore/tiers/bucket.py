"""An S3-compatible bucket, through obstore: retries within a time budget, a breaker, and errors that say what happened."""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from kvrelay.common.tasks import end_task
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed

if TYPE_CHECKING:
    from obstore import Bytes, ListStream, ObjectMeta
    from obstore.store import ClientConfig, S3Config

log = logging.getLogger(__name__)
T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]

MAX_PAUSE_S: Final = 60.0
"""Between two probes of a store that fails, and between two attempts to delete an object."""
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_REQUEST: Final = re.compile(r"Error performing \w+ \S+ in \S+ - ")
_SYSTEM: Final = re.compile(r'message: "([^"]+)"')


class Refused(TierFailed):
    """And certainly nothing has changed in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Access:
    """Where the store is and who asks. What is None comes from obstore's usual places: `AWS_*` variables, the machine's
    role."""

    endpoint: str | None = None
    """As https://host:port; None is Amazon's of the region. Without TLS only where it says http."""
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    virtual_hosted: bool = False
    """The bucket is in the host's name, also in `endpoint`'s, instead of the path."""
    upload_checksum: Literal["SHA256", "CRC64NVME"] | None = "SHA256"
    """What the store checks an upload by. The signature has a SHA-256 of it anyway."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and urlsplit(self.endpoint).scheme not in ("http", "https"):
            raise ValueError(f"endpoint must be an http or https URL, not {self.endpoint!r}")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key go together")

    def connect(self, bucket: str, timeout_s: float) -> S3Store:
        """Opens no connection yet. Retries are the caller's."""
        config: S3Config = {"disable_bulk_delete": True, "virtual_hosted_style_request": self.virtual_hosted}
        if self.endpoint is not None:
            config["aws_endpoint_url_s3"] = self.endpoint  # before any of the environment
        if self.region is not None:
            config["region"] = self.region
        if self.access_key_id is not None and self.secret_access_key is not None:
            config["access_key_id"] = self.access_key_id
            config["secret_access_key"] = self.secret_access_key
        if self.session_token is not None:
            config["session_token"] = self.session_token
        if self.upload_checksum is not None:
            config["checksum_algorithm"] = self.upload_checksum
        client: ClientConfig = {
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=timeout_s),
            "allow_http": self.endpoint is not None and self.endpoint.startswith("http://"),
        }
        return S3Store(bucket, config=config, client_options=client, retry_config={"max_retries": 0})


class Breaker:
    """Opens after `num_failures` calls in a row that failed: then nothing is asked of the store until a probe succeeds.

    It probes by itself, after `pause_s`, and then after pauses that double, to 60 s: no request has to be the probe.
    """

    def __init__(
        self,
        num_failures: int,
        pause_s: float,
        probe: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        sleep: Sleep,
    ) -> None:
        self.failed_until: float | None = None
        """When the next probe is, in the clock's time; None while it is closed."""
        self.reason = ""
        self._num_failures = num_failures
        self._pause_s = pause_s
        self._probe = probe
        self._clock = clock
        self._sleep = sleep
        self._failures = 0
        self._recovery: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raises Refused while it is open."""
        if self.failed_until is not None:
            raise Refused(f"the store is left alone, as it has failed: {self.reason}")

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, reason: str) -> None:
        self._failures += 1
        if self._failures < self._num_failures or self.failed_until is not None:
            return
        log.warning("the object store has failed %d times in a row: %s", self._failures, reason)
        self.reason = reason
        self.failed_until = self._clock() + self._pause_s
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(), name="s3-probe")

    async def _recover(self) -> None:
        pause_s = self._pause_s
        while self.failed_until is not None:
            await self._sleep(pause_s)
            try:
                await self._probe()
            except TierFailed as error:
                self.reason = error.message
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                self.failed_until = self._clock() + pause_s
            else:
                self.close()

    def close(self) -> None:
        """The store answers."""
        if self.failed_until is not None:
            log.info("the object store answers again")
        self.failed_until = None
        self._failures = 0

    async def stop(self) -> None:
        if self._recovery is not None:
            await end_task(self._recovery)


class _Failure(NamedTuple):
    reason: str
    transient: bool = False
    refused: bool = False
    """The store has answered that it did nothing."""


class Bucket:
    """Requests to one bucket: `concurrency` reads and as many writes at a time, repeated until `deadline` at most (the
    loop's time).

    A request is repeated after 5xx, 408, 429, a timeout and a broken connection, `attempts` times in all, after pauses
    that double, with jitter. An attempt gets half of the time that is left, the last one all of it. The types of
    obstore's exceptions say less than is needed: the status and S3's code are taken from their text, and an error
    without a status is the connection's.
    """

    def __init__(
        self,
        name: str,
        access: S3Access,
        breaker: Breaker,
        *,
        concurrency: int,
        timeout_s: float,
        attempts: int,
        backoff_s: float,
    ) -> None:
        self.name = name
        self.num_retries = 0
        self._breaker = breaker
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._store = access.connect(name, timeout_s)
        self._reads = asyncio.Semaphore(concurrency)
        self._writes = asyncio.Semaphore(concurrency)

    async def get(self, key: str, size: int, deadline: float) -> "Bytes":
        """Raises Missing, Corrupt where it has not the size, TierFailed."""

        async def start() -> "Bytes":
            result = await obstore.get_async(self._store, key)
            if result.meta["size"] != size:
                raise Corrupt(f"{result.meta['size']} bytes long instead of {size}")
            return await result.bytes_async()

        return await self._call(f"GET {short(key)}", self._reads, start, deadline)

    async def put(self, key: str, parts: Sequence[bytes | memoryview], multipart_bytes: int, deadline: float) -> None:
        """Overwrites; in parts of `multipart_bytes` where it is larger. Raises TierFailed.

        What is sent is a copy: one that was cancelled reads nothing of the caller's any more.
        """

        async def start() -> None:
            body = b"".join(parts)
            large = len(body) > multipart_bytes
            try:
                await obstore.put_async(
                    self._store, key, body, use_multipart=large, chunk_size=multipart_bytes, max_concurrency=4
                )
            except FileNotFoundError as error:  # not the object's: a put that finds no place has failed
                raise GenericError(str(error)) from None

        await self._call(f"PUT {short(key)}", self._writes, start, deadline)

    async def delete(self, key: str, deadline: float) -> None:
        """If it is there. Raises TierFailed."""

        async def start() -> None:
            await obstore.delete_async(self._store, key)

        with contextlib.suppress(Missing):
            await self._call(f"DELETE {short(key)}", self._writes, start, deadline)

    async def probe(self, prefix: str, deadline: float) -> None:
        """Lists what is under a prefix, best one without anything, once. Raises TierFailed."""

        async def start() -> None:
            with contextlib.suppress(StopAsyncIteration):
                await obstore.list(self._store, prefix).__anext__()

        await self._repeat(f"LIST {prefix}", start, deadline, 1)

    async def list(self, prefix: str, budget_s: float) -> "AsyncIterator[Sequence[ObjectMeta]]":
        """In the order of keys, in pages of 1,000, each within `budget_s`. After a failure it goes on behind the last
        key."""
        last: str | None = None
        stream: ListStream[Sequence[ObjectMeta]] | None = None

        async def start() -> "Sequence[ObjectMeta]":
            nonlocal stream
            current = stream or obstore.list(self._store, prefix, offset=last, chunk_size=1000)
            stream = None
            try:
                page = await current.__anext__()  # no anext(): what obstore gives is not for its default
            except StopAsyncIteration:
                return ()
            stream = current
            return page

        while page := await self._repeat(f"LIST {prefix}", start, now() + budget_s, self._attempts):
            last = page[-1]["path"]
            yield page

    async def _call(self, what: str, slots: asyncio.Semaphore, start: Callable[[], Awaitable[T]], deadline: float) -> T:
        self._breaker.check()
        await _acquire(what, slots, deadline)
        try:
            self._breaker.check()
            result = await self._repeat(what, start, deadline, self._attempts)
        except TierFailed as error:
            self._breaker.failed(error.message)
            raise
        except (Missing, Corrupt):
            self._breaker.succeeded()
            raise
        finally:
            slots.release()
        self._breaker.succeeded()
        return result

    async def _repeat(self, what: str, start: Callable[[], Awaitable[T]], deadline: float, attempts: int) -> T:
        for attempt in range(1, attempts + 1):
            begun = now()
            try:
                async with asyncio.timeout_at(deadline if attempt == attempts else (begun + deadline) / 2):
                    return await start()
            except TimeoutError:
                failure = _Failure(f"no answer in {now() - begun:.3g} s", transient=True)
            except (BaseError, OSError) as error:
                failure = self._failure(what, error)
            pause_s = random.uniform(0.5, 1) * self._backoff_s * 2 ** (attempt - 1)
            # An attempt that has less time than the pause before it would only hide the reason.
            if not failure.transient or attempt == attempts or now() + 2 * pause_s >= deadline:
                break
            self.num_retries += 1
            await asyncio.sleep(pause_s)
        kind = Refused if failure.refused and attempt == 1 else TierFailed
        raise kind(f"{what}: {failure.reason} (attempt {attempt} of {attempts})")

    def _failure(self, what: str, error: Exception) -> _Failure:
        """Raises Missing where there is no such object."""
        text, _, details = str(error).partition("\n\nDebug source:")
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        code = found[1] if (found := _CODE.search(text)) else ""
        if code == "NoSuchBucket":
            return _Failure(f"there is no bucket {self.name!r}", refused=True)
        if isinstance(error, FileNotFoundError):
            raise Missing(f"{what}: there is no such object")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
            return _Failure(f"the credentials are refused: {status} {code}".rstrip(), refused=True)
        reason = f"{status} {code}" if code else " ".join(_REQUEST.sub("", text).split())[:300]
        if found := _SYSTEM.search(details):
            reason += f" ({found[1]})"
        if 400 <= status < 500 and status not in (408, 429):
            return _Failure(reason, refused=True)
        return _Failure(reason, transient=isinstance(error, GenericError | OSError))


async def _acquire(what: str, slots: asyncio.Semaphore, deadline: float) -> None:
    if not slots.locked():  # as a rule; then nothing waits, and no clock is needed
        await slots.acquire()
        return
    try:
        async with asyncio.timeout_at(deadline):
            await slots.acquire()
    except TimeoutError:
        raise Refused(f"{what}: too many requests are before it") from None


def short(key: str) -> str:
    """Without what `block_key` says behind the id."""
    return key.rpartition(".")[0] or key


def now() -> float:
    """On the running loop's clock, seconds."""
    return asyncio.get_running_loop().time()
