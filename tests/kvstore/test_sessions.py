"""Sessions against a simple model, over random operations: what they hold, and that nothing is left of it when they end."""

import asyncio
import dataclasses
import os
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.common.errors import InvalidRequest, Overloaded
from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.kvstore import audit, sessions
from kvrelay.kvstore.arena import Arena, rounded
from kvrelay.kvstore.chain import Chain
from kvrelay.kvstore.level import Pace
from kvrelay.kvstore.memory import MemoryTier
from kvrelay.kvstore.policy import make_policy
from kvrelay.kvstore.sessions import Begun, Found, Loaded, Session, Sessions
from kvrelay.kvstore.supply import Hello, Nowhere
from kvrelay.kvstore.tiers.files import FileTier
from kvrelay.transfer.block import BlockInfo, checksum

pytestmark = pytest.mark.unit

SIZE = 6_000  # two pages in memory, three in a file
MEMORY_BLOCKS, FILE_BLOCKS, NUM_IDS = 8, 12, 24
HELLO = Hello(
    pod_id=PodId("p"),
    fingerprint=Fingerprint("m"),
    shape="00" * 8,
    dtype=KvDtype.FLOAT32,
    readable=frozenset({KvDtype.FLOAT32}),
)
IDS = [BlockId(number.to_bytes(16, "big")) for number in range(NUM_IDS)]


def payload_of(block_id: BlockId) -> bytes:
    return random.Random(block_id).randbytes(SIZE)


def checksum_of(block_id: BlockId) -> int:
    info = BlockInfo(
        id=block_id,
        head=block_id,
        fingerprint=HELLO.fingerprint,
        shape=HELLO.shape,
        dtype=HELLO.dtype,
        size=SIZE,
    )
    return checksum(info, memoryview(payload_of(block_id)))


class NoListener:
    def stored(self, info: BlockInfo, tier: str) -> None: ...

    def removed(self, info: BlockInfo) -> None: ...


@dataclasses.dataclass
class Store:
    chain: Chain
    sessions: Sessions

    def check(self) -> None:
        assert audit.violations(self.chain, self.sessions) == []

    async def check_empty_handed(self) -> None:
        """No session holds anything, and nothing is left of those that did."""
        memory = self.chain.memory
        async with asyncio.timeout(10):
            while any(slot.pins for slot in memory.slots()) or memory.num_writing:
                await asyncio.sleep(0.001)
        assert (self.sessions.num_pins, self.sessions.num_writing) == (0, 0)
        assert len(memory.slots()) == len(memory.ids()), "none is doomed"
        self.check()


@asynccontextmanager
async def opened(num_files: int = FILE_BLOCKS) -> AsyncIterator[Store]:
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(Path("/dev/shm") / f"kvrelay-test-sessions-{os.getpid()}", MEMORY_BLOCKS * rounded(SIZE))
        limit = num_files * 3 * 4096
        policy = make_policy("lru", limit) if limit else None
        tiers = []
        if policy is not None:
            tiers.append(FileTier(folder, limit, policy, direct=False, threads=2, timeout_s=10.0))
        chain = Chain(MemoryTier(arena, make_policy("lru", arena.size)), tiers, NoListener())
        await chain.open()
        try:
            yield Store(chain, Sessions(chain, Nowhere()))
        finally:
            await chain.close()
            arena.close()


