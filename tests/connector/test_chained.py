"""Several stores behind each other, as one."""

import asyncio
import random
import types
from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.ids import BlockId, Fingerprint, PodId
from kvrelay.common.layout import KvDtype, KvLayout
from kvrelay.engine.config import KvStoreOptions
from kvrelay.engine.connector.base import no_pin
from kvrelay.engine.connector.chained import ConnectorChain
from kvrelay.engine.connector.kvstore import KvStoreConnector
from kvrelay.engine.connector.port import identity_of, make_connector
from kvrelay.transfer.block import checksum
from kvrelay.transfer.segments import heads
from tests.connector.hostile import QUICK, access, until
from tests.connector.memory import MemoryConnector, Shelf
from tests.connector.pods import Pod, identity, stock
from tests.connector.stores import running

TOKENS = range(1, 101)
SIZE = identity().size


def waiting() -> random.Random:
    """Whose store's answers wait for the test, and are right."""
    return random.Random(0)


@pytest.fixture
def ids() -> list[BlockId]:
    return stock(Shelf(), TOKENS)


@pytest.mark.unit
class TestChain:
    async def test_the_first_that_has_something_brings_it(self, ids: list[BlockId]) -> None:
        near, far = Shelf(), Shelf()
        chain = ConnectorChain([MemoryConnector(near, identity()), MemoryConnector(far, identity())])
        assert list(await chain.find(ids, 0)) == []
        stock(far, TOKENS)
        runs = await chain.find(ids, 0)
        assert [(run.num_spans, run.source) for run in runs] == [(6, 1)]
        stock(near, TOKENS[:50])
        runs = await chain.find(ids, 0)
        assert [(run.num_spans, run.source) for run in runs] == [(3, 0)]
        assert [run.source for run in await chain.find(ids, 3)] == [1]

    async def test_a_load_goes_to_who_has_it(self, ids: list[BlockId]) -> None:
        near, far = MemoryConnector(Shelf(), identity()), MemoryConnector(Shelf(), identity())
        chain = ConnectorChain([near, far])
        stock(far.shelf, TOKENS)
        load = chain.load(ids, 2, await chain.find(ids, 2))
        assert (near.num_open, far.num_open) == (0, 1)
        spans = await load.next()
        assert [span.info.id for span in spans] == ids[2:6]
        assert all(checksum(span.info, span.data.data) == span.info.checksum for span in spans)
        load.release(spans)
        load.close()
        assert (far.num_open, far.num_given) == (0, 0)

    async def test_all_are_given_what_they_lack(self, ids: list[BlockId]) -> None:
        near, far = MemoryConnector(Shelf(), identity()), MemoryConnector(Shelf(), identity())
        chain = ConnectorChain([near, far])
        stock(near.shelf, TOKENS[:32])
        writing = await chain.begin(ids, heads(ids), SIZE)
        assert [room.index for room in writing.rooms] == [2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
        source = stock_of(ids)
        given_up, written = writing.rooms[1::5], [room for i, room in enumerate(writing.rooms) if i % 5 != 1]
        for room in written:
            room.data[:] = bytearray(source.blocks[ids[room.index]][1])
        writing.commit(written, [source.blocks[ids[room.index]][0].checksum for room in written])
        writing.give_up(given_up)
        assert (near.num_given, far.num_given) == (0, 0)
        assert set(near.shelf.blocks) == {ids[i] for i in (0, 1, 2, 4, 5)}
        assert set(far.shelf.blocks) == {ids[i] for i in (0, 1, 3, 4, 5)}
        assert all(source.blocks[key] == held for store in (near, far) for key, held in store.shelf.blocks.items())

    async def test_who_is_not_ready_is_not_asked(self, ids: list[BlockId]) -> None:
        near, far = MemoryConnector(Shelf(), identity()), MemoryConnector(Shelf(), identity())
        chain = ConnectorChain([near, far])
        for store in (near, far):
            stock(store.shelf, TOKENS[:50])
        near.ready = False
        assert chain.ready
        assert [run.source for run in await chain.find(ids, 0)] == [1]
        assert near.finds == []
        writing = await chain.begin(ids, heads(ids), SIZE)
        assert (near.num_given, far.num_given) == (0, 3)
        writing.give_up(writing.rooms)
        far.ready = False
        assert not chain.ready
        assert list(await chain.find(ids, 0)) == []
        assert list((await chain.begin(ids, heads(ids), SIZE)).rooms) == []

    async def test_a_begin_that_is_cancelled_gives_up_what_it_has(self, ids: list[BlockId]) -> None:
        near, far = MemoryConnector(Shelf(), identity()), MemoryConnector(Shelf(), identity(), waiting())
        begin = asyncio.create_task(ConnectorChain([near, far]).begin(ids, heads(ids), SIZE))
        await until(lambda: near.num_given == 6 and far.num_asked == 1)
        begin.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begin
        assert (near.num_given, far.num_given) == (0, 0)

    async def test_all_begin_and_end_with_it(self) -> None:
        stores = [MemoryConnector(Shelf(), identity()) for _ in range(3)]
        chain = ConnectorChain(stores)
        chain.start()
        assert all(store.started for store in stores)
        stores[0].num_timeouts, stores[2].num_timeouts = 2, 3
        assert chain.num_timeouts == 5
        await chain.close()
        assert all(store.closed for store in stores)


def stock_of(ids: list[BlockId]) -> Shelf:
    shelf = Shelf()
    assert stock(shelf, TOKENS) == ids
    return shelf


@pytest.mark.unit
def test_what_the_options_make() -> None:
    cache = types.SimpleNamespace(dtype=KvDtype.FLOAT32, span_bytes=lambda dtype: 1000 * dtype.itemsize, pin=no_pin)
    layout = KvLayout(fingerprint=Fingerprint("f"), groups=())
    loaded = types.SimpleNamespace(fingerprint=Fingerprint("f"), dtype="float32")
    built: Any = types.SimpleNamespace(cache=cache, layout=layout, loaded=loaded)

    def made(*addresses: str, dtype: str = "auto") -> object:
        return make_connector(KvStoreOptions(addresses=addresses, dtype=dtype), PodId("p"), built)

    assert make_connector(None, PodId("p"), built) is None
    one = made("a:1")
    assert isinstance(one, KvStoreConnector)
    assert (one._access.dtype, one._access.readable) == (KvDtype.FLOAT32, (KvDtype.FLOAT32,))
    eight = made("a:1", dtype="float8_e4m3")
    assert isinstance(eight, KvStoreConnector)
    assert (eight._access.dtype, set(eight._access.readable)) == (
        KvDtype.FLOAT8_E4M3,
        {KvDtype.FLOAT32, KvDtype.FLOAT8_E4M3},
    )
    assert identity_of(built, KvStoreOptions(addresses=(), dtype="float8_e4m3")).size == 1000
    chain = made("a:1", "b:2")
    assert isinstance(chain, ConnectorChain)
    assert [each._access.address for each in chain._connectors if isinstance(each, KvStoreConnector)] == ["a:1", "b:2"]


@pytest.mark.integration
async def test_a_pod_with_a_real_store_and_another_behind_it(tmp_path: Path) -> None:
    far = MemoryConnector(Shelf(), identity())
    stock(far.shelf, TOKENS)
    async with running(tmp_path) as store:
        near = KvStoreConnector(access(store.address, identity()), QUICK)
        pod = Pod(ConnectorChain([near, far]))
        await until(lambda: near.ready)
        first = pod.h.request("a", TOKENS)
        await pod.run(first)
        assert pod.num_computed(first) == 4, "the far one has it"
        fresh = pod.h.request("b", range(200, 300))
        await pod.run(fresh)
        await pod.stored()
        await store.holds(6)
        assert len(far.shelf.blocks) == 12
        await pod.close()
        near = KvStoreConnector(access(store.address, identity()), QUICK)
        far = MemoryConnector(Shelf(), identity())
        other = Pod(ConnectorChain([near, far]), block_size=32, num_blocks=16)
        await until(lambda: near.ready)
        again = other.h.request("b", range(200, 300))
        store_has = other.h.request("a", TOKENS)
        await other.run(again, store_has)
        assert other.num_computed(again) == 4, "the near one has it"
        assert other.num_computed(store_has) == 100, "it was loaded by the first pod, and computed by none"
        for harness, request in ((pod.h, first), (pod.h, fresh), (other.h, again), (other.h, store_has)):
            harness.check_output(request)
        await other.stored()
        other.h.check_empty()
        await other.close()
        await store.is_let_go(num_pods=0)
