"""A pod's KV events, from its engine on: numbers, snapshots by gRPC, and an engine with a model whose cache they describe."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import msgspec
import pytest

from kvrelay.common.access import PodAccess
from kvrelay.common.blocks import BlockHasher
from kvrelay.common.errors import Internal, Unsupported
from kvrelay.common.ids import BlockId
from kvrelay.common.kvevents import AllBlocksCleared, BlockRemoved, EventBatch, decode_batch, encode_batch
from kvrelay.common.rpc import CHANNEL_OPTIONS
from kvrelay.common.telemetry import exposition
from kvrelay.engine.client import AsyncEngine
from kvrelay.engine.messages import EngineInfo
from kvrelay.engine.pod import control
from kvrelay.engine.pod.kvevents import EventLog
from kvrelay.engine.pod.metrics import pod_registry
from kvrelay.engine.pod.server import Pod
from kvrelay.router.snapshots import Snapshot, Snapshots
from tests.engine.tiny import make
from tests.kvevents import engine, key, stored
from tests.pods.harness import Caller, request, running, settings

pytestmark = pytest.mark.integration


class Kept:
    """A publisher that keeps what it is told."""

    num_dropped = 0

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []

    def start(self, info: EngineInfo) -> None:
        pass

    def publish(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    async def stop(self) -> None:
        pass

    def keys(self, sequence: int) -> set[BlockId]:
        """What the batches up to this one leave; checks their numbers, and that nothing comes or goes twice."""
        assert [batch.sequence for batch in self.batches] == list(range(1, len(self.batches) + 1))
        keys: set[BlockId] = set()
        for batch in self.batches[:sequence]:
            for event in batch.events:
                match event:
                    case AllBlocksCleared():
                        keys.clear()
                    case BlockRemoved():
                        assert keys >= set(event.keys)
                        keys -= set(event.keys)
                    case _:
                        assert keys.isdisjoint(event.keys)
                        keys |= set(event.keys)
        return keys


@pytest.mark.unit
def test_batches_are_numbered_and_summed_up() -> None:
    kept = Kept()
    log = EventLog(engine("one", "e1"), (kept,))
    assert log.snapshot().sequence == 0
    log.take(())
    log.take((stored(1, 2), BlockRemoved(keys=(key(1),))))
    log.take((AllBlocksCleared(), stored(3)))
    taken = log.snapshot()
    log.take((stored(4),))
    assert (taken.epoch, taken.sequence, set(taken.keys)) == ("e1", 2, {key(3)})
    assert [(batch.epoch, batch.sequence) for batch in kept.batches] == [("e1", 1), ("e1", 2), ("e1", 3)]
    assert kept.keys(2) == set(taken.keys)
    assert decode_batch(encode_batch(kept.batches[0])).events == kept.batches[0].events


async def snapshot(pod: Pod) -> Snapshot:
    """As a router takes it."""
    return await Snapshots(PodAccess())(pod._record())


def _keys(taken: Snapshot) -> list[BlockId]:
    return [key for piece in taken.pieces for key in piece]


async def test_a_snapshot_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests come and blocks go."""
    monkeypatch.setattr(control, "KEYS_PER_PIECE", 3)
    options = {"step_ms": 0.0, "num_blocks": 64, "block_size": 32}
    async with running("both", options) as pod, pod.caller.stream() as reader:
        kept = Kept()
        pod.pod._events.publishers = (kept,)
        assert _keys(await snapshot(pod.pod)) == []
        names = [f"r{number}" for number in range(30)]

        async def ask() -> None:
            for number, name in enumerate(names):
                await pod.caller.reserve(request(name, length=330 + 18 * number, max_tokens=2), local=True)
                await reader.until_finished(*names[: number + 1])

        asking = asyncio.create_task(ask())
        taken = [await snapshot(pod.pod)]
        while not asking.done():
            taken.append(await snapshot(pod.pod))
        await asking
        taken.append(await snapshot(pod.pod))
        assert len({each.sequence for each in taken}) > 2
        for each in taken:
            assert each.epoch == pod.engine.info.epoch
            assert len(_keys(each)) == len(set(_keys(each)))
            assert set(_keys(each)) == kept.keys(each.sequence)
        assert len(_keys(taken[-1])) == (await pod.caller.inspect()).cached_blocks > 20
        assert all(len(piece) <= 3 for each in taken for piece in each.pieces)


