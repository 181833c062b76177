"""A pod without a model, but with a cache: KV is a function of all tokens up to it, and each step checks every row that it relies on."""

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from kvrelay.common.blocks import SPAN, BlockHasher, extra_keys
from kvrelay.common.ids import BlockId, Fingerprint
from kvrelay.common.layout import KvDtype
from kvrelay.common.request import EngineRequest
from kvrelay.engine.cache import KvCache
from kvrelay.engine.connector import port as port_module
from kvrelay.engine.connector.base import Connector
from kvrelay.engine.connector.port import KvStorePort
from kvrelay.engine.core import Reservation
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.transfer.block import BlockInfo, checksum, shape_of
from kvrelay.transfer.copies import Part
from tests.connector.memory import Shelf
from tests.engine.conftest import CheckingRunner, Harness, prefixes

MODEL = ModelConfig(
    architecture="none",
    vocab_size=97,
    hidden_size=4,
    intermediate_size=4,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_positions=4096,
    tie_embeddings=True,
    rope=RopeSettings(theta=10_000.0),
)
FINGERPRINT = Fingerprint("fake")
TURNS = 8
"""Of the event loop, in which all that can go on without the test has gone on."""


def rows(values: Sequence[int], layer: int, side: int) -> NDArray[np.uint32]:
    """What lies in the cache for tokens of these values, [tokens, 4]."""
    mixed = np.array([value & (1 << 64) - 1 for value in values], np.uint64)
    mixed = mixed ^ np.uint64(0x9E3779B97F4A7C15 * (2 * layer + side + 1) & (1 << 64) - 1)
    words = mixed.view(np.uint32).reshape(-1, 2)
    return np.concatenate((words, ~words), axis=1)


