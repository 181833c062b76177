"""Copies that go on beside the event loop: what belongs to whom while they do, and what a push may take of the loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from kvrelay.common.errors import Internal, StaleEpoch, TransferFailed
from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.common.request import Ticket
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.frame import IS_HEADER
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.port import PortConfig, TransferPort
from kvrelay.transfer.sender import PushHandle
from kvrelay.transfer.transport import Buffer, Memory
from tests.transfer.kv import ArraySink, ArraySource, feed, kv_of, make_final, make_layout, make_ticket

pytestmark = pytest.mark.unit

LAYERS, ROW = 4, 2 * 2 * 8 * 4
CONFIG = PortConfig(frame_bytes=10 * ROW, staging_bytes=1 << 13, depth=3, grace_seconds=0.05)
SECONDS = 10


class Gate:
    """Lets copies on threads go on, one a ticket that it is given, or all."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(2)
        self.begun = 0
        self._may_run = threading.Semaphore(0)

    def open(self, count: int = 1000) -> None:
        self._may_run.release(count)

    def pass_through(self) -> None:
        self.begun += 1
        assert self._may_run.acquire(timeout=SECONDS)


class ThreadSource(ArraySource):
    def __init__(self, kv: npt.NDArray[np.float32], gate: Gate) -> None:
        super().__init__(kv)
        self.gate = gate

    def read(self, part: Part, out: Memory, *, hashed: bool) -> Copy[bytes]:
        def work() -> bytes:
            self.gate.pass_through()
            return self.pack(part, out, hashed=hashed)

        self.reads += 1
        return self.gate.threads.submit(work)


class ThreadSink(ArraySink):
    def __init__(self, num_tokens: int, gate: Gate) -> None:
        super().__init__(LAYERS, num_tokens)
        self.gate = gate

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        def work() -> None:
            self.gate.pass_through()
            self.unpack(part, data, check)

        return self.gate.threads.submit(work)


class Pair:
    def __init__(self, reads: Gate, writes: Gate) -> None:
        self.network = LoopbackNetwork()
        self.reads, self.writes = reads, writes
        self.p, self.d = (
            TransferPort(self.network.transport(), PodId(name), Epoch("e1"), make_layout(LAYERS), CONFIG)
            for name in ("prefill", "decode")
        )
        self.p.start()
        self.d.start()

    def push(self, end: int, *, timeout_ms: int = 5000) -> tuple[Ticket, PushHandle, ThreadSource, ThreadSink]:
        ticket = make_ticket(self.d.address, "e1", make_layout(LAYERS), 0, end, timeout_ms=timeout_ms)
        source, sink = ThreadSource(kv_of(1, LAYERS, end), self.reads), ThreadSink(end, self.writes)
        self.d.receiver.open(ticket, sink)
        handle = self.p.sender.push(ticket, source)
        feed(handle, LAYERS, end, end)
        return ticket, handle, source, sink


@pytest.fixture
def gates() -> Iterator[tuple[Gate, Gate]]:
    made = Gate(), Gate()
    yield made
    for gate in made:
        gate.open()
        gate.threads.shutdown()


@pytest.fixture
async def pair(gates: tuple[Gate, Gate]) -> AsyncGenerator[Pair, None]:
    made = Pair(*gates)
    yield made
    for gate in gates:
        gate.open()
    for staging in (made.p.sender.staging, made.d.receiver.staging):
        async with asyncio.timeout(SECONDS):
            while staging.used_bytes:
                await asyncio.sleep(0.001)
        assert staging.num_free == staging.num_slots
    await made.p.close()
    await made.d.close()


async def begun(gate: Gate, count: int) -> None:
    async with asyncio.timeout(SECONDS):
        while gate.begun < count:
            await asyncio.sleep(0.001)


async def test_it_arrives_whole(pair: Pair) -> None:
    pair.reads.open()
    pair.writes.open()
    _, handle, source, sink = pair.push(61)
    assert (await handle.done).payload_bytes == 61 * LAYERS * ROW
    assert await sink.ended == make_final(61)
    np.testing.assert_array_equal(sink.kv, source.kv)


async def test_frames_are_read_while_others_are(pair: Pair) -> None:
    """As many as the window holds, before the first was sent; and the loop goes on meanwhile."""
    pair.writes.open()
    _, handle, source, sink = pair.push(64)
    await begun(pair.reads, 2)
    assert source.reads == CONFIG.depth
    assert pair.p.counters.frames_sent == 0
    pair.reads.open()
    await handle.done
    np.testing.assert_array_equal(sink.kv, source.kv)


