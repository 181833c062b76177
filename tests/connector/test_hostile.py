"""The connector against a store that lies, is silent, or hangs up: nothing is believed that cannot be true, nothing waits for ever, and
what was granted is given back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvrelay.engine.connector import kvstore, session
from kvrelay.engine.connector.base import Memory
from kvrelay.engine.connector.kvstore import KvStoreConnector
from kvrelay.kvstore.sessions import HERE, MAX_BLOCKS, NO_ROOM
from kvrelay.transfer.segments import heads
from kvrelay.v1 import kvstore_pb2 as pb
from tests.connector.hostile import (
    ARENA_BYTES,
    FOUND,
    QUICK,
    SIZE,
    HostileStore,
    access,
    attached,
    block_at,
    kind,
    serving,
    until,
)
from tests.kvstore.pod import chain_of

pytestmark = pytest.mark.integration

IDS = chain_of(1, 8)
PAGE = 12_288


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore, "FIND_SECONDS", 0.1)
    monkeypatch.setattr(kvstore, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(kvstore, "COOL_SECONDS", 0.2)


@pytest.fixture
async def store(tmp_path: Path) -> HostileStore:
    return HostileStore(tmp_path)


@pytest.fixture
async def connector(store: HostileStore) -> AsyncIterator[KvStoreConnector]:
    async with serving(store) as address, attached(address, kind()) as connector:
        yield connector


LIES = {
    "beyond the arena": [block_at(ARENA_BYTES - SIZE + 1)],
    "far beyond": [block_at(2**64 - 1)],
    "nothing in it": [block_at(0, size=0)],
    "larger than the arena": [block_at(0, size=ARENA_BYTES + 1)],
    "of another dtype": [block_at(0, dtype="bfloat16")],
    "of no dtype": [block_at(0, dtype="int3")],
    "of another encoding": [block_at(0, encoding=pb.ENCODING_ZSTD)],
    "of no encoding": [block_at(0, encoding=pb.ENCODING_UNSPECIFIED)],
    "too many": [block_at(0)] * 9,
    "one of them wrong": [block_at(0), block_at(2**40)],
}


@pytest.mark.parametrize("blocks", LIES.values(), ids=LIES)
async def test_blocks_that_cannot_be(
    store: HostileStore, connector: KvStoreConnector, blocks: list[pb.LoadedBlock]
) -> None:
    load = connector.load(IDS, 0, FOUND)
    call = (await store.hears("load")).load.call
    store.say(loaded=pb.Loaded(call=call, blocks=blocks))
    assert list(await load.next()) == []
    load.close()
    assert not connector.ready, "it is not to be trusted for a while"
    await until(lambda: store.num_sessions == 2 and connector.ready)


@pytest.mark.parametrize(
    "offsets", [[0] * 9, [ARENA_BYTES - SIZE + 1], [0, 2**62]], ids=["too many", "beyond the arena", "far beyond"]
)
async def test_rooms_that_cannot_be(store: HostileStore, connector: KvStoreConnector, offsets: list[int]) -> None:
    begin = asyncio.create_task(connector.begin(IDS, heads(IDS), SIZE))
    call = (await store.hears("begin")).begin.call
    store.say(begun=pb.Begun(call=call, offsets=offsets))
    assert list((await begin).rooms) == []
    await until(lambda: store.num_sessions == 2 and connector.ready)


async def test_answers_that_no_one_asked_for(store: HostileStore, connector: KvStoreConnector) -> None:
    """They grant something, which is given back; the session goes on."""
    store.say(found=pb.Found(call=77, runs=[pb.FoundRun(tier=pb.TIER_CPU, num_blocks=3)]))
    store.say(loaded=pb.Loaded(call=77, blocks=[block_at(0), block_at(PAGE)], end=True))
    store.say(begun=pb.Begun(call=77, offsets=[2 * PAGE, -1, -2]))
    await until(lambda: store.released() == [0, PAGE] and store.given_up() == [2 * PAGE])
    assert store.num_sessions == 1
    assert connector.ready


async def test_an_answer_that_comes_twice(store: HostileStore, connector: KvStoreConnector) -> None:
    find = asyncio.create_task(connector.find(IDS, 0))
    call = (await store.hears("find")).find.call
    for tier in (pb.TIER_FILE, 9):
        store.say(found=pb.Found(call=call, runs=[pb.FoundRun(tier=tier, num_blocks=2)]))  # type: ignore[arg-type]
    assert [(run.tier, run.num_spans) for run in await find] == [("file", 2)]
    begin = asyncio.create_task(connector.begin(IDS[:1], IDS[:1], SIZE))
    call = (await store.hears("begin")).begin.call
    for offset in (0, PAGE):
        store.say(begun=pb.Begun(call=call, offsets=[offset]))
    writing = await begin
    await until(lambda: store.given_up() == [PAGE])
    writing.give_up(writing.rooms)
    await until(lambda: store.given_up() == [0, PAGE])


async def test_a_message_of_no_kind_ends_the_session(store: HostileStore, connector: KvStoreConnector) -> None:
    store.say(attached=pb.Attached())
    await until(lambda: store.num_sessions == 2 and connector.ready)


async def test_a_silent_store_is_left_alone(store: HostileStore, connector: KvStoreConnector) -> None:
    async with asyncio.timeout(2):
        assert list(await connector.find(IDS, 0)) == []
    assert (connector.num_timeouts, connector.ready) == (1, False)
    assert list(await connector.find(IDS, 0)) == [], "at once: it is not asked"
    assert len(store.of("find")) == 1
    store.say(found=pb.Found(call=store.of("find")[0].find.call, runs=[pb.FoundRun(num_blocks=8)]))
    await until(lambda: connector.ready)
    assert store.num_sessions == 1


async def test_rooms_that_come_late_are_given_up(store: HostileStore, connector: KvStoreConnector) -> None:
    assert list((await connector.begin(IDS, heads(IDS), SIZE)).rooms) == []
    assert connector.num_timeouts == 1
    store.say(begun=pb.Begun(call=store.of("begin")[0].begin.call, offsets=[0, -1, PAGE, -2]))
    await until(lambda: store.given_up() == [0, PAGE])


async def test_blocks_that_come_late_are_released(store: HostileStore, connector: KvStoreConnector) -> None:
    load = connector.load(IDS, 2, FOUND)
    call = (await store.hears("load")).load.call
    store.say(loaded=pb.Loaded(call=call, blocks=[block_at(0)]))
    (span,) = await load.next()
    assert span.info.id == IDS[2]
    assert list(await load.next()) == [], "none in time"
    load.release([span])
    store.say(loaded=pb.Loaded(call=call, blocks=[block_at(PAGE)]))
    await until(lambda: not load._answers.empty())  # type: ignore[attr-defined]
    load.close()
    assert (await store.hears("cancel")).cancel.call == call
    store.say(loaded=pb.Loaded(call=call, blocks=[block_at(2 * PAGE)], end=True))
    await until(lambda: store.released() == [0, PAGE, 2 * PAGE])
    assert store.num_sessions == 1


async def test_a_cancelled_begin_gives_up_what_came_in_the_same_moment(
    store: HostileStore, connector: KvStoreConnector
) -> None:
    begin = asyncio.create_task(connector.begin(IDS, heads(IDS), SIZE))
    call = (await store.hears("begin")).begin.call
    attachment = connector._session
    assert attachment is not None
    attachment.receive(pb.AttachResponse(begun=pb.Begun(call=call, offsets=[0, PAGE])))
    begin.cancel()  # the answer is there, and whoever waited for it is cancelled before it wakes
    with pytest.raises(asyncio.CancelledError):
        await begin
    await until(lambda: store.given_up() == [0, PAGE])


async def test_rooms_and_blocks_of_a_session_that_ends_are_not_touched(
    store: HostileStore, connector: KvStoreConnector
) -> None:
    """The store gives them to others when the stream has ended."""
    begin = asyncio.create_task(connector.begin(IDS, heads(IDS), SIZE))
    load = connector.load(IDS, 0, FOUND)
    begin_call, load_call = (await store.hears("begin")).begin.call, (await store.hears("load")).load.call
    attachment = connector._session
    assert attachment is not None
    attachment.receive(pb.AttachResponse(begun=pb.Begun(call=begin_call, offsets=[0])))
    attachment.receive(pb.AttachResponse(loaded=pb.Loaded(call=load_call, blocks=[block_at(PAGE)])))
    attachment.lose()
    assert list((await begin).rooms) == []
    assert list(await load.next()) == []
    load.close()
    await until(lambda: store.num_sessions == 2 and connector.ready)


async def test_the_stream_ends_while_a_block_is_read(store: HostileStore, connector: KvStoreConnector) -> None:
    """The pod does not attach anew before it has let go of the old arena."""
    load = connector.load(IDS, 0, FOUND)
    call = (await store.hears("load")).load.call
    store.say(loaded=pb.Loaded(call=call, blocks=[block_at(0)]))
    spans = await load.next()
    store.hang_up()
    await until(lambda: not connector.ready)
    assert list(await load.next()) == [], "the rest is not waited for"
    assert list((await connector.begin(IDS, heads(IDS), SIZE)).rooms) == []
    assert list(await connector.find(IDS, 0)) == []
    assert store.num_sessions == 1
    load.release(spans)
    load.close()
    await until(lambda: store.num_sessions == 2 and connector.ready)


async def test_an_arena_of_another_size(store: HostileStore) -> None:
    store.said_bytes = ARENA_BYTES + 4096
    async with serving(store) as address:
        connector = KvStoreConnector(access(address, kind()), QUICK)
        connector.start()
        await until(lambda: store.num_sessions >= 3)
        assert not connector.ready
        store.path.unlink()
        seen = store.num_sessions
        await until(lambda: store.num_sessions >= seen + 2)
        assert not connector.ready
        store.said_bytes = ARENA_BYTES
        store.path.write_bytes(bytes(ARENA_BYTES))
        await until(lambda: connector.ready)
        await connector.close()


async def test_blocks_larger_than_the_arena_are_not_offered(store: HostileStore, connector: KvStoreConnector) -> None:
    """The store would end the session."""
    writing = await connector.begin(IDS, heads(IDS), ARENA_BYTES + 1)
    assert list(writing.rooms) == []
    assert list(await connector.find(IDS, 8)) == [], "nothing is left to be found"
    assert store.heard == []


async def test_a_store_that_reads_nothing_is_given_up(store: HostileStore, connector: KvStoreConnector) -> None:
    """Messages that wait to be written are bounded."""
    attachment = connector._session
    assert attachment is not None
    while not attachment.lost:
        attachment.corrupt([1])
    assert not connector.ready
    await until(lambda: store.num_sessions == 2 and connector.ready)


async def test_the_arena_is_pinned_while_it_is_used(store: HostileStore) -> None:
    """All of it, before anyone asks for a part, until the last part was given back."""
    pinned: list[int] = []

    def pin(arena: Memory) -> Callable[[], None]:
        pinned.append(len(arena))
        return pinned.clear

    async with serving(store) as address:
        connector = KvStoreConnector(access(address, kind()), QUICK, pin)
        connector.start()
        await until(lambda: connector.ready)
        assert pinned == [ARENA_BYTES]
        load = connector.load(IDS, 0, FOUND)
        call = (await store.hears("load")).load.call
        store.say(loaded=pb.Loaded(call=call, blocks=[block_at(0)]))
        spans = await load.next()
        assert len(spans) == 1
        store.hang_up()
        await until(lambda: not connector.ready)
        assert pinned == [ARENA_BYTES], "a part of it is being read"
        load.release(spans)
        load.close()
        await until(lambda: store.num_sessions == 2 and connector.ready)
        assert pinned == [ARENA_BYTES], "the next session's"
        await connector.close()
        assert pinned == []


async def test_no_store_at_all_and_a_close_meanwhile() -> None:
    connector = KvStoreConnector(access("127.0.0.1:1", kind()), QUICK)
    connector.start()
    assert list(await connector.find(IDS, 0)) == []
    assert list(await connector.load(IDS, 0, FOUND).next()) == []
    async with asyncio.timeout(10):
        await connector.close()
    assert not connector.ready


async def test_a_chain_too_long_for_a_message_is_cut(
    store: HostileStore, connector: KvStoreConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the store would end the session."""
    monkeypatch.setattr(kvstore, "FIND_SECONDS", 20.0)
    ids = IDS * (MAX_BLOCKS // 8 + 1)
    assert list(await connector.find(ids, MAX_BLOCKS)) == [], "not asked"
    find = asyncio.create_task(connector.find(ids, 5))
    heard = (await store.hears("find")).find
    assert len(heard.ids) == 16 * MAX_BLOCKS
    store.say(found=pb.Found(call=heard.call))
    assert list(await find) == []
    connector.load(ids, 5, FOUND).close()
    assert len((await store.hears("load")).load.ids) == 16 * MAX_BLOCKS


def test_both_sides_mean_the_same() -> None:
    assert kvstore.MAX_IDS == MAX_BLOCKS
    assert session.NO_ROOM == NO_ROOM != HERE
