"""The service, in the test's own event loop: what an attached pod stores it finds and loads, whole, from whatever tier."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.common.access import bearer
from kvrelay.common.errors import Draining, InvalidRequest, StaleEpoch, TransferFailed, Unauthenticated
from kvrelay.common.rpc import CHANNEL_OPTIONS, from_rpc_error
from kvrelay.kvstore import audit
from kvrelay.kvstore.server import KvStore
from kvrelay.kvstore.settings import KvStoreSettings
from kvrelay.v1 import kvstore_pb2 as pb
from kvrelay.v1 import kvstore_pb2_grpc
from tests.kvstore.pod import SIZE, attached, chain_of, until_stat

pytestmark = pytest.mark.integration

NO_REDIS = "redis://127.0.0.1:1/0"
PAGES = 3 * 4096  # of a block
MEMORY_BLOCKS = 16


def settings(folder: Path, **options: Any) -> KvStoreSettings:
    memory = {"tier": "cpu", "bytes": MEMORY_BLOCKS * PAGES, "policy": "lru"}
    files = {"tier": "file", "bytes": "4MiB", "directory": str(folder / "blocks"), "policy": "lru"}
    given = {"tiers": [memory, files], "grpc_port": 0, "http_port": 0, "redis_url": NO_REDIS, "arena_directory": folder}
    return KvStoreSettings(**{**given, **options})


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[tuple[KvStore, str]]:
    store = KvStore(settings(folder, **options))
    try:
        assert await store.start()
        yield store, f"127.0.0.1:{store.grpc_port}"
    finally:
        await store.stop()
    assert not [name for name in os.listdir(folder) if name.endswith(".arena")]


async def test_what_is_stored_is_found_and_loaded(tmp_path: Path) -> None:
    ids = chain_of(1, 10)
    async with running(tmp_path) as (_, address), attached(address) as pod:
        assert await pod.find(ids) == []
        assert await pod.store(ids[:7]) == 7
        assert await pod.store(ids[:7]) == 0, "they are there"
        (run,) = await pod.find(ids)
        assert (run.tier, run.num_blocks, run.num_bytes, run.seconds) == (pb.TIER_CPU, 7, 7 * SIZE, 0)
        assert await pod.num_found(ids, first=3) == 4
        assert await pod.read(ids) == 7
        assert await pod.read(ids, first=5) == 2
        assert await pod.read(ids, first=7) == 0
        seen = await until_stat(pod, lambda seen: seen.num_pins == 0)
        assert (seen.num_pods, seen.num_writing, seen.tiers[0].num_blocks) == (1, 0, 7)


async def test_evictions_go_down_and_hits_come_up(tmp_path: Path) -> None:
    chains = [chain_of(number, 6) for number in range(10)]
    async with running(tmp_path) as (_, address), attached(address) as pod:
        for ids in chains:
            await pod.store_all(ids)
        await until_stat(pod, lambda seen: seen.tiers[0].used_bytes <= 0.9 * seen.tiers[0].limit_bytes)
        (run,) = await pod.find(chains[0])
        assert (run.tier, run.num_blocks) == (pb.TIER_FILE, 6)
        assert run.seconds > 0
        for ids in chains:
            assert await pod.read(ids) == 6
        seen = await until_stat(pod, lambda seen: seen.num_pins == 0)
        assert seen.tiers[1].counters.hits >= 40
        assert seen.tiers[0].used_bytes <= seen.tiers[0].limit_bytes


async def test_a_load_larger_than_memory(tmp_path: Path) -> None:
    """It waits for the pod to let go of what it was given."""
    ids = chain_of(1, 4 * MEMORY_BLOCKS)
    async with running(tmp_path) as (_, address), attached(address) as pod:
        await pod.store_all(ids)
        assert await pod.read(ids) == len(ids)
        await until_stat(pod, lambda seen: seen.num_pins == 0)


async def test_only_what_the_pod_can_read_is_found(tmp_path: Path) -> None:
    ids = chain_of(1, 4)
    async with running(tmp_path) as (_, address):
        async with attached(address) as pod:
            await pod.store(ids)
        others: list[dict[str, object]] = [
            {"fingerprint": "b" * 64},
            {"shape": "00112233445566fe"},
            {"readable": ["bfloat16"]},
            {"readable": []},
        ]
        for fields in others:
            async with attached(address, **fields) as pod:
                assert await pod.find(ids) == []
                assert await pod.read(ids) == 0
        async with attached(address, dtype="bfloat16", readable=["bfloat16", "float32"]) as pod:
            blocks = [block async for block in pod.load(ids)]
            assert [block.dtype for block in blocks] == ["float32"] * 4


async def test_corrupt_bytes_are_a_miss_afterwards(tmp_path: Path) -> None:
    ids = chain_of(1, 3)
    async with running(tmp_path) as (_, address), attached(address) as pod:
        await pod.store(ids)
        offsets = [block.offset async for block in pod.load(ids)]
        await pod.say(release=pb.ReleaseBlocks(offsets=offsets))
        pod.arena[offsets[1] + 5000] ^= 4
        assert await pod.read(ids) == 1
        assert await pod.read(ids) == 1, "it is gone"
        seen = await until_stat(pod, lambda seen: seen.num_pins == 0)
        assert seen.tiers[0].counters.corrupt == 1
        assert await pod.store(ids) == 1
        assert await pod.read(ids) == 3


async def test_cancelled_loads_end(tmp_path: Path) -> None:
    ids = chain_of(1, 4 * MEMORY_BLOCKS)
    async with running(tmp_path) as (_, address), attached(address) as pod:
        await pod.store_all(ids)
        offsets = []
        async for block in pod.load(ids):
            if not offsets:  # the load waits now, as nothing is let go of
                await pod.say(cancel=pb.CancelLoad(call=pod.last_call))
            offsets.append(block.offset)
        assert 0 < len(offsets) < len(ids)
        seen = await until_stat(pod, lambda seen: seen.num_pins == len(offsets))
        await pod.say(release=pb.ReleaseBlocks(offsets=offsets))
        seen = await until_stat(pod, lambda seen: seen.num_pins == 0)
        assert seen.num_pods == 1


async def test_what_a_pod_leaves_is_let_go(tmp_path: Path) -> None:
    ids = chain_of(1, 4)
    async with running(tmp_path) as (_, address), attached(address) as other:
        async with attached(address) as pod:
            await pod.store(ids)
            assert len([block async for block in pod.load(ids)]) == 4
            assert min(await pod.begin(chain_of(2, 3))) >= 0
            await until_stat(other, lambda seen: (seen.num_pins, seen.num_writing) == (4, 3))
        seen = await until_stat(other, lambda seen: seen.num_pods == 1)
        assert (seen.num_pins, seen.num_writing) == (0, 0)
        assert await other.num_found(chain_of(2, 3)) == 0, "what was not finished is not there"
        assert await other.read(ids) == 4


WRONG: list[tuple[dict[str, object], str]] = [
    ({"release": pb.ReleaseBlocks(offsets=[0])}, "release.offsets"),
    ({"commit": pb.CommitBlocks(offsets=[4096], checksums=[1])}, "commit.offsets"),
    ({"commit": pb.CommitBlocks(given_up=[4096])}, "commit.offsets"),
    ({"commit": pb.CommitBlocks(offsets=[4096])}, "commit.checksums"),
    ({"corrupt": pb.CorruptBlocks(offsets=[1])}, "corrupt.offsets"),
    ({"find": pb.FindBlocks(ids=b"short")}, "find.ids"),
    ({"load": pb.LoadBlocks(ids=bytes(16 * 65_537))}, "load.ids"),
    ({"begin": pb.BeginBlocks(ids=bytes(16), heads=b"", size=1)}, "begin.heads"),
    ({"begin": pb.BeginBlocks(ids=bytes(16), heads=bytes(16), size=0)}, "begin.size"),
    ({"begin": pb.BeginBlocks(ids=bytes(16), heads=bytes(16), size=1 << 40)}, "begin.size"),
    ({"hello": pb.AttachHello()}, "kind"),
    ({}, "kind"),
]


@pytest.mark.parametrize(("message", "field"), WRONG, ids=[str(number) for number in range(len(WRONG))])
async def test_wrong_messages_end_the_session(tmp_path: Path, message: dict[str, object], field: str) -> None:
    async with running(tmp_path) as (_, address), attached(address) as other, attached(address) as pod:
        await pod.store(chain_of(1, 2))
        await pod.begin(chain_of(2, 2))
        await pod.say(**message)
        error = from_rpc_error(await pod.ended())
        assert isinstance(error, InvalidRequest)
        assert error.param == field
        seen = await until_stat(other, lambda seen: seen.num_pods == 1)
        assert (seen.num_pins, seen.num_writing) == (0, 0)


@pytest.mark.parametrize(
    "fields", [{"pod_id": ""}, {"fingerprint": "f" * 300}, {"shape": "xyz"}, {"dtype": "int4"}, {"readable": ["?"]}]
)
async def test_wrong_hellos_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    async with running(tmp_path) as (_, address):
        with pytest.raises(InvalidRequest):
            async with attached(address, **fields):
                pass


async def test_the_token(tmp_path: Path) -> None:
    async with running(tmp_path, auth_token="secret") as (_, address):
        with pytest.raises(Unauthenticated):
            async with attached(address, token="wrong"):
                pass
        async with attached(address, token="secret") as pod:
            assert await pod.store(chain_of(1, 1)) == 1
            with pytest.raises(grpc.aio.AioRpcError):
                await pod.stub.Remove(pb.RemoveRequest(all=True))
            answer = await pod.stub.Remove(pb.RemoveRequest(all=True), metadata=bearer("secret"))
            assert answer.num_removed == 1


async def test_what_an_operator_asks(tmp_path: Path) -> None:
    chains = [chain_of(number, 6) for number in range(6)]
    everything = {block_id for ids in chains for block_id in ids}
    async with running(tmp_path) as (_, address), attached(address) as pod:
        for ids in chains:
            await pod.store_all(ids)
        await until_stat(pod, lambda seen: seen.tiers[0].used_bytes <= 0.9 * seen.tiers[0].limit_bytes)
        listed = [block async for part in pod.stub.List(pb.ListRequest()) for block in part.blocks]
        assert {block.id for block in listed} == everything
        assert len(listed) == len(everything)
        assert {block.tier for block in listed} == {pb.TIER_CPU, pb.TIER_FILE}
        assert [part async for part in pod.stub.List(pb.ListRequest(fingerprint="x")) if part.blocks] == []
        first = next(block for block in listed if block.tier == pb.TIER_FILE)
        path = next((tmp_path / "blocks").glob(f"*/{first.id.hex()}.kv"))
        whole = bytearray(path.read_bytes())
        whole[5000] ^= 1
        path.write_bytes(whole)
        seen = {part.tier: part async for part in pod.stub.Verify(pb.VerifyRequest())}
        assert (seen[pb.TIER_CPU].num_corrupt, seen[pb.TIER_FILE].num_corrupt) == (0, 1)
        assert seen[pb.TIER_CPU].num_whole + seen[pb.TIER_FILE].num_whole >= len(everything) - 1
        assert not path.exists()
        gone = [chains[0][2], chains[5][3], first.id]
        assert (await pod.stub.Remove(pb.RemoveRequest(ids=b"".join(gone)))).num_removed == len(set(gone)) - 1
        assert (await pod.stub.Remove(pb.RemoveRequest(all=True))).num_removed == len(everything - set(gone))
        stat = await pod.stat()
        assert [tier.num_blocks for tier in stat.tiers] == [0, 0, 0]
        assert [tier.used_bytes for tier in stat.tiers] == [0, 0, 0]


async def test_fetches_that_make_no_sense(tmp_path: Path) -> None:
    async with running(tmp_path) as (store, address), attached(address) as pod:

        async def fetch(epoch: str, blocks: list[pb.FetchBlock]) -> list[int]:
            request = pb.FetchRequest(epoch=epoch, transfer_address=b"nowhere", timeout_ms=100, blocks=blocks)
            try:
                return [place async for answer in pod.stub.Fetch(request) for place in answer.missing]
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

        block = pb.FetchBlock(id=bytes(16), tag=1, size=1)
        with pytest.raises(StaleEpoch):
            await fetch("0" * 16, [block])
        for wrong in (
            [block, block],
            [pb.FetchBlock(id=b"short")],
            [pb.FetchBlock(id=bytes(16), tag=i) for i in range(2000)],
        ):
            with pytest.raises(InvalidRequest):
                await fetch(store.epoch, wrong)
        with pytest.raises(TransferFailed, match="not the address"):
            await fetch(store.epoch, [block])
        assert (await pod.stub.Suspect(pb.SuspectRequest(ids=bytes(16)))).num_removed == 0
        seen = await pod.stat()
        assert list(seen.violations) == []


async def test_readiness_and_metrics(tmp_path: Path) -> None:
    blocked = tmp_path / "blocks"
    blocked.touch()
    async with running(tmp_path) as (store, address), attached(address) as pod, httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{store.http_port}"
        answer = (await http.get(f"{url}/readyz")).json()
        assert answer["ready"]
        memory, files, peers = answer["tiers"]
        assert (memory["tier"], memory["healthy"], files["tier"], files["healthy"]) == ("cpu", True, "file", False)
        assert "blocks" in files["reason"]
        assert (peers["tier"], peers["healthy"]) == ("peer", True)
        assert await pod.store(chain_of(1, 3)) == 3
        assert await pod.read(chain_of(1, 3)) == 3
        text = (await http.get(f"{url}/metrics")).text
        assert 'kvrelay_kvstore_hits_total{tier="cpu"} 3.0' in text
        assert 'kvrelay_kvstore_healthy{tier="file"} 0.0' in text
        assert "kvrelay_kvstore_pods 1.0" in text


async def test_stat_without_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "violations", lambda *_: ["found"])
    async with running(tmp_path) as (_, address), attached(address) as pod:
        assert list((await pod.stub.Stat(pb.StatRequest())).violations) == ["found"]
        unchecked = await pod.stub.Stat(pb.StatRequest(unchecked=True))
        assert (list(unchecked.violations), unchecked.num_pods, len(unchecked.tiers)) == ([], 1, 3)


async def test_draining(tmp_path: Path) -> None:
    """No more pods and blocks; what is being read and written is waited for, and memory goes down."""
    ids = chain_of(1, 6)
    async with running(tmp_path) as (store, address), attached(address) as pod:
        await pod.store(ids)
        offsets = [block.offset async for block in pod.load(ids[:2])]
        begun = await pod.begin(chain_of(2, 1))
        draining = asyncio.create_task(store.drain())
        async with asyncio.timeout(5):
            while await pod.num_found(ids):
                await asyncio.sleep(0.01)
        with pytest.raises(Draining):
            async with attached(address):
                pass
        assert await pod.store(chain_of(3, 1)) == 0
        assert await pod.read(ids) == 0
        assert not draining.done()
        await pod.say(commit=pb.CommitBlocks(offsets=begun, checksums=[pod.write(chain_of(2, 1)[0], begun[0])]))
        await pod.say(release=pb.ReleaseBlocks(offsets=offsets))
        async with asyncio.timeout(5):
            await draining
        assert (await pod.stat()).tiers[1].num_blocks == 7
    async with running(tmp_path) as (_, address), attached(address) as pod:
        assert await pod.read(ids) == 6
        assert await pod.read(chain_of(2, 1)) == 1


async def test_a_node_is_one_process(tmp_path: Path) -> None:
    async with running(tmp_path, node_id="n0"):
        second = KvStore(settings(tmp_path, node_id="n0"))
        try:
            with pytest.raises(Exception, match="another process is node n0"):
                await second.start()
        finally:
            await second.stop()


async def test_services_are_described(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as (_, address),
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="kvrelay.v1.KvStore"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await kvstore_pb2_grpc.KvStoreStub(channel).Stat(pb.StatRequest())).node_id.startswith("kvstore-")