@dataclasses.dataclass
class Pod:
    """A session, and what its pod thinks that it holds."""

    session: Session
    arena: Arena
    begun: dict[int, BlockId] = dataclasses.field(default_factory=dict)
    pins: Counter[int] = dataclasses.field(default_factory=Counter)
    asked: dict[int, list[BlockId]] = dataclasses.field(default_factory=dict)
    """Of each begin, the blocks; of each load, those that are still to come."""
    calls: int = 0

    def ask(self, ids: list[BlockId]) -> int:
        self.calls += 1
        self.asked[self.calls] = list(ids)
        return self.calls

    async def hear(self) -> None:
        """Everything that the session has to say."""
        while self.session.num_replies:
            match await self.session.next_reply():
                case Begun(call, offsets):
                    for block_id, offset in zip(self.asked.pop(call), offsets, strict=True):
                        if offset >= 0:
                            assert offset not in self.begun
                            self.begun[offset] = block_id
                case Loaded(call, slots, end):
                    for slot in slots:
                        assert slot.info.id == self.asked[call].pop(0), "in order"
                        with self.arena.part(slot.offset, SIZE) as data:
                            assert bytes(data) == payload_of(slot.info.id), "pinned, and never a wrong byte"
                        self.pins[slot.offset] += 1
                    if end:
                        del self.asked[call]
                case Found(_, runs):
                    assert all(run.num_bytes == SIZE * run.num_blocks > 0 for run in runs)

    def check(self) -> None:
        """After `hear`: both ends agree, but for what waits for more of its load before it is said."""
        unsaid = sum(len(reply.slots) for reply in self.session._growing.values())
        assert self.session.num_pins == self.pins.total() + unsaid
        assert self.session.num_writing == len(self.begun)
        assert self.session.pinned_bytes == rounded(SIZE) * self.session.num_pins

    def commit(self, count: int, give_up: bool) -> None:
        offsets = list(self.begun)[:count]
        ids = [self.begun.pop(offset) for offset in offsets]
        if give_up:
            self.session.commit([], [], offsets)
            return
        for offset, block_id in zip(offsets, ids, strict=True):
            with self.arena.part(offset, SIZE) as data:
                data[:] = payload_of(block_id)
        self.session.commit(offsets, [checksum_of(block_id) for block_id in ids], [])

    def release(self, count: int) -> None:
        offsets = list(self.pins.elements())[:count]
        self.pins -= Counter(offsets)
        self.session.release(offsets)


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["find", "load", "load", "cancel", "release", "begin", "begin", "commit", "give up", "corrupt"])
        | st.sampled_from(["remove", "leave", "rest"]),
        st.integers(0, NUM_IDS - 1),
        st.integers(1, 6),
    ),
    max_size=60,
)


async def act(store: Store, pods: list[Pod], which: int, what: str, number: int, count: int) -> None:
    pod, ids = pods[which], IDS[number : number + count]
    match what:
        case "find":
            pod.session.find(0, 0, ids)
        case "load":
            pod.session.load(pod.ask(ids), 0, ids)
        case "cancel":
            pod.session.cancel(max(1, pod.calls - number))
        case "release":
            pod.release(count)
        case "begin":
            pod.session.begin(pod.ask(ids), ids, ids, SIZE)
        case "commit" | "give up":
            pod.commit(count, what == "give up")
        case "corrupt":
            pod.session.corrupt(list(pod.pins)[:1])
        case "remove":
            await store.chain.remove(ids[0])
        case "leave":
            store.sessions.close(pod.session)
            pods[which] = Pod(store.sessions.open(HELLO), store.chain.memory.arena)
        case "rest":
            await asyncio.sleep(0.001)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_random_use(operations: list[tuple[int, str, int, int]]) -> None:
    async def run() -> None:
        async with opened() as store:
            arena = store.chain.memory.arena
            pods = [Pod(store.sessions.open(HELLO), arena) for _ in range(3)]
            for which, what, number, count in operations:
                await act(store, pods, which, what, number, count)
                store.check()
                await asyncio.sleep(0)
                for pod in pods:
                    await pod.hear()
                    pod.check()
            for pod in pods:
                store.sessions.close(pod.session)
                await pod.session.ended()
            await store.check_empty_handed()

    asyncio.run(run())


async def stored(pod: Pod, ids: list[BlockId]) -> None:
    """Tries until all are there."""
    async with asyncio.timeout(10):
        while any(pod.session._chain.find(block_id) is None for block_id in ids):
            pod.session.begin(pod.ask(ids), ids, ids, SIZE)
            await pod.hear()
            pod.commit(len(ids), give_up=False)
            await asyncio.sleep(0.001)


async def test_loads_give_in_order_what_is_there_and_end_with_a_miss() -> None:
    async with opened() as store:
        pod = Pod(store.sessions.open(HELLO), store.chain.memory.arena)
        await stored(pod, IDS[:6])
        await stored(pod, IDS[7:9])
        pod.session.load(pod.ask(IDS[2:9]), 2, IDS[:9])
        while pod.asked:
            pod.release(1)
            await pod.hear()
            await asyncio.sleep(0)
        assert pod.calls
        store.sessions.close(pod.session)
        await store.check_empty_handed()


async def test_what_is_all_there_comes_at_once_in_one_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "GROW_SECONDS", 60.0)
    async with opened() as store:
        pod = Pod(store.sessions.open(HELLO), store.chain.memory.arena)
        await stored(pod, IDS[:2])
        pod.session.load(1, 0, IDS[:2])
        async with asyncio.timeout(5):
            reply = await pod.session.next_reply()
        assert isinstance(reply, Loaded)
        assert ([slot.info.id for slot in reply.slots], reply.end) == (IDS[:2], True)
        assert pod.session.num_replies == 0
        store.sessions.close(pod.session)
        await store.check_empty_handed()