class CacheRunner(CheckingRunner):
    """Writes into a real cache, and checks all of a sequence's rows before and after each step."""

    def __init__(self, block_size: int, max_num_seqs: int, num_blocks: int) -> None:
        super().__init__(block_size, max_num_seqs)
        block_bytes = MODEL.num_layers * 2 * block_size * MODEL.kv_size * 4
        self.cache = KvCache(MODEL, KvDtype.FLOAT32, block_size, num_blocks * block_bytes)
        self.seconds = 0.05  # so that a block is always worth its load
        self.before_write: Callable[[list[int]], None] = lambda blocks: None

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        self.cache.copy_blocks(copies)

    def _write(self, parts: list[Any]) -> None:
        for part in parts:
            assert part.start == part.seq.num_computed
            self.verify(part.seq.blocks, part.seq.tokens[: part.start])
            self.put(part.seq.blocks, part.seq.tokens, part.start, part.end)

    def verify(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        if not tokens:
            return
        values = prefixes(tokens)
        part = Part(0, MODEL.num_layers, 0, len(tokens), KvDtype.FLOAT32)
        out = np.empty(2 * part.num_rows * MODEL.kv_size * 4, np.uint8)
        self.cache.read_part(part, blocks, out, hashed=False).result()
        found = out.view(np.uint32).reshape(MODEL.num_layers, 2, len(tokens), 4)
        for layer in range(MODEL.num_layers):
            for side in range(2):
                wrong = np.flatnonzero((found[layer, side] != rows(values, layer, side)).any(axis=1))
                assert not len(wrong), f"wrong KV at {wrong[:5]} of {len(tokens)}, layer {layer}"

    def put(self, blocks: Sequence[int], tokens: Sequence[int], start: int, end: int) -> None:
        self.before_write([blocks[i] for i in range(start // self.block_size, -(-end // self.block_size))])
        values = prefixes(tokens[:end])[start:]
        data = np.concatenate([rows(values, layer, side) for layer in range(MODEL.num_layers) for side in range(2)])
        part = Part(0, MODEL.num_layers, start, end - start, KvDtype.FLOAT32)
        self.cache.write_part(part, blocks, data.view(np.uint8).reshape(-1), None).result()

    def fill(self, reservation: Reservation, tokens: Sequence[int]) -> None:
        if reservation.first_token < reservation.end_token:
            self.put(reservation.blocks, tokens, reservation.first_token, reservation.end_token)


class CacheHarness(Harness):
    runner: CacheRunner

    def make_runner(self, num_blocks: int) -> CacheRunner:
        return CacheRunner(self.config.block_size, self.config.max_num_seqs, num_blocks)


class SlowThread(Executor):
    """A thread whose work is done when the test says so, in order."""

    def __init__(self) -> None:
        self.work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.is_over = False
        self.on_submit: Callable[[], None] = lambda: None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not self.is_over, "work after the end"
        future: Future[Any] = Future()
        self.work.append((future, lambda: fn(*args, **kwargs)))
        self.on_submit()
        return future

    def go_on(self) -> None:
        """One piece of work."""
        future, work = self.work.popleft()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - whatever it was is for who waits
            future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self.work:
            self.go_on()
        self.is_over = True


@functools.cache
def identity(block_size: int = 16) -> BlockInfo:
    cache = KvCache(MODEL, KvDtype.FLOAT32, block_size, 1 << 20)
    no_id = BlockId(bytes(16))
    return BlockInfo(
        id=no_id,
        head=no_id,
        fingerprint=FINGERPRINT,
        shape=shape_of(cache.layout(FINGERPRINT), "float32"),
        dtype=KvDtype.FLOAT32,
        size=cache.span_bytes(KvDtype.FLOAT32),
    )


def stock(shelf: Shelf, tokens: Sequence[int], salt: str = "") -> list[BlockId]:
    """Puts the full spans of a prompt on the shelf, as a pod would have. Gives their ids."""
    kind, ids = identity(), list[BlockId]()
    BlockHasher(FINGERPRINT, extra_keys(salt)).extend(ids, tokens)
    values = prefixes(tokens)
    for number, block_id in enumerate(ids):
        span = values[number * SPAN : (number + 1) * SPAN]
        payload = b"".join(rows(span, layer, side).tobytes() for layer in range(MODEL.num_layers) for side in range(2))
        info = msgspec.structs.replace(kind, id=block_id)
        shelf.blocks[block_id] = msgspec.structs.replace(info, checksum=checksum(info, memoryview(payload))), payload
    return ids


class Pod:
    """An engine and its use of a store. To be made, and used, in an event loop."""

    def __init__(self, connector: Connector, *, slow_copies: bool = False, **options: Any) -> None:
        self.h = CacheHarness(**options)
        self.num_changes = 0
        self._watch_writes()
        self.connector = connector
        with pytest.MonkeyPatch.context() as patch:
            if slow_copies:
                patch.setattr(port_module, "ThreadPoolExecutor", lambda *_, **__: SlowThread())
            self.store = KvStorePort(
                self.h.engine, self.h.runner.cache, identity(self.h.config.block_size), connector, self._changed
            )
        self.store.start()

    def _changed(self) -> None:
        self.num_changes += 1

    def _watch_writes(self) -> None:
        """Only what one holder has to itself is written, and only what somebody holds is read beside the steps."""
        cache, manager = self.h.runner.cache, self.h.engine.manager
        pool = manager.pool
        read_span, write_span = cache.read_span, cache.write_span

        def own(blocks: list[int]) -> None:
            for block in blocks:
                holders = pool.refs[block] - manager.sources.count(block)
                assert holders == 1, f"block {block}, which is written, has {holders} holders"
                assert pool.keys[block] is None, f"block {block}, which is written, can be found"

        def write(slot: int, data: NDArray[np.uint8], dtype: KvDtype) -> None:
            own([slot // cache.block_size])
            write_span(slot, data, dtype)

        def read(slot: int, out: NDArray[np.uint8], dtype: KvDtype) -> None:
            assert pool.refs[slot // cache.block_size] > 0
            assert pool.keys[slot // cache.block_size] is not None
            read_span(slot, out, dtype)

        self.h.runner.before_write = own
        cache.read_span, cache.write_span = read, write  # type: ignore[method-assign]

    @property
    def threads(self) -> list[SlowThread]:
        return [thread for thread in self.store._threads if isinstance(thread, SlowThread)]

    async def run(self, *requests: EngineRequest, seconds: float = 20.0) -> None:
        """Until all that was asked is done, as a driver does: it looks again when something has changed, and not before."""
        engine = self.h.engine
        for request in requests:
            engine.add(request)
        async with asyncio.timeout(seconds):
            while engine.has_work or engine.scheduler.loading:
                seen = self.num_changes
                batch = engine.schedule()
                self.h.take(engine.drain())
                if batch is not None:
                    self.h.take(engine.update(batch, engine.launch(batch).result()))
                    await asyncio.sleep(0)
                else:
                    while seen == self.num_changes:
                        await asyncio.sleep(0.001)
                self.h.check()

    async def stored(self, seconds: float = 20.0) -> None:
        """Until nothing waits to be stored."""
        async with asyncio.timeout(seconds):
            while self.store.counters().waiting_blocks or self.h.engine.manager.lent:
                await asyncio.sleep(0.001)

    def num_computed(self, request: EngineRequest) -> int:
        """Prompt tokens of the request that were computed, each as often as it was."""
        end = len(request.prompt_token_ids)
        parts = [part for batch in self.h.runner.batches for part in batch if part[0] == request.request_id]
        return sum(max(0, min(start + count, end) - start) for _, _, start, count in parts)

    async def close(self) -> None:
        await self.store.close()


async def turns(count: int = TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
