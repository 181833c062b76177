"""The store as its operator sees it: what each tier holds and has done, whether its bytes and its accounts are whole."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from kvrelay.common.ids import BlockId
from kvrelay.kvstore.arena import rounded
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.level import Counters, Health, Level
from kvrelay.kvstore.sessions import Sessions
from kvrelay.kvstore.tiers.base import Corrupt, Missing, TierFailed
from kvrelay.transfer.block import BlockInfo

TURN_BLOCKS = 64
"""After which others get their turn."""
REMOVALS = 16
"""At a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    tier: str
    num_blocks: int
    used_bytes: int
    limit_bytes: int
    healthy: bool
    reason: str
    counters: Counters


@dataclass(slots=True)
class Verified:
    """Of one tier so far."""

    tier: str
    num_whole: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    """Could not be read."""


def tiers(chain: Chain, *elsewhere: Health) -> Iterator[TierReport]:
    """From the nearest on. `elsewhere`: what holds nothing of its own."""
    memory = chain.memory
    yield TierReport(
        tier="cpu",
        num_blocks=len(memory),
        used_bytes=memory.used_bytes,
        limit_bytes=memory.limit_bytes,
        healthy=True,
        reason="",
        counters=chain.counters,
    )
    for level in chain.levels:
        yield TierReport(
            tier=level.tier.name,
            num_blocks=len(level.tier),
            used_bytes=level.tier.used_bytes,
            limit_bytes=level.tier.limit_bytes,
            healthy=level.healthy,
            reason="" if level.healthy else level.reason,
            counters=level.counters,
        )
    for health in elsewhere:
        yield TierReport(
            tier=health.name,
            num_blocks=0,
            used_bytes=0,
            limit_bytes=0,
            healthy=health.healthy,
            reason="" if health.healthy else health.reason,
            counters=health.counters,
        )


def violations(chain: Chain, sessions: Sessions) -> list[str]:
    """Of what must hold at each moment; empty: all is well."""
    memory = chain.memory
    slots = memory.slots()
    parts = sum(rounded(slot.info.size) for slot in slots)
    pins = sum(slot.pins for slot in slots)
    found = []
    if parts != memory.used_bytes:
        found.append(f"blocks take {parts} bytes of the arena, of which {memory.used_bytes} are taken")
    if pins < sessions.num_pins:
        found.append(f"sessions hold {sessions.num_pins} pins, blocks have {pins}")
    if memory.num_writing < sessions.num_writing:
        found.append(f"sessions write {sessions.num_writing} blocks, memory knows of {memory.num_writing}")
    found += (
        f"the {report.tier} tier holds {report.used_bytes} bytes, over {report.limit_bytes}"
        for report in tiers(chain)
        if report.used_bytes > report.limit_bytes and report.healthy
    )
    return found


def suspect(chain: Chain, ids: Sequence[BlockId]) -> int:
    """Of blocks that someone else found damaged: how many are so in memory. They are removed from there."""
    num_removed = 0
    for block_id in ids:
        slot = chain.memory.pin(block_id)
        if slot is not None:
            num_removed += not chain.verify(slot)
            chain.release(slot)
    return num_removed


async def remove(chain: Chain, ids: Sequence[BlockId]) -> int:
    """From all tiers. How many of them were there."""
    num_removed = 0
    for start in range(0, len(ids), REMOVALS):
        batch = [block_id for block_id in ids[start : start + REMOVALS] if chain.find(block_id) is not None]
        await asyncio.gather(*map(chain.remove, batch))
        num_removed += len(batch)
    return num_removed


async def verify(chain: Chain) -> AsyncIterator[Verified]:
    """Reads every block of every tier; what is corrupt is removed from there. Now and then, and at the end of a tier, says how far it is."""
    seen = Verified("cpu")
    for number, block_id in enumerate(chain.memory.ids()):
        slot = chain.memory.pin(block_id)
        if slot is None:
            continue
        if chain.verify(slot):
            seen.num_whole += 1
        else:
            seen.num_corrupt += 1
        chain.release(slot)
        if number % TURN_BLOCKS == 0:
            yield seen
            await asyncio.sleep(0)
    yield seen
    for level in chain.levels:
        async for seen in _verify(chain, level):
            yield seen


async def _verify(chain: Chain, level: Level) -> AsyncIterator[Verified]:
    seen = Verified(level.tier.name)
    buffer = bytearray()
    for number, block_id in enumerate(level.tier.ids()):
        info = level.tier.find(block_id)
        if info is None:
            continue
        if len(buffer) < info.size:
            buffer = bytearray(info.size)
        await _read(chain, level, info, buffer, seen)
        if number % TURN_BLOCKS == 0:
            yield seen
    yield seen


async def _read(chain: Chain, level: Level, info: BlockInfo, buffer: bytearray, seen: Verified) -> None:
    try:
        await level.tier.get(info.id, memoryview(buffer))
    except Missing:
        pass  # evicted since it was listed
    except Corrupt:
        seen.num_corrupt += 1
        level.counters.corrupt += 1
        chain.moved(info)
    except TierFailed:
        seen.num_failed += 1
    else:
        seen.num_whole += 1
