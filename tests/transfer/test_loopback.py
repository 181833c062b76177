"""Pushes between two ports of one process, over the loopback twin."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import TypeVar

import numpy as np
import pytest

from kvrelay.common.errors import (
    Cancelled,
    IncompatibleLayout,
    Internal,
    KvrelayError,
    StaleEpoch,
    TransferFailed,
)
from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.layout import KvDtype, KvLayout
from kvrelay.common.request import Ticket
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.frame import HEADER_BYTES, IS_HEADER, MAX_FINAL_BYTES, FinalFrame
from kvrelay.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kvrelay.transfer.port import PortConfig, TransferPort
from kvrelay.transfer.sender import PushHandle
from kvrelay.transfer.transport import Buffer, Memory
from tests.transfer.kv import ArraySink, ArraySource, feed, kv_of, make_final, make_layout, make_ticket

pytestmark = pytest.mark.unit

T = TypeVar("T")
LAYERS = 4
ROW = 2 * 2 * 8 * 4
CONFIG = PortConfig(frame_bytes=10 * ROW, staging_bytes=1 << 16, depth=3, handshake_seconds=0.3, grace_seconds=0.05)


def port_on(
    network: LoopbackNetwork, pod: str, epoch: str = "e1", layout: KvLayout | None = None, config: PortConfig = CONFIG
) -> TransferPort:
    port = TransferPort(network.transport(), PodId(pod), Epoch(epoch), layout or make_layout(LAYERS), config)
    port.start()
    return port


@dataclasses.dataclass
class Pair:
    """A sender's port `p` and a receiver's port `d`, and how a test pushes from one to the other."""

    network: LoopbackNetwork
    p: TransferPort
    d: TransferPort
    layout: KvLayout

    def open(
        self, first: int, end: int, tokens: int | None = None, *, timeout_ms: int = 5000
    ) -> tuple[Ticket, ArraySink]:
        ticket = make_ticket(self.d.address, "e1", self.layout, first, end, timeout_ms=timeout_ms)
        sink = ArraySink(LAYERS, tokens or end)
        self.d.receiver.open(ticket, sink)
        return ticket, sink

    async def check_nothing_is_held(self) -> None:
        async with asyncio.timeout(2):
            while self.p.staging_bytes or self.d.staging_bytes or self.p.sender.num_pushes:
                await asyncio.sleep(0.001)
        assert self.d.receiver.num_open == 0


@pytest.fixture
async def pair() -> AsyncGenerator[Pair, None]:
    network = LoopbackNetwork()
    pair = Pair(network, port_on(network, "prefill"), port_on(network, "decode"), make_layout(LAYERS))
    yield pair
    await pair.check_nothing_is_held()
    await pair.p.close()
    await pair.d.close()


async def failure(future: asyncio.Future[T]) -> KvrelayError:
    with pytest.raises(KvrelayError) as caught:
        async with asyncio.timeout(5):
            await future
    return caught.value


def killed(port: TransferPort) -> None:
    assert isinstance(port.transport, LoopbackTransport)
    port.transport.kill()


async def in_the_middle(port: TransferPort, num_held: int = 1) -> None:
    async with asyncio.timeout(5):
        while port.sender.holding.num_held < num_held:
            await asyncio.sleep(0)


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    ("first", "end", "chunk"), [(0, 64, 16), (0, 61, 61), (17, 61, 13), (60, 61, 7), (0, 1, 1), (16, 48, 64)]
)
async def test_a_push_arrives_byte_for_byte(first: int, end: int, chunk: int, checksums: bool) -> None:
    network = LoopbackNetwork()
    p = port_on(network, "prefill", config=PortConfig(frame_bytes=10 * ROW, checksums=checksums))
    d = port_on(network, "decode")
    layout, kv = make_layout(LAYERS), kv_of(1, LAYERS, end)
    ticket, sink = make_ticket(d.address, "e1", layout, first, end), ArraySink(LAYERS, end)
    d.receiver.open(ticket, sink)
    handle = p.sender.push(ticket, ArraySource(kv))
    feed(handle, LAYERS, end, chunk)
    result = await handle.done
    assert (await sink.ended) == make_final(end)
    np.testing.assert_array_equal(sink.kv[:, :, first:], kv[:, :, first:])
    assert np.isnan(sink.kv[:, :, :first]).all()
    assert result.payload_bytes == (end - first) * LAYERS * ROW == p.counters.payload_bytes_sent
    assert d.counters.payload_bytes_received == result.payload_bytes
    assert p.transport.bytes_sent > result.payload_bytes + result.frames * HEADER_BYTES
    assert (p.counters.transfers_completed, d.counters.transfers_completed) == (1, 1)
    assert p.staging_bytes == d.staging_bytes == 0
    await p.close()
    await d.close()


async def test_a_push_of_nothing_sends_the_final_frame_alone(pair: Pair) -> None:
    ticket, sink = pair.open(32, 32)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 32)))
    feed(handle, LAYERS, 32, 32)
    result = await handle.done
    assert (result.payload_bytes, result.frames) == (0, 1)
    assert (await sink.ended).num_prompt_tokens == 32
    assert sink.untouched


async def test_frames_leave_while_later_layers_are_computed(pair: Pair) -> None:
    ticket, sink = pair.open(0, 20)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 20)))
    for layer in range(LAYERS - 1):
        handle.ready(layer, 0, 20)
        async with asyncio.timeout(5):
            while sink.writes < 2 * (layer + 1):
                await asyncio.sleep(0)
    handle.mark_last_layer()
    handle.ready(LAYERS - 1, 0, 20)
    handle.finish(make_final(20))
    result = await handle.done
    assert pair.p.counters.payload_bytes_overlapped == result.payload_bytes * (LAYERS - 1) // LAYERS


async def test_the_narrower_dtype_travels() -> None:
    network = LoopbackNetwork()
    p, d = port_on(network, "prefill"), port_on(network, "decode", layout=make_layout(LAYERS, KvDtype.FLOAT16))
    kv = kv_of(2, LAYERS, 40)
    ticket, sink = make_ticket(d.address, "e1", make_layout(LAYERS, KvDtype.FLOAT16), 0, 40), ArraySink(LAYERS, 40)
    d.receiver.open(ticket, sink)
    handle = p.sender.push(ticket, ArraySource(kv))
    feed(handle, LAYERS, 40, 16)
    assert (await handle.done).payload_bytes == 40 * LAYERS * ROW // 2
    np.testing.assert_array_equal(sink.kv, kv.astype(np.float16).astype(np.float32))
    await p.close()
    await d.close()


async def test_many_pushes_share_staging_and_one_link(pair: Pair) -> None:
    cases = []
    for seed in range(60):
        end = 17 + seed
        ticket, sink = pair.open(seed % 16, end)
        kv = kv_of(seed, LAYERS, end)
        cases.append((pair.p.sender.push(ticket, ArraySource(kv)), sink, kv, seed % 16, end))
    for handle, _, _, _, end in cases:
        feed(handle, LAYERS, end, 11)
    await asyncio.gather(*(handle.done for handle, *_ in cases))
    for _, sink, kv, first, _ in cases:
        np.testing.assert_array_equal(sink.kv[:, :, first:], kv[:, :, first:])
    assert pair.p.counters.links_opened == 1


# What must never be written.


def flipped(tag: int, buffer: Buffer) -> Buffer:
    if tag and not tag & IS_HEADER:
        buffer = buffer.copy()
        buffer[-1] ^= 1
    return buffer


async def test_a_corrupt_frame_is_counted_and_never_written(pair: Pair) -> None:
    pair.network.tamper = flipped
    ticket, sink = pair.open(0, 32)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 32)))
    feed(handle, LAYERS, 32, 32)
    assert type(await failure(handle.done)) is TransferFailed
    assert type(await failure(sink.ended)) is TransferFailed
    assert sink.untouched
    assert (pair.d.counters.checksum_errors, pair.d.counters.frames_rejected) == (1, 1)
    assert (pair.d.counters.transfers_failed, pair.p.counters.transfers_failed) == (1, 1)


async def test_frames_of_one_layer_cannot_come_as_another_s(pair: Pair) -> None:
    """The frames of two layers change places on the way."""
    held: list[Buffer] = []

    def swap(tag: int, buffer: Buffer) -> Buffer:
        if not tag or tag & IS_HEADER:
            return buffer
        held.append(buffer.copy())
        return held[-2] if len(held) > 1 and held[-2].nbytes == buffer.nbytes else buffer

    pair.network.tamper = swap
    ticket, sink = pair.open(0, 10)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 10)))
    feed(handle, LAYERS, 10, 10)
    await failure(handle.done)
    await failure(sink.ended)
    assert pair.d.counters.checksum_errors == 1
    assert sink.writes == 1


async def test_a_revoked_ticket_lets_nothing_in(pair: Pair) -> None:
    ticket, sink = pair.open(0, 64)
    pair.p.sender.hold(3)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 64)))
    feed(handle, LAYERS, 64, 64)
    await in_the_middle(pair.p)
    pair.d.receiver.close(ticket)
    writes = sink.writes
    pair.p.sender.release()
    assert isinstance(await failure(handle.done), StaleEpoch)
    assert sink.writes == writes <= 3
    assert not sink.ended.done()
    assert (pair.p.counters.transfers_cancelled, pair.p.counters.transfers_failed) == (1, 0)


async def test_a_ticket_revoked_before_the_push_began(pair: Pair) -> None:
    ticket, sink = pair.open(0, 64)
    pair.d.receiver.close(ticket)
    source = ArraySource(kv_of(1, LAYERS, 64))
    assert isinstance(await failure(pair.p.sender.push(ticket, source).done), StaleEpoch)
    assert sink.untouched


async def test_a_ticket_of_a_former_life(pair: Pair) -> None:
    ticket = make_ticket(pair.d.address, "another-epoch", pair.layout, 0, 16)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 16)))
    assert isinstance(await failure(handle.done), StaleEpoch)


# Handshakes.


async def test_another_model_is_refused_with_the_reason(pair: Pair) -> None:
    other = port_on(pair.network, "other", layout=make_layout(LAYERS, fingerprint="other-model"))
    ticket, sink = pair.open(0, 16)
    handle = other.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 16)))
    error = await failure(handle.done)
    assert isinstance(error, IncompatibleLayout)
    assert "other-model" in error.message
    pair.d.receiver.close(ticket)
    assert sink.untouched
    assert pair.d.counters.links_refused == 1
    await other.close()


async def test_a_restarted_sender_takes_the_place_of_its_former_self(pair: Pair) -> None:
    ticket, sink = pair.open(0, 64)
    pair.p.sender.hold(2)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 64)))
    feed(handle, LAYERS, 64, 64)
    await in_the_middle(pair.p)
    again = port_on(pair.network, "prefill", "e2")
    second, second_sink = pair.open(0, 16)
    kv = kv_of(2, LAYERS, 16)
    push = again.sender.push(second, ArraySource(kv))
    feed(push, LAYERS, 16, 16)
    await push.done
    np.testing.assert_array_equal(second_sink.kv, kv)
    assert isinstance(await failure(sink.ended), TransferFailed)
    assert isinstance(await failure(handle.done), TransferFailed)
    await again.close()


async def test_a_receiver_that_does_not_answer(pair: Pair) -> None:
    assert isinstance(pair.d.transport, LoopbackTransport)
    pair.d.transport.freeze()
    ticket, _ = pair.open(0, 16)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 16)))
    assert isinstance(await failure(handle.done), TransferFailed)
    pair.d.receiver.close(ticket)
    pair.d.transport.thaw()


# Ends in the middle.


async def begun(pair: Pair, *, timeout_ms: int = 5000) -> tuple[PushHandle, ArraySource, ArraySink, Ticket]:
    """A push that is held after two frames."""
    ticket, sink = pair.open(0, 64, timeout_ms=timeout_ms)
    pair.p.sender.hold(2)
    source = ArraySource(kv_of(1, LAYERS, 64))
    handle = pair.p.sender.push(ticket, source)
    feed(handle, LAYERS, 64, 64)
    await in_the_middle(pair.p)
    async with asyncio.timeout(5):
        while sink.writes < 2:
            await asyncio.sleep(0)
    return handle, source, sink, ticket


async def test_an_aborted_push_tells_the_receiver_and_reads_no_more(pair: Pair) -> None:
    handle, source, sink, _ = await begun(pair)
    handle.abort()
    assert isinstance(await failure(handle.done), Cancelled)
    reads = source.reads
    pair.p.sender.release()
    assert isinstance(await failure(sink.ended), Cancelled)
    assert source.reads == reads
    assert (pair.p.counters.transfers_cancelled, pair.p.counters.transfers_failed) == (1, 0)


async def test_a_push_aborted_before_its_first_step(pair: Pair) -> None:
    ticket, sink = pair.open(0, 64)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 64)))
    handle.abort()
    assert isinstance(await failure(handle.done), Cancelled)
    pair.d.receiver.close(ticket)
    assert sink.untouched


async def test_the_deadline_ends_a_push_that_is_not_fed(pair: Pair) -> None:
    handle, _, sink, _ = await begun(pair, timeout_ms=50)
    assert "deadline" in (await failure(handle.done)).message
    assert isinstance(await failure(sink.ended), TransferFailed)
    assert pair.p.counters.links_lost == 0  # nothing was stuck: the link stays


async def test_a_stopped_receiver_costs_the_deadline_and_leaves_staging_whole(pair: Pair) -> None:
    assert isinstance(pair.d.transport, LoopbackTransport)
    handle, _, sink, _ = await begun(pair, timeout_ms=100)
    pair.d.transport.freeze()
    pair.p.sender.release()
    assert isinstance(await failure(handle.done), TransferFailed)
    assert pair.p.staging_bytes == 0
    assert pair.p.counters.links_lost == 1
    pair.d.transport.thaw()
    assert isinstance(await failure(sink.ended), TransferFailed)


async def test_a_killed_receiver(pair: Pair) -> None:
    handle, *_, ticket = await begun(pair)
    killed(pair.d)
    assert isinstance(await failure(handle.done), TransferFailed)
    pair.d.receiver.close(ticket)
    pair.p.sender.release()
    # Another process takes its place.
    pair.d = port_on(pair.network, "decode")
    ticket, sink = pair.open(0, 16)
    kv = kv_of(3, LAYERS, 16)
    push = pair.p.sender.push(ticket, ArraySource(kv))
    feed(push, LAYERS, 16, 16)
    await push.done
    np.testing.assert_array_equal(sink.kv, kv)


async def test_a_killed_sender(pair: Pair) -> None:
    handle, _, sink, _ = await begun(pair)
    killed(pair.p)
    assert isinstance(await failure(sink.ended), TransferFailed)
    handle.abort()
    await failure(handle.done)


async def test_errors_of_sources_and_sinks_end_their_ticket_alone(pair: Pair) -> None:
    class BadSink(ArraySink):
        def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
            raise RuntimeError("no such block")

    class BadSource(ArraySource):
        def read(self, part: Part, out: Memory, *, hashed: bool) -> Copy[bytes]:
            raise RuntimeError("no such block")

    good, good_sink = pair.open(0, 16)
    kv = kv_of(1, LAYERS, 16)
    bad = make_ticket(pair.d.address, "e1", pair.layout, 0, 16)
    bad_sink = BadSink(LAYERS, 16)
    pair.d.receiver.open(bad, bad_sink)
    worse, worse_sink = pair.open(0, 16)
    pushes = [
        pair.p.sender.push(good, ArraySource(kv)),
        pair.p.sender.push(bad, ArraySource(kv)),
        pair.p.sender.push(worse, BadSource(kv)),
    ]
    for push in pushes:
        feed(push, LAYERS, 16, 16)
    await pushes[0].done
    assert isinstance(await failure(bad_sink.ended), Internal)
    assert isinstance(await failure(pushes[1].done), TransferFailed)
    assert isinstance(await failure(pushes[2].done), Internal)
    assert isinstance(await failure(worse_sink.ended), Internal)
    np.testing.assert_array_equal(good_sink.kv, kv)
    assert (pair.p.counters.handler_errors, pair.d.counters.handler_errors) == (1, 1)


async def test_a_final_frame_over_the_limit_ends_the_push(pair: Pair) -> None:
    ticket, sink = pair.open(16, 16)
    handle = pair.p.sender.push(ticket, ArraySource(kv_of(1, LAYERS, 16)))
    handle.finish(FinalFrame(deltas=(), num_prompt_tokens=16, extra=bytes(MAX_FINAL_BYTES)))
    assert isinstance(await failure(handle.done), TransferFailed)
    assert isinstance(await failure(sink.ended), TransferFailed)


async def test_garbage_is_counted_and_does_no_harm(pair: Pair) -> None:
    stranger = pair.network.transport()
    stranger.start(pair.p)
    peer = stranger.connect(pair.d.address, lambda error: None)
    ticket, _ = pair.open(0, 16)
    bits = ticket.targets[0].ticket_bits
    messages = [
        (0, np.frombuffer(b"\xc1nonsense", np.uint8)),
        (0, np.zeros(0, np.uint8)),
        (0, np.zeros(1 << 20, np.uint8)),
        (bits << 24, np.zeros(100, np.uint8)),
        (99 << 24, np.zeros(10, np.uint8)),
    ]
    await asyncio.gather(*(peer.send(tag, buffer) for tag, buffer in messages))
    assert pair.d.counters.handler_errors == 2
    assert pair.d.counters.messages_stray == 3
    kv = kv_of(4, LAYERS, 16)
    push = pair.p.sender.push(ticket, ArraySource(kv))
    feed(push, LAYERS, 16, 16)
    await push.done


async def test_closing_a_port_ends_what_it_does() -> None:
    network = LoopbackNetwork()
    p, d = port_on(network, "prefill"), port_on(network, "decode")
    pair = Pair(network, p, d, make_layout(LAYERS))
    handle, _, sink, _ = await begun(pair)
    await p.close()
    assert isinstance(await failure(handle.done), Cancelled)
    assert isinstance(await failure(sink.ended), Cancelled)
    await d.close()
    assert p.staging_bytes == d.staging_bytes == 0
