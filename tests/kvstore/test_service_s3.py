"""Stores with an S3 tier on a real server: blocks go down into the bucket, come up again, and other nodes read them there."""

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvrelay.kvstore.server import KvStore
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.v1 import kvstore_pb2 as pb
from tests.fixtures_redis import RedisServer
from tests.kvstore.pod import Pod, attached, chain_of, until_stat

if TYPE_CHECKING:  # pytest is to import it first, to rewrite its assertions
    from tests.fixtures_s3 import S3Server

pytestmark = pytest.mark.integration

PAGES = 3 * 4096  # of a block
IDS = chain_of(1, 40)
Options = Callable[[str], KvStoreSettings]


@pytest.fixture
def options(tmp_path: Path, s3_server: "S3Server", redis_server: RedisServer) -> Options:
    """Of a node, by its name: memory for 16 blocks and a bucket that all nodes share."""
    (tmp_path / "id").write_text(s3_server.access_key_id)
    (tmp_path / "secret").write_text(s3_server.secret_access_key)
    bucket: dict[str, Any] = {
        "tier": "s3",
        "bytes": "16MiB",
        "bucket": s3_server.bucket,
        "endpoint": s3_server.endpoint,
        "region": "us-east-1",
        "prefix": uuid.uuid4().hex,
        "access_key_id_file": str(tmp_path / "id"),
        "secret_access_key_file": str(tmp_path / "secret"),
        "timeout_seconds": 2.0,
    }

    def of(name: str) -> KvStoreSettings:
        return KvStoreSettings(
            tiers=[{"tier": "cpu", "bytes": 16 * PAGES, "policy": "lru"}, bucket],  # type: ignore[arg-type]
            grpc_port=0,
            http_port=0,
            redis_url=redis_server.url,
            node_id=name,
            arena_directory=tmp_path,
            peer_transport="none",
        )

    return of


@asynccontextmanager
async def running(*chosen: KvStoreSettings) -> AsyncIterator[list[tuple[KvStore, Pod]]]:
    """Stores, each with a pod."""
    async with AsyncExitStack() as stack:
        found = []
        for settings in chosen:
            store = KvStore(settings)
            stack.push_async_callback(store.stop)
            assert await store.start()
            found.append((store, await stack.enter_async_context(attached(f"127.0.0.1:{store.grpc_port}"))))
        yield found


async def sunk(pod: Pod) -> pb.StatResponse:
    """Memory has given down what it should, and the index has heard of it."""

    def is_so(seen: pb.StatResponse) -> bool:
        memory = seen.tiers[0]
        return memory.used_bytes <= 0.9 * memory.limit_bytes and seen.announcer_backlog == 0

    return await until_stat(pod, is_so)


async def test_blocks_go_into_the_bucket_and_come_back(options: Options) -> None:
    async with running(options("one")) as [(_, pod)]:
        await pod.store_all(IDS)
        await sunk(pod)
        assert {run.tier for run in await pod.find(IDS)} == {pb.TIER_CPU, pb.TIER_S3}
        assert await pod.read(IDS) == 40
        assert (await pod.stat()).tiers[1].counters.hits >= 20
    async with running(options("one")) as [(_, pod)]:
        held = (await pod.stat()).tiers[1].num_blocks
        assert held >= 20, "what was in the bucket is known after a restart"
        assert await pod.read(IDS) >= 20


async def test_another_node_reads_them_there(options: Options) -> None:
    async with running(options("one"), options("two")) as [(_, pod), (_, other)]:
        await pod.store_all(IDS)
        await sunk(pod)
        in_bucket = next(run.num_blocks for run in await pod.find(IDS) if run.tier == pb.TIER_S3)
        assert in_bucket >= 20
        async with asyncio.timeout(10):
            while await other.num_found(IDS) < in_bucket:
                await asyncio.sleep(0.02)
        (run,) = await other.find(IDS)
        assert run.tier == pb.TIER_S3
        assert await other.read(IDS) == run.num_blocks
        seen = await other.stat()
        assert seen.tiers[1].counters.hits == run.num_blocks
        assert seen.tiers[1].counters.corrupt == 0


async def test_compressed_objects_are_their_nodes_own(options: Options) -> None:
    compressed = []
    for name in ("one", "two"):
        plain = options(name)
        memory, bucket = plain.tiers
        tiers = (memory, bucket.model_copy(update={"encoding": "zstd"}))
        compressed.append(plain.model_copy(update={"tiers": tiers}))
    async with running(*compressed) as [(_, pod), (store, other)]:
        await pod.store_all(IDS)
        await sunk(pod)
        assert await pod.read(IDS) == 40
        async with httpx.AsyncClient() as http, asyncio.timeout(10):
            while (
                "kvrelay_kvstore_nodes 1.0" not in (await http.get(f"http://127.0.0.1:{store.http_port}/metrics")).text
            ):
                await asyncio.sleep(0.02)
        assert await other.num_found(IDS) == 0
        assert await other.read(IDS) == 0


async def test_a_bucket_that_is_away_is_shown_and_serving_goes_on(options: Options, s3_server: "S3Server") -> None:
    async with running(options("one")) as [(store, pod)]:
        await pod.store_all(IDS[:20])
        await sunk(pod)
        s3_server.send_signal(signal.SIGSTOP)
        async with httpx.AsyncClient() as http, asyncio.timeout(30):
            ids = chain_of(2, 30)
            while True:
                await pod.store(ids)
                answer = (await http.get(f"http://127.0.0.1:{store.http_port}/readyz")).json()
                if not answer["tiers"][1]["healthy"]:
                    break
                await asyncio.sleep(0.05)
        assert answer["ready"]
        assert answer["tiers"][1]["reason"]
        fresh = chain_of(3, 4)
        assert await pod.store(fresh) == 4, "memory makes room by dropping"
        assert await pod.read(fresh) == 4
        s3_server.send_signal(signal.SIGCONT)
