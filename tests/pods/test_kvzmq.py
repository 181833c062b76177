"""KV events by ZeroMQ, read as vLLM's subscribers do, over real sockets."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvrelay.cli.ports import free_ports
from kvrelay.common.errors import Internal
from kvrelay.common.kvevents import AllBlocksCleared, BlockRemoved, BlockStored
from kvrelay.common.rpc import CHANNEL_OPTIONS
from kvrelay.engine.pod.kvevents import EventLog, event_log
from kvrelay.engine.pod.kvzmq import END, ZmqPublisher
from kvrelay.engine.pod.vllmevents import Form
from tests.fixtures_redis import RedisServer
from tests.kvevents import engine, key, stored
from tests.pods.harness import Caller, request, settings

pytestmark = pytest.mark.integration

SECONDS = 5.0


# The schema as its readers declare it, in both forms.


class Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class StoredArray(Stored, tag="BlockStored", array_like=True, omit_defaults=True):
    pass


class RemovedArray(Removed, tag="BlockRemoved", array_like=True):
    pass


class ClearedArray(Cleared, tag="AllBlocksCleared", array_like=True):
    pass


class BatchArray(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


DECODERS: dict[Form, msgspec.msgpack.Decoder[Any]] = {
    "map": msgspec.msgpack.Decoder(Batch),
    "array": msgspec.msgpack.Decoder(BatchArray),
}


class Subscriber:
    """Numbers and batches as they arrive; asks for what it missed."""

    def __init__(self, context: zmq.asyncio.Context, publisher: ZmqPublisher, form: Form) -> None:
        self._decoder = DECODERS[form]
        self.sub = context.socket(zmq.SUB)
        self.sub.subscribe(b"kv@")
        self.sub.connect(publisher.endpoint)
        self.ask = context.socket(zmq.DEALER)
        assert publisher.replay_endpoint is not None
        self.ask.connect(publisher.replay_endpoint)

    async def next(self) -> tuple[bytes, int, Any]:
        async with asyncio.timeout(SECONDS):
            topic, number, payload = await self.sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), self._decoder.decode(payload)

    async def replay(self, first: int) -> list[tuple[int, Any]]:
        await self.ask.send_multipart((b"", first.to_bytes(8, "big")))
        told = []
        async with asyncio.timeout(SECONDS):
            while True:
                empty, number, payload = await self.ask.recv_multipart()
                assert empty == b""
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert payload == b""
                    return told
                told.append((int.from_bytes(number, "big"), self._decoder.decode(payload)))

    async def joined(self, log: EventLog) -> int:
        """Publishes until the first message arrives: a subscription takes effect when it will. Its number."""
        while not await self.sub.poll(10):
            log.take((stored(1),))
        return (await self.next())[1]


@asynccontextmanager
async def publishing(form: Form, **options: Any) -> AsyncIterator[tuple[EventLog, Subscriber]]:
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", form=form, **options)
    log = EventLog(engine("one", "e1"), (publisher,))
    log.start()
    context = zmq.asyncio.Context()
    try:
        yield log, Subscriber(context, publisher, form)
    finally:
        context.destroy(linger=0)
        await log.stop()


@pytest.mark.parametrize("form", ["map", "array"])
async def test_a_subscriber_of_vllm_understands(form: Form) -> None:
    async with publishing(form) as (log, subscriber):
        last = await subscriber.joined(log)
        tokens = tuple(range(64))
        log.take(
            (
                BlockStored(parent=key(0), keys=(key(5), key(6)), token_ids=tokens, block_size=32),
                BlockRemoved(keys=(key(7),)),
                BlockStored(
                    parent=key(6), keys=(key(8), key(9)), token_ids=tokens, block_size=32, extra_keys=("salt:a",)
                ),
                AllBlocksCleared(),
            )
        )
        while True:
            topic, number, batch = await subscriber.next()
            assert (topic, number) == (b"kv@one@model", last := last + 1)
            if number == log.num_batches:
                break
        assert batch.data_parallel_rank == 0
        assert batch.ts > 1e9
        first, removed, salted, cleared = batch.events
        assert (first.block_hashes, first.parent_block_hash) == ([key(5), key(6)], None)
        assert (first.token_ids, first.block_size) == (list(tokens), 32)
        assert (first.lora_id, first.lora_name, first.medium, first.extra_keys) == (None, None, "GPU", None)
        assert (removed.block_hashes, removed.medium) == ([key(7)], "GPU")
        assert (salted.parent_block_hash, salted.extra_keys) == (key(6), [("salt:a",), ("salt:a",)])
        assert isinstance(cleared, Cleared)


@pytest.mark.parametrize("form", ["map", "array"])
async def test_what_was_missed_is_told_again(form: Form) -> None:
    async with publishing(form) as (log, subscriber):
        for number in range(1, 301):
            log.take((stored(number),))
        told = await subscriber.replay(0)
        assert [number for number, _ in told] == list(range(301))
        assert isinstance(told[0][1].events[0], Cleared), "what an earlier life told is void"
        assert [batch.events[0].block_hashes for _, batch in told[1:]] == [[key(number)] for number in range(1, 301)]
        assert [number for number, _ in await subscriber.replay(298)] == [298, 299, 300]
        assert await subscriber.replay(301) == []


async def test_a_gap_after_a_pause() -> None:
    async with publishing("map") as (log, subscriber):
        last = await subscriber.joined(log)
        subscriber.sub.unsubscribe(b"kv@")
        log.take((stored(50),))
        subscriber.sub.subscribe(b"kv@")
        seen = await subscriber.joined(log)
        while seen <= last:
            seen = await subscriber.joined(log)
        missed = {number for number, _ in await subscriber.replay(last + 1)}
        assert missed >= set(range(last + 1, seen))


async def test_a_pod_from_its_command_line(redis_server: RedisServer) -> None:
    """On the event loop that pods run on."""
    context = zmq.asyncio.Context()
    ports = free_ports(3)
    options = ["--engine", "fake", "--role", "both", "--grpc-port", str(ports[0]), "--redis-url", redis_server.url]
    options += ["--kv-events-zmq", f"tcp://*:{ports[1]}", "--kv-events-zmq-replay", f"tcp://127.0.0.1:{ports[2]}"]
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvrelay.decode.main", *options)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}", options=CHANNEL_OPTIONS) as channel:
            async with asyncio.timeout(20):
                await channel.channel_ready()
            caller = Caller(channel)
            async with caller.stream() as reader:
                await caller.reserve(request("a", length=100), local=True)
                await reader.until_finished("a")
        ask = context.socket(zmq.DEALER)
        ask.connect(f"tcp://127.0.0.1:{ports[2]}")
        await ask.send_multipart((b"", bytes(8)))
        async with asyncio.timeout(SECONDS):
            answers = [await ask.recv_multipart() for _ in range(3)]
        cleared, batch = (DECODERS["map"].decode(answer[2]).events for answer in answers[:2])
        assert cleared == [Cleared()]
        (event,) = batch
        assert (len(event.block_hashes), event.token_ids, event.block_size) == (6, list(range(3, 99)), 16)
        assert answers[2][1] == END
        child.terminate()
        async with asyncio.timeout(20):
            assert await child.wait() == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
        context.destroy(linger=0)


async def test_only_the_newest_batches_are_kept() -> None:
    async with publishing("map", replay_batches=10) as (log, subscriber):
        for number in range(1, 101):
            log.take((stored(number),))
        assert [number for number, _ in await subscriber.replay(0)] == list(range(91, 101))


@pytest.mark.parametrize("frames", [(b"",), (b"", b"short"), (b"", bytes(8), b"more"), (b"x",)])
async def test_what_is_no_request_is_passed_over(frames: tuple[bytes, ...]) -> None:
    async with publishing("map") as (log, subscriber):
        log.take((stored(1),))
        await subscriber.ask.send_multipart(frames)
        assert [number for number, _ in await subscriber.replay(0)] == [0, 1]


async def test_it_connects_where_the_subscriber_listens() -> None:
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"mine")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    log = EventLog(engine("one", "e1"), (ZmqPublisher(f"tcp://127.0.0.1:{port}", topic="mine"),))
    log.start()
    try:
        async with asyncio.timeout(SECONDS):
            while not await sub.poll(10):
                log.take((stored(1),))
            topic, _, payload = await sub.recv_multipart()
        assert topic == b"mine"
        assert DECODERS["map"].decode(payload).events
    finally:
        await log.stop()
        context.destroy(linger=0)


async def test_an_endpoint_that_cannot_be_had() -> None:
    first = ZmqPublisher("tcp://127.0.0.1:*")
    first.start(engine("one", "e1").info)
    taken = first.endpoint
    second = ZmqPublisher("tcp://127.0.0.1:*", taken)
    with pytest.raises(Internal, match="ZMQ"):
        second.start(engine("two", "e1").info)
    await second.stop()
    await first.stop()


async def test_by_the_options() -> None:
    log = event_log(settings(kv_events_zmq="tcp://127.0.0.1:*", kv_events_zmq_format="array"), engine("one", "e1"))
    kinds = [type(publisher).__name__ for publisher in log.publishers]
    assert kinds == ["RedisPublisher", "ZmqPublisher"]
    await log.stop()
    off = settings(kv_events=False)
    assert event_log(off, engine("one", "e1")).publishers == []
    assert not off.tells_kv_events
    assert settings(kv_events=False, kv_events_zmq="tcp://*:1").tells_kv_events
    with pytest.raises(ValueError, match="--kv-events-zmq-replay needs"):
        settings(kv_events_zmq_replay="tcp://*:1")
