"""Pods' own blocks, the tiers of two stores and the index that joins them, under random operations, against what lies on the media.

What is read is right, or a miss (every step of a pod checks each row that it relies on); what lies there whole is found; limits hold;
nothing is held twice or for nobody; and the index says of each node what that node has.
"""

import asyncio
import functools
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrelay.cli.ports import free_ports
from kvrelay.common.blocks import SPAN, BlockHasher
from kvrelay.common.ids import BlockId
from kvrelay.engine.connector.kvstore import KvStoreConnector
from kvrelay.kvstore import announcer, audit
from kvrelay.kvstore.level import HIGH_SHARE
from kvrelay.kvstore.location import node_key
from kvrelay.kvstore.server import KvStore
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.kvstore.tiers import blockfile
from kvrelay.kvstore.tiers.blockfile import PAGE_BYTES
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.kvstore.tiers.objects import ObjectTier
from kvrelay.transfer.block import BlockInfo, checksum
from tests.connector.hostile import QUICK, access, until
from tests.connector.pods import FINGERPRINT, Pod, identity
from tests.fixtures_redis import RedisServer
from tests.kvstore.faulty_s3 import FaultyS3
from tests.kvstore.file_tier import check_disk, flip

pytestmark = pytest.mark.integration

MEMORY_BLOCKS, FILE_BLOCKS, OBJECTS, POD_BLOCKS = 8, 10, 20, 14
LONGEST = 8
"""Spans of a prompt."""
FAMILIES = 5
"""Of prompts that begin alike; all together are more than all tiers hold."""
NAMES = ("one", "two")
EXAMPLES, STEPS = 6, 30


def prompt_of(family: int, length: int) -> list[int]:
    return [1 + (family * 31 + at * at) % 90 for at in range(length)]


PROMPTS = st.builds(prompt_of, st.integers(0, FAMILIES - 1), st.integers(1, SPAN * LONGEST))


def ids_of(tokens: Sequence[int]) -> list[BlockId]:
    ids: list[BlockId] = []
    BlockHasher(FINGERPRINT).extend(ids, tokens)
    return ids


@functools.cache
def depth_of(block_id: BlockId) -> int:
    """Its place in the prompts that it is of."""
    found = (ids_of(prompt_of(family, SPAN * LONGEST)) for family in range(FAMILIES))
    return next((ids.index(block_id) for ids in found if block_id in ids), LONGEST)


