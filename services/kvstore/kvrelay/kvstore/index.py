"""The index in Redis: where each block of the cluster lies.

    kvrelay:CLUSTER:kv:{HEAD}ID        locations (`Location`), 40 bytes each, with a time to live; HEAD in hexadecimal, ID as it is
    kvrelay:CLUSTER:kv:mark            random; when it is gone or another, Redis has lost its memory

Blocks of a segment share what is in braces, and so a slot of a Redis Cluster. Entries live `TTL_SECONDS` and are said again in time
(`Announcer`), so that what a dead node has left does not stay: memory is bounded by what living nodes hold, a little more.
Redis may be away, empty or slow at any time: a look-up then finds nothing, within COMMAND_SECONDS.
"""

import contextlib
import itertools
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

import redis.asyncio as aioredis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from kvrelay.common.discovery import COMMAND_SECONDS, connect
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.location import MAX_LOCATIONS, RECORD_BYTES, Location, unpack
from kvrelay.transfer.segments import heads

log = logging.getLogger(__name__)

TTL_SECONDS = 3600

Entry = tuple[BlockId, BlockId]
"""Head of the segment, and block."""

# KEYS: blocks of one segment; ARGV: time to live, then a location (or an empty string: withdrawn) for each, and the node last.
_UPDATE = f"""
local node = ARGV[#ARGV]
for i, key in ipairs(KEYS) do
  local old, new = redis.call('GET', key) or '', {{}}
  for at = 1, #old - {RECORD_BYTES} + 1, {RECORD_BYTES} do
    if string.sub(old, at, at + 7) ~= node then new[#new + 1] = string.sub(old, at, at + {RECORD_BYTES} - 1) end
  end
  if ARGV[i + 1] ~= '' then
    if #new >= {MAX_LOCATIONS} then table.remove(new, 1) end
    new[#new + 1] = ARGV[i + 1]
  end
  if #new == 0 then redis.call('DEL', key)
  else redis.call('SET', key, table.concat(new), 'EX', ARGV[1]) end
end
return #KEYS
"""


@contextlib.contextmanager
def _as_redis_errors() -> Iterator[None]:
    """A Cluster that is away raises what is no RedisError."""
    try:
        yield
    except RedisClusterException as error:
        raise RedisError(str(error)) from error


class Index:
    """Raises RedisError or OSError for a Redis that does not answer; `find` does not."""

    def __init__(self, url: str, cluster: str, *, sharded: bool = False) -> None:
        """`sharded`: the URL is of a Redis Cluster. Connects at the first command."""
        self._redis: aioredis.Redis | RedisCluster
        if sharded:
            self._redis = RedisCluster.from_url(
                url, socket_timeout=COMMAND_SECONDS, socket_connect_timeout=COMMAND_SECONDS, protocol=2
            )
        else:
            self._redis = connect(url)
        self._sharded = sharded
        self._prefix = f"kvrelay:{cluster}:kv:".encode()
        self._update = self._redis.register_script(_UPDATE)
        self.failures = 0
        """Look-ups that Redis did not answer."""

    def key(self, head: BlockId, block_id: BlockId) -> bytes:
        return self._prefix + b"{" + head.hex().encode() + b"}" + block_id

    async def find(self, ids: Sequence[BlockId]) -> list[list[Location]]:
        """The locations of each block of a chain from its first on, up to the first block that has none. One round trip."""
        found = await self.locate(list(zip(heads(ids), ids, strict=True)))
        return list(itertools.takewhile(bool, found))

    async def locate(self, entries: Sequence[Entry]) -> list[list[Location]]:
        """The locations of each; none at all where Redis does not answer. One round trip."""
        try:
            values = await self._values([self.key(head, block_id) for head, block_id in entries])
        except (RedisError, OSError) as error:
            self.failures += 1
            log.warning("the index does not answer: %s", error)
            return []
        return [unpack(value or b"") for value in values]

    async def _values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        if not self._sharded:
            return cast("list[bytes | None]", await self._redis.mget(keys))
        with _as_redis_errors():
            return await self._sharded_values(keys)

    async def _sharded_values(self, keys: Sequence[bytes]) -> list[bytes | None]:
        pipeline = self._redis.pipeline()
        for _, segment in groupby(keys, key=lambda key: key.partition(b"}")[0]):
            pipeline.execute_command("MGET", *segment)  # `mget` is for keys of several slots
        return [value for part in await pipeline.execute() for value in part]

    async def update(self, node: int, changes: Mapping[Entry, Location | None]) -> None:
        """Says where (head, block) lies now on the node: one location, or none any more. Others' locations stay."""
        by_head: dict[BlockId, list[tuple[BlockId, Location | None]]] = {}
        for (head, block_id), location in changes.items():
            by_head.setdefault(head, []).append((block_id, location))
        for head, blocks in by_head.items():
            keys = [self.key(head, block_id) for block_id, _ in blocks]
            packed = [b"" if location is None else location.pack() for _, location in blocks]
            with _as_redis_errors():
                await self._update(keys=keys, args=[TTL_SECONDS, *packed, node.to_bytes(8, "little")])

    async def mark(self) -> bytes:
        """What Redis remembers until it loses its memory; another one, or a new one, means that all must be said again."""
        new = secrets.token_bytes(8)
        with _as_redis_errors():
            known = await self._redis.set(self._prefix + b"mark", new, nx=True, get=True)
        return cast("bytes", known) if known else new

    async def used_bytes(self) -> int:
        """Of Redis's memory; of a Cluster's, all nodes together."""
        answer = await self._redis.info("memory")
        parts = [answer] if "used_memory" in answer else answer.values()
        return sum(int(part["used_memory"]) for part in parts)

    async def close(self) -> None:
        await self._redis.aclose()