async def test_a_load_that_waits_for_its_pod_can_be_cancelled() -> None:
    async with opened() as store:
        pod = Pod(store.sessions.open(HELLO), store.chain.memory.arena)
        await stored(pod, IDS[:12])
        call = pod.ask(IDS[:12])
        pod.session.load(call, 0, IDS[:12])
        async with asyncio.timeout(5):
            while pod.pins.total() < 2:  # a quarter of memory
                await pod.hear()
                await asyncio.sleep(0.001)
        pod.session.cancel(call)
        async with asyncio.timeout(5):
            while call in pod.asked:
                await pod.hear()
                await asyncio.sleep(0.001)
        assert pod.session.num_tasks == 0
        pod.check()
        pod.release(pod.pins.total())
        await store.check_empty_handed()


async def test_nothing_is_done_of_a_wrong_message() -> None:
    async with opened() as store:
        pod = Pod(store.sessions.open(HELLO), store.chain.memory.arena)
        ids = IDS[:2]
        pod.session.begin(pod.ask(ids), ids, ids, SIZE)
        await pod.hear()
        one, two = pod.begun
        for offsets, sums, given_up in (
            ([one, two], [1], []),
            ([one, 1], [1, 2], []),
            ([one, one], [1, 2], []),
            ([one], [1], [one]),
            ([], [], [1]),
        ):
            with pytest.raises(InvalidRequest):
                pod.session.commit(offsets, sums, given_up)
        pod.check()
        pod.commit(2, give_up=False)
        pod.session.load(pod.ask(ids), 0, ids)
        await pod.session.ended()
        await pod.hear()
        for wrong in ([one, one], [one, two, 5]):
            with pytest.raises(InvalidRequest):
                pod.session.release(wrong)
        with pytest.raises(InvalidRequest):
            pod.session.corrupt([5])
        pod.check()


async def test_another_sessions_blocks_are_not_ones_own() -> None:
    async with opened() as store:
        arena = store.chain.memory.arena
        pod, other = Pod(store.sessions.open(HELLO), arena), Pod(store.sessions.open(HELLO), arena)
        pod.session.begin(pod.ask(IDS[:1]), IDS[:1], IDS[:1], SIZE)
        await pod.hear()
        with pytest.raises(InvalidRequest):
            other.session.commit(list(pod.begun), [1], [])
        pod.commit(1, give_up=False)
        pod.session.load(pod.ask(IDS[:1]), 0, IDS[:1])
        await pod.session.ended()
        await pod.hear()
        with pytest.raises(InvalidRequest):
            other.session.release(list(pod.pins))


async def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    monkeypatch.setattr(sessions, "MAX_LOADS", 2)
    monkeypatch.setattr(sessions, "MAX_REPLIES", 3)
    async with opened() as store:
        pod = Pod(store.sessions.open(HELLO), store.chain.memory.arena)
        store.sessions.open(HELLO)
        with pytest.raises(Overloaded):
            store.sessions.open(HELLO)
        pod.session.begin(pod.ask(IDS), IDS, IDS, SIZE)
        await pod.hear()
        assert len(pod.begun) == MEMORY_BLOCKS // 2, "half of memory"
        for number in (1, 2):
            pod.session.load(100 + number, 0, [])
        with pytest.raises(InvalidRequest):
            pod.session.load(101, 0, [])
        with pytest.raises(InvalidRequest):
            pod.session.load(103, 0, [])
        pod.session.find(0, 0, [])
        await pod.session.ended()
        waiting = asyncio.create_task(pod.session.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        await pod.session.next_reply()
        await waiting


def test_pace() -> None:
    pace = Pace(1000.0)
    assert pace.bytes_per_second == 1000.0
    for second in range(20):  # two at once, each of a second, one after the other
        pace.begin(2.0 * second)
        pace.begin(2.0 * second)
        pace.end(2.0 * second + 1, 50)
        pace.end(2.0 * second + 1, 50)
    assert pace.bytes_per_second == pytest.approx(100, rel=0.3)
    for second in range(100, 120):
        pace.begin(float(second))
        pace.end(second + 1.0, 500)
    assert pace.bytes_per_second == pytest.approx(500, rel=0.1)
    pace.begin(200.0)
    pace.end(230.0, 0)
    assert pace.bytes_per_second < 100, "what gives nothing takes its time"
