"""KV stores on the console: asked while somebody looks, told with their tiers, and told as silent where they are so."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvrelay.common.discovery import Registration
from kvrelay.common.ids import Epoch, NodeId
from kvrelay.common.nodes import NodeRecord
from kvrelay.kvstore import audit
from kvrelay.kvstore.server import KvStore
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.router.console import stores
from kvrelay.router.console.state import Console, State
from tests.fixtures_redis import RedisServer
from tests.router.cluster import NO_REDIS, Local, until

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "ASK_SECONDS", 0.2)


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[Local]:
    local = Local(model_dir)
    yield local
    await local.close()


async def started(local: Local, redis_url: str) -> Console:
    router = await local.start(redis_url=redis_url, policy="least_loaded")
    assert router.console is not None
    return router.console


def rows(console: Console) -> list[stores.StoreRow]:
    return msgspec.json.decode(console.document(), type=State).stores


async def test_they_are_asked_only_while_somebody_looks(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "INTEREST_SECONDS", 0.3)
    console = await started(local, NO_REDIS)
    assert not console.busy
    assert rows(console) == []
    assert console.busy
    await until(lambda: not console.busy)
    await until(lambda: not rows(console) and console.busy)


async def test_tiers_of_a_store_and_one_that_is_silent(
    local: Local, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no store is asked for its invariants, whose check takes long."""
    checks: list[object] = []
    monkeypatch.setattr(audit, "violations", lambda *parts: checks.append(parts))
    settings = KvStoreSettings(
        tiers=[
            {"tier": "cpu", "bytes": "1MiB", "policy": "lru"},
            {"tier": "file", "bytes": "4MiB", "directory": str(tmp_path / "blocks"), "policy": "lru"},
        ],
        node_id="n0",
        grpc_port=0,
        http_port=0,
        redis_url=redis_server.url,
        arena_directory=tmp_path,
    )
    silent = NodeRecord(
        node_id=NodeId("n1"), epoch=Epoch("e"), grpc_address="127.0.0.1:1", http_address="127.0.0.1:1", version="test"
    )
    registration = Registration(redis_server.url, "default", silent)
    store = KvStore(settings)
    async with contextlib.AsyncExitStack() as registered, contextlib.AsyncExitStack() as running:
        running.push_async_callback(store.stop)
        registered.push_async_callback(registration.stop)
        assert await store.start()
        registration.start()
        console = await started(local, redis_server.url)
        await until(lambda: [row.id for row in rows(console)] == ["n0", "n1"])
        answering, other = rows(console)
        assert answering.answers
        assert [(tier.tier, tier.limit_bytes, tier.healthy) for tier in answering.tiers][:2] == [
            ("cpu", 1 << 20, True),
            ("file", 4 << 20, True),
        ]
        assert (other.answers, other.tiers) == (False, ())
        await running.aclose()
        await until(lambda: [row.id for row in rows(console)] == ["n1"])
    assert checks == []