class Side:
    """A store with a pod. The first has files as well, both have a bucket in common."""

    def __init__(self, name: str, folder: Path, redis_url: str, endpoint: str) -> None:
        self.name = name
        size = identity().size
        (folder / "key").write_text("who")
        tiers: list[dict[str, Any]] = [{"tier": "cpu", "bytes": MEMORY_BLOCKS * PAGE_BYTES, "policy": "lru"}]
        if name == NAMES[0]:
            file_bytes = FILE_BLOCKS * blockfile.occupied_bytes(size)
            tiers.append({"tier": "file", "bytes": file_bytes, "directory": str(folder / "files"), "direct": False})
        bucket: dict[str, Any] = {"tier": "s3", "bytes": OBJECTS * (PAGE_BYTES + size), "bucket": "bucket"}
        bucket |= {"endpoint": endpoint, "region": "us-east-1"}
        bucket |= {f"{field}_file": str(folder / "key") for field in ("access_key_id", "secret_access_key")}
        self._settings = KvStoreSettings(
            tiers=(*tiers, bucket),  # type: ignore[arg-type]
            grpc_port=free_ports(1)[0],
            http_port=0,
            redis_url=redis_url,
            node_id=name,
            arena_directory=folder,
            peer_transport="none",
        )
        self.store: KvStore
        self.pod: Pod

    async def start(self) -> None:
        self.store = KvStore(self._settings)
        assert await self.store.start()

    async def stop(self) -> None:
        await self.store.drain()
        await self.store.stop()

    async def attach(self) -> None:
        self.pod = Pod(
            KvStoreConnector(access(f"127.0.0.1:{self._settings.grpc_port}", identity()), QUICK), num_blocks=POD_BLOCKS
        )
        await until(lambda: self.pod.connector.ready)

    @property
    def chain(self) -> Any:
        return self.store._node.chain

    @property
    def tiers(self) -> list[Any]:
        return [level.tier for level in self.chain.levels]

    def place(self, tier: str) -> Any:
        """None: it has none of that name."""
        return next((found for found in self.tiers if found.name == tier), None)

    # What lies on the media, whatever the store believes of it.

    def copies(self, block_id: BlockId, s3: FaultyS3) -> dict[str, bool]:
        """By tier, whether it is whole there."""
        found: dict[str, bool] = {}
        slot = self.chain.memory._slots.get(block_id)
        if slot is not None:
            with self.chain.memory.data(slot) as data:
                found["cpu"] = checksum(slot.info, data) == slot.info.checksum
        for tier in self.tiers:
            info = tier.find(block_id)
            if info is not None:
                content = (
                    Path(tier._path(block_id)).read_bytes() if tier.name == "file" else s3.objects[tier.key(info)][0]
                )
                payload = memoryview(content)[PAGE_BYTES : PAGE_BYTES + info.size]
                found[tier.name] = checksum(info, payload) == info.checksum
        return found

    def damage(self, tier: str, number: int, bit: int, s3: FaultyS3) -> BlockId | None:
        """One bit of one block's bytes, if the tier has any; low numbers are first blocks of prompts. Gives the block."""
        place = self.chain.memory if tier == "cpu" else self.place(tier)
        ids = sorted(place.ids(), key=lambda block_id: (depth_of(block_id), block_id)) if place is not None else []
        if not ids:
            return None
        block_id = ids[number % len(ids)]
        info: BlockInfo = place.find(block_id)
        at = bit % (8 * info.size)
        if tier == "cpu":
            with place.data(place._slots[block_id]) as data:
                data[at // 8] ^= 1 << at % 8
        elif tier == "file":
            flip(place._path(block_id), 8 * PAGE_BYTES + at)
        else:
            content, written = s3.objects[place.key(info)]
            spoilt = bytearray(content)
            spoilt[PAGE_BYTES + at // 8] ^= 1 << at % 8
            s3.objects[place.key(info)] = bytes(spoilt), written
        return block_id

    # What must hold.

    def is_quiet(self) -> bool:
        memory, sessions = self.chain.memory, self.store._node.sessions
        if memory.used_bytes > HIGH_SHARE * memory.limit_bytes or memory.num_writing or sessions.busy:
            return False
        if any(level.is_full for level in self.chain.levels[:-1]):
            return False
        return not any(slot.pins for slot in memory.slots()) and not self.store._node.announcer.backlog

    def check(self, s3: FaultyS3) -> None:
        assert audit.violations(self.chain, self.store._node.sessions) == []
        memory = self.chain.memory
        parts = sorted((slot.offset, slot.offset + PAGE_BYTES) for slot in memory.slots())
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(parts)), "parts overlap"
        assert len(parts) * PAGE_BYTES == memory.used_bytes <= memory.limit_bytes
        for tier in self.tiers:
            infos = [tier.find(block_id) for block_id in tier.ids()]
            if isinstance(tier, FileTier):
                check_disk(tier, infos)
            if isinstance(tier, ObjectTier):
                own = {key: data for key, (data, _) in s3.objects.items() if key.startswith(f"{tier.prefix}/")}
                assert own.keys() == {tier.key(info) for info in infos}
                assert tier.used_bytes == sum(map(len, own.values())) <= tier.limit_bytes
        self.pod.h.check_empty()


class Together(RuleBasedStateMachine):
    redis: RedisServer
    met: Counter[str]
    """What has come about, so that the test does not pass by doing nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.leaving = ExitStack()
        self.folder = Path(self.leaving.enter_context(tempfile.TemporaryDirectory()))
        self.number = 0
        self.heads: dict[BlockId, BlockId] = {}
        """Of all blocks that have ever been stored."""
        self.sides: dict[str, Side] = {}

    @initialize()
    def begin(self) -> None:
        assert self.redis.command("FLUSHALL") == b"+OK\r\n"
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.s3 = FaultyS3()
        await self.s3.start()
        for name in NAMES:
            folder = self.folder / name
            folder.mkdir()
            side = self.sides[name] = Side(name, folder, self.redis.url, self.s3.endpoint)
            await side.start()
            await side.attach()
        await until(lambda: all(side.store._node.peers.num_nodes == 1 for side in self.sides.values()))
        for family in range(FAMILIES):
            await self._ask(self.sides[NAMES[0]], prompt_of(family, SPAN * LONGEST))
        await self._whole()
        for family in (1, 2):  # by then in the bucket
            await self._ask(self.sides[NAMES[1]], prompt_of(family, SPAN * LONGEST))

    @rule(name=st.sampled_from(NAMES), prompts=st.lists(PROMPTS, min_size=1, max_size=4))
    def ask(self, name: str, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            self.runner.run(self._ask(self.sides[name], prompt))

    @rule(name=st.sampled_from(NAMES), prompt=PROMPTS)
    def ask_a_new_pod(self, name: str, prompt: list[int]) -> None:
        self.runner.run(self._ask_anew(self.sides[name], prompt))

    async def _ask_anew(self, side: Side, prompt: list[int]) -> None:
        await side.pod.close()
        await side.attach()
        await self._ask(side, prompt)

    async def _ask(self, side: Side, prompt: list[int]) -> None:
        ids = ids_of(prompt[:-1])  # the last token is always computed
        (other,) = (found for found in self.sides.values() if found is not side)
        own = len(side.pod.h.engine.manager.pool.find(ids))
        here = [side.copies(block_id, self.s3) for block_id in ids]
        there = [other.copies(block_id, self.s3).get("s3", False) for block_id in ids]
        sure = leading(ids, lambda at: at < own or (bool(here[at]) and all(here[at].values())))
        most = leading(ids, lambda at: at < own or any(here[at].values()) or there[at])
        before = self._excuses(side)
        self.number += 1
        request = side.pod.h.request(f"r{self.number}", prompt, max_tokens=3)
        await side.pod.run(request)
        side.pod.h.check_output(request)
        cached = len(prompt) - side.pod.num_computed(request)
        assert cached <= most * SPAN, f"{cached} tokens were found, of which {most * SPAN} are anywhere"
        if self._excuses(side) == before:
            assert cached >= sure * SPAN, f"{cached} tokens were found, and {sure * SPAN} lay there whole"
            self.met["sure"] += sure > own
        self.met["loaded"] += cached > own * SPAN
        self.met["loaded of the other's"] += any(not here[at] for at in range(own, cached // SPAN))
        self.met["damaged"] += most < len(ids) and bool(here[most]) and not any(here[most].values())
        await side.pod.stored()

    def _excuses(self, side: Side) -> tuple[int, ...]:
        """Times that something was lost or not asked for, for want of room or time."""
        counters = [side.chain.counters, *(level.counters for level in side.chain.levels)]
        lost = sum(found.dropped + found.refused + found.failures for found in counters)
        return lost, side.pod.connector.num_timeouts, side.pod.store.counters().declined

    @rule(name=st.sampled_from(NAMES), family=st.integers(0, FAMILIES - 1), first=st.integers(0, LONGEST - 1))
    def remove(self, name: str, family: int, first: int) -> None:
        chain = self.sides[name].chain
        ids = ids_of(prompt_of(family, SPAN * LONGEST))[first : first + 2]
        self.runner.run(audit.remove(chain, ids))
        assert [chain.find(block_id) for block_id in ids] == [None] * len(ids)

    @rule(
        name=st.sampled_from(NAMES),
        tier=st.sampled_from(("cpu", "file", "s3")),
        number=st.integers(0, 20),
        bit=st.integers(0, 1 << 20),
    )
    def flip(self, name: str, tier: str, number: int, bit: int) -> None:
        """And a new pod asks for the prompt that the block is of."""
        spoilt = self.sides[name].damage(tier, number, bit, self.s3)
        for prompt in (prompt_of(family, SPAN * LONGEST + 1) for family in range(FAMILIES)):
            if spoilt in ids_of(prompt):
                self.runner.run(self._ask_anew(self.sides[name], prompt))

    @rule()
    def forget_the_index(self) -> None:
        assert self.redis.command("FLUSHALL") == b"+OK\r\n"

    @rule(name=st.sampled_from(NAMES))
    def restart_the_store(self, name: str) -> None:
        self.runner.run(self._restart(self.sides[name]))

    async def _restart(self, side: Side) -> None:
        await side.stop()
        await side.start()
        await until(lambda: side.pod.connector.ready)
        await until(lambda: all(found.store._node.peers.num_nodes == 1 for found in self.sides.values()))

    @precondition(lambda self: bool(self.sides))
    @invariant()
    def all_is_whole(self) -> None:
        self.runner.run(self._whole())

    async def _whole(self) -> None:
        for side in self.sides.values():
            assert all(tier.used_bytes <= tier.limit_bytes for tier in (side.chain.memory, *side.tiers))
        await until(lambda: all(side.is_quiet() for side in self.sides.values()))
        for side in self.sides.values():
            side.check(self.s3)
            self.heads |= {i: side.chain.find(i)[0].head for i in side.chain.ids()}
        end = time.monotonic() + 20
        while wrong := [wrong for side in self.sides.values() for wrong in await self._misheard(side)]:
            assert time.monotonic() < end, f"where blocks are, and where the index has them: {wrong}"
            await asyncio.sleep(0.01)

    async def _misheard(self, side: Side) -> list[tuple[str | None, str | None]]:
        """Tiers in which blocks are, and in which the index has them, where these are not the same."""
        entries = [(head, block_id) for block_id, head in self.heads.items()]
        located = await side.store._node.index.locate(entries)
        heard = [
            next(
                (
                    place.tier
                    for place in places
                    if (place.node, place.epoch) == (node_key(side.name), side.store.epoch)
                ),
                None,
            )
            for places in located
        ]
        found = [side.chain.find(block_id) for _, block_id in entries]
        pairs = [(place[1] if place else None, said) for place, said in zip(found, heard, strict=True)]
        return [pair for pair in pairs if pair[0] != pair[1]]

    def teardown(self) -> None:
        async def end() -> None:
            for side in self.sides.values():
                self.met["dropped"] += sum(level.counters.dropped for level in side.chain.levels)
                await side.pod.close()
                await side.store.stop()
            await self.s3.stop()

        if self.sides:
            self.runner.run(end())
        self.runner.close()
        self.leaving.close()


def leading(ids: Sequence[BlockId], holds: Callable[[int], bool]) -> int:
    """How many of them, from the first on."""
    return next((at for at in range(len(ids)) if not holds(at)), len(ids))


@pytest.fixture
def quick_announcer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcer, "CHECK_SECONDS", 0.05)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick_announcer")
def test_together(redis_server: RedisServer) -> None:
    met: Counter[str] = Counter()
    machine = type("TogetherHere", (Together,), {"redis": redis_server, "met": met})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # to shrink would take many times as long
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert min(met[name] for name in ("sure", "loaded", "loaded of the other's", "damaged", "dropped")) > 0, met
