"""The index in Redis: where each block of the cluster lies.

    kvrelay:CLUSTER:kv:{HEAD}        a hash for each segment, HEAD in hexadecimal: block -> its locations (`Location`), 43 bytes each
    kvrelay:CLUSTER:kv:mark          random; when it is gone or another, Redis has lost its memory

What is in braces says the slot of a Redis Cluster. Chains that part within a segment share its hash: one of 64 blocks is compact, and one
of very many still gives a block at once. That is why blocks are asked for, and never a whole hash.

Memory is bounded by what living nodes hold, and some more, for they say it again in time (`Announcer`) and the dead do not. A hash goes
when nobody has spoken of it for `TTL_SECONDS`. In one that lives on, who speaks of n blocks drops older locations, of these and of n taken
at random. So what the dead have left there, beyond its time, is at most as much as lives, as long as no more than half as much as lives
is left in each half hour. After a greater loss it goes as fast as what lives is said again.

Redis may be away, empty or slow at any time: a look-up then finds nothing, within COMMAND_SECONDS. Redis 7.0 or a Valkey is needed.
"""

import contextlib
import itertools
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError

from kvrelay.common.discovery import COMMAND_SECONDS, connect
from kvrelay.common.ids import BlockId
from kvrelay.kvstore.location import MAX_LOCATIONS, RECORD_BYTES, SAID_BYTES, Location, unpack
from kvrelay.transfer.segments import heads

log = logging.getLogger(__name__)

TTL_SECONDS = 3600

Entry = tuple[BlockId, BlockId]
"""Head of the segment, and block."""

# KEYS: a segment. ARGV: time to live, node, then each block and its location (or an empty string: withdrawn).
_UPDATE = f"""
local key, ttl, node = KEYS[1], tonumber(ARGV[1]), ARGV[2]
local now = tonumber(redis.call('TIME')[1])
local said = struct.pack('<I{SAID_BYTES}', now)

local function kept(value, except)
  local new = {{}}
  for at = 1, #value - {RECORD_BYTES} + 1, {RECORD_BYTES} do
    local age = now - struct.unpack('<I{SAID_BYTES}', value, at + {RECORD_BYTES - SAID_BYTES})
    if age <= ttl and string.sub(value, at, at + 7) ~= except then
      new[#new + 1] = string.sub(value, at, at + {RECORD_BYTES} - 1)
    end
  end
  return new
end

local function put(block, locations)
  if #locations == 0 then redis.call('HDEL', key, block)
  else redis.call('HSET', key, block, table.concat(locations)) end
end

local lives = false
for i = 3, #ARGV, 2 do
  local new = kept(redis.call('HGET', key, ARGV[i]) or '', node)
  if ARGV[i + 1] ~= '' then
    if #new >= {MAX_LOCATIONS} then table.remove(new, 1) end
    new[#new + 1] = string.sub(ARGV[i + 1], 1, {RECORD_BYTES - SAID_BYTES}) .. said
    lives = true
  end
  put(ARGV[i], new)
end
if lives then redis.call('EXPIRE', key, ttl) end

local others = redis.call('HRANDFIELD', key, 1 - #ARGV / 2, 'WITHVALUES')
for i = 1, #others, 2 do
  local new = kept(others[i + 1])
  if #new * {RECORD_BYTES} < #others[i + 1] then put(others[i], new) end
end
"""


class _Connection(aioredis.Connection):
    """Packs commands in C: redis-py takes longer for the 512 blocks of a look-up than Redis does."""

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join([hiredis.pack_command(tuple(command)) for command in commands])]


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
            self._redis = connect(url, _Connection)
        self._prefix = f"kvrelay:{cluster}:kv:".encode()
        self._update = self._redis.register_script(_UPDATE)
        self.failures = 0
        """Look-ups that Redis did not answer."""
        self._answers = True
        """As was logged last."""

    def key(self, head: BlockId) -> bytes:
        return b"%b{%b}" % (self._prefix, head.hex().encode())

    async def find(self, ids: Sequence[BlockId]) -> list[list[Location]]:
        """The locations of each block of a chain from its first on, up to the first block that has none. One round trip."""
        return list(itertools.takewhile(bool, await self._locate(heads(ids), ids)))

    async def locate(self, entries: Sequence[Entry]) -> list[list[Location]]:
        """The locations of each; none at all where Redis does not answer. One round trip."""
        return await self._locate([head for head, _ in entries], [block_id for _, block_id in entries])

    async def _locate(self, in_heads: Sequence[BlockId], ids: Sequence[BlockId]) -> list[list[Location]]:
        try:
            values = await self._values(in_heads, ids)
        except (RedisError, OSError) as error:
            self.failures += 1
            if self._answers:
                log.warning("look-ups in the index fail, trying on: %s", error)
            self._answers = False
            return []
        if not self._answers:
            log.info("look-ups in the index work again")
        self._answers = True
        return unpack(values)

    async def _values(self, in_heads: Sequence[BlockId], ids: Sequence[BlockId]) -> list[bytes | None]:
        if not ids:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        start = 0
        for head, segment in itertools.groupby(in_heads):
            end = start + len(tuple(segment))
            pipeline.execute_command("HMGET", self.key(head), *ids[start:end])
            start = end
        with _as_redis_errors():
            return list(itertools.chain.from_iterable(await pipeline.execute()))

    async def update(self, node: int, changes: Mapping[Entry, Location | None]) -> None:
        """Says where (head, block) lies now on the node: one location, or none any more. Others' locations stay."""
        by_head: dict[BlockId, list[bytes]] = {}
        for (head, block_id), location in changes.items():
            by_head.setdefault(head, []).extend((block_id, b"" if location is None else location.pack()))
        for head, blocks in by_head.items():
            with _as_redis_errors():
                await self._update(keys=[self.key(head)], args=[TTL_SECONDS, node.to_bytes(8, "little"), *blocks])

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