async def test_the_fake_evicts_when_its_pool_is_full() -> None:
    async with running("both", {"step_ms": 0.0, "num_blocks": 16}) as pod, pod.caller.stream() as reader:
        kept = Kept()
        pod.pod._events.publishers = (kept,)
        for number in range(4):
            prompt = tuple(range(160 * number, 160 * (number + 1)))
            wanted = msgspec.structs.replace(request(f"r{number}", max_tokens=1), prompt_token_ids=prompt)
            await pod.caller.reserve(wanted, local=True)
            await reader.until_finished(f"r{number}")
        await pod.caller.until_free()
        assert len(kept.keys(len(kept.batches))) == 16
        removed = [event for batch in kept.batches for event in batch.events if isinstance(event, BlockRemoved)]
        assert sum(len(event.keys) for event in removed) == 40 - 16


async def test_a_pod_that_does_not_follow_its_cache() -> None:
    async with running("decode", kv_events=False) as pod:
        with pytest.raises(Unsupported, match="kv-events"):
            await snapshot(pod.pod)


async def test_a_snapshot_larger_than_the_pod_is_refused() -> None:
    async with running("decode", {"num_blocks": 2}) as pod:
        pod.pod._events.take((stored(1, 2, 3),))
        with pytest.raises(Internal, match="over 2 blocks"):
            await snapshot(pod.pod)


async def test_events_are_counted() -> None:
    async with running("decode") as pod:
        pod.pod._events.take((stored(1),))
        registry = pod_registry(pod.engine, pod.pod.state, pod.pod._routes, pod.pod._events, "model", "decode")
        text = exposition(registry).decode()
        assert "kvrelay_pod_kv_event_batches_total 1.0" in text
        assert "kvrelay_pod_kv_event_batches_dropped_total 0.0" in text


@contextlib.asynccontextmanager
async def with_model(folder: Path, **options: object) -> AsyncIterator[tuple[Pod, Caller]]:
    chosen = settings(
        role="both", engine="process", model=folder, threads=1, max_num_seqs=8, host="127.0.0.1", **options
    )
    pod = Pod(chosen, AsyncEngine(chosen.engine_config(), chosen.make_pod_id()))
    try:
        assert await pod.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{pod.grpc_port}", options=CHANNEL_OPTIONS) as channel:
            yield pod, Caller(channel)
    finally:
        await pod.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, "llama")
    return path


@pytest.mark.parametrize("block_size", [16, 32])
async def test_the_keys_are_those_of_what_a_model_has_computed(folder: Path, block_size: int) -> None:
    async with (
        with_model(folder, kv_cache_bytes=4 << 20, block_size=block_size) as (pod, caller),
        caller.stream() as reader,
    ):
        expected: set[BlockId] = set()
        hasher = BlockHasher(pod._engine.info.fingerprint)
        for number, length in enumerate((50, 100, 70, 128)):
            wanted = request(f"r{number}", length=length, max_tokens=20, ignore_eos=True)
            await caller.reserve(wanted, local=True)
            await reader.until_finished(f"r{number}")
            computed = (*wanted.prompt_token_ids, *reader.tokens(f"r{number}"))[:-1]
            ids: list[BlockId] = []
            hasher.extend(ids, computed)
            spans = block_size // 16
            expected |= set(ids[spans - 1 :: spans])
        await caller.until_free()
        assert set(_keys(await snapshot(pod))) == expected
        assert (await caller.inspect()).cached_blocks == len(expected)


async def test_the_keys_are_as_many_as_the_pool_has_while_it_evicts(folder: Path) -> None:
    """An engine process whose pool holds few of the prompts."""
    async with with_model(folder, kv_cache_bytes=80_000) as (pod, caller), caller.stream() as reader:
        kept = Kept()
        pod._events.publishers = (kept,)
        names = []
        for number in range(12):
            names.append(name := f"r{number}")
            wanted = request(name, length=60 + 5 * (number % 5), max_tokens=9, ignore_eos=True)
            shifted = tuple(3 + (token + 17 * (number % 4)) % 120 for token in wanted.prompt_token_ids)
            await caller.reserve(msgspec.structs.replace(wanted, prompt_token_ids=shifted), local=True)
            await reader.until_finished(name)
        await caller.until_free()
        taken = await snapshot(pod)
        assert set(_keys(taken)) == kept.keys(taken.sequence) == kept.keys(len(kept.batches))
        assert len(_keys(taken)) == (await caller.inspect()).cached_blocks
        assert any(isinstance(event, BlockRemoved) for batch in kept.batches for event in batch.events)