async def test_it_is_acknowledged_when_all_is_written(pair: Pair) -> None:
    pair.reads.open()
    _, handle, source, sink = pair.push(20)  # 2 frames a layer
    await begun(pair.writes, 2)
    pair.writes.open(2 * LAYERS - 1)
    async with asyncio.timeout(SECONDS):
        while sink.writes < 2 * LAYERS - 1:
            await asyncio.sleep(0.001)
    assert not handle.done.done()
    assert not sink.ended.done()
    pair.writes.open()
    await handle.done
    np.testing.assert_array_equal(sink.kv, source.kv)


async def test_closing_a_ticket_waits_for_what_is_being_written(pair: Pair) -> None:
    """Whoever closed it may give the blocks to others at once."""
    pair.reads.open()
    ticket, handle, _, sink = pair.push(64)
    await begun(pair.writes, 2)
    threading.Timer(0.05, pair.writes.open).start()
    pair.d.receiver.close(ticket)
    written = sink.writes
    assert written == 2, "those that ran are over, those that waited never run"
    with pytest.raises(StaleEpoch):
        await handle.done
    await asyncio.to_thread(pair.writes.threads.shutdown)
    assert sink.writes == written
    assert not sink.ended.done()


async def test_a_push_that_ends_is_done_when_nothing_reads_its_blocks(pair: Pair) -> None:
    pair.writes.open()
    _, handle, source, sink = pair.push(64, timeout_ms=50)
    await begun(pair.reads, 2)
    with pytest.raises(TransferFailed):
        await sink.ended
    assert not handle.done.done(), "the deadline has passed, and two frames are being read"
    pair.reads.open()
    with pytest.raises(TransferFailed):
        await handle.done
    assert source.reads == CONFIG.depth
    assert pair.p.counters.frames_sent == 0


async def test_a_copy_that_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> bytes:
        raise RuntimeError("no such block")

    pair.reads.open()
    pair.writes.open()
    monkeypatch.setattr(ThreadSource, "pack", broken)
    _, handle, _, sink = pair.push(64)
    for failed in (handle.done, sink.ended):
        with pytest.raises(Internal):
            await failed
    monkeypatch.undo()
    monkeypatch.setattr(ThreadSink, "unpack", broken)
    _, handle, _, sink = pair.push(64)
    with pytest.raises(Internal):
        await sink.ended
    with pytest.raises(TransferFailed):
        await handle.done
    assert sink.untouched


async def test_a_damaged_frame_is_never_written(pair: Pair) -> None:
    def flipped(tag: int, buffer: Buffer) -> Buffer:
        return buffer if not tag or tag & IS_HEADER else np.bitwise_xor(buffer, 1)

    pair.network.tamper = flipped
    pair.reads.open()
    pair.writes.open()
    _, handle, _, sink = pair.push(64)
    for failed in (handle.done, sink.ended):
        with pytest.raises(TransferFailed):
            await failed
    assert sink.untouched
    assert pair.d.counters.checksum_errors == 1


async def test_a_killed_sender_and_a_killed_receiver(pair: Pair) -> None:
    """Each while the other reads or writes."""
    pair.reads.open()
    _, handle, _, sink = pair.push(64)
    await begun(pair.writes, 2)
    threading.Timer(0.05, pair.writes.open).start()
    pair.p.transport.kill()  # type: ignore[attr-defined]
    with pytest.raises(TransferFailed):
        await sink.ended
    with pytest.raises(TransferFailed):
        await handle.done


@pytest.mark.parametrize("theirs", [KvDtype.FLOAT32, KvDtype.FLOAT16])
async def test_small_prompts_go_in_one_frame(theirs: KvDtype) -> None:
    """All layers, and the chunks that were computed before the first was taken."""
    network, layout = LoopbackNetwork(), make_layout(LAYERS, theirs)
    config = PortConfig(frame_bytes=1 << 16)
    p = TransferPort(network.transport(), PodId("prefill"), Epoch("e1"), make_layout(LAYERS), config)
    d = TransferPort(network.transport(), PodId("decode"), Epoch("e1"), layout, config)
    p.start()
    d.start()
    ticket, sink = make_ticket(d.address, "e1", layout, 3, 50), ArraySink(LAYERS, 50)
    d.receiver.open(ticket, sink)
    source = ArraySource(kv_of(1, LAYERS, 50))
    handle = p.sender.push(ticket, source)
    feed(handle, LAYERS, 50, 7)
    assert (await handle.done).frames == 2, "and the final one"
    expected = source.kv.astype(np.float16).astype(np.float32) if theirs is KvDtype.FLOAT16 else source.kv
    np.testing.assert_array_equal(sink.kv[:, :, 3:], expected[:, :, 3:])
    await p.close()
    await d.close()
