"""One process with a KV cache and a port: `python -m tests.engine.pushpod cpu|cuda:N`, told what to do by lines of JSON.

It answers each line with one of JSON, and is killed and stopped by tests.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import Epoch, Fingerprint, PodId
from kvrelay.common.layout import KvDtype
from kvrelay.common.request import Ticket
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.cache import DeviceKvCache
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.engine.push import BlockSource
from kvrelay.engine.transfer import open_port
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.transport import Memory
from tests.transfer.kv import make_final, make_ticket

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=1024,
    intermediate_size=10,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_positions=1 << 16,
    tie_embeddings=False,
    rope=RopeSettings(),
)
NUM_TOKENS = 4096
"""That a cache has room for: 64 MiB of bfloat16."""
Answer = dict[str, Any]


def make_cache(device: str, block_size: int = 16, dtype: KvDtype = KvDtype.BFLOAT16) -> KvCache:
    num_bytes = NUM_TOKENS * MODEL.num_layers * 2 * MODEL.kv_size * dtype.itemsize
    if device == "cpu":
        return KvCache(MODEL, dtype, block_size, num_bytes)
    from kvrelay.engine.gpu.kernels import CopyKernels
    from kvrelay.kernels.triton.checksum import leaves
    from kvrelay.kernels.triton.pack import pack, unpack

    kernels = CopyKernels(pack, unpack, leaves)
    return DeviceKvCache(MODEL, dtype, block_size, num_bytes, torch.device(device), kernels)


class CacheSink:
    """Puts what comes into `blocks`, and waits for its end."""

    def __init__(self, cache: KvCache, blocks: list[int]) -> None:
        self.cache = cache
        self.blocks = blocks
        self.writes = 0
        self.ended: asyncio.Future[FinalFrame] = asyncio.get_running_loop().create_future()

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        self.writes += 1
        return self.cache.write_part(part, self.blocks, data, check)

    def complete(self, final: FinalFrame) -> None:
        self.ended.set_result(final)

    def failed(self, error: KvrelayError) -> None:
        self.ended.set_exception(error)


class Turns:
    """The longest that the loop's thread has computed without giving others their turn; what other processes take does not count."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_ms = max(self.longest_ms, 1e3 * (now - before))
            before = now

    def end(self) -> float:
        self._task.cancel()
        return self.longest_ms


class PushPod:
    def __init__(self, device: str, **options: Any) -> None:
        self.cache = make_cache(device)
        if isinstance(self.cache, DeviceKvCache):
            self.cache.rehearse()
        name = f"pod-{os.getpid()}"
        layout = self.cache.layout(Fingerprint("model"))
        config = EngineConfig(model=Path("none"), device=device, **options)
        self.port = open_port(config, PodId(name), Epoch("e1"), layout, self.cache)
        self.layout = layout
        self.sinks: dict[int, CacheSink] = {}
        self.turns: Turns | None = None

    def _blocks(self, shift: int) -> list[int]:
        """All of them, in an order of this `shift`'s own."""
        count = self.cache.num_blocks
        return np.random.default_rng(shift).permutation(count).tolist()

    async def fill(self, seed: int) -> Answer:
        generator = torch.Generator().manual_seed(seed)
        self.cache.data.copy_(torch.randn(self.cache.data.shape, generator=generator))
        return {}

    async def open(self, number: int, first: int, end: int, timeout_ms: int = 20_000) -> Answer:
        ticket = make_ticket(self.port.address, "e1", self.layout, first, end, timeout_ms=timeout_ms)
        self.sinks[number] = CacheSink(self.cache, self._blocks(number))
        self.port.receiver.open(ticket, self.sinks[number])
        self.turns = Turns()
        return {"ticket": msgspec.msgpack.encode(ticket).hex()}

    async def written(self, number: int, writes: int) -> Answer:
        async with asyncio.timeout(10):
            while self.sinks[number].writes < writes:
                await asyncio.sleep(0.001)
        return {}

    async def check(self, number: int) -> Answer:
        try:
            async with asyncio.timeout(20):
                await self.sinks[number].ended
        except KvrelayError as error:
            return {"error": type(error).__name__}
        assert self.turns is not None
        return {"turn_ms": self.turns.end()}

    async def push(self, number: int, ticket: str, chunk: int, hold: int = -1) -> Answer:
        """All chunks are computed at once, each layer by layer, as on a GPU a step's."""
        known = msgspec.msgpack.decode(bytes.fromhex(ticket), type=Ticket)
        end = known.targets[0].end_token
        if hold >= 0:
            self.port.sender.hold(hold)
        turns = Turns()
        handle = self.port.sender.push(known, BlockSource(self.cache, self._blocks(number)))
        for start in range(0, end, chunk):
            for layer in range(MODEL.num_layers):
                handle.ready(layer, start, min(start + chunk, end))
            await asyncio.sleep(0)
        handle.finish(make_final(end))
        try:
            result = await handle.done
        except KvrelayError as error:
            return {"error": type(error).__name__}
        finally:
            self.port.sender.release()
        (link,) = self.port.links
        return {
            "frames": result.frames,
            "turn_ms": turns.end(),
            "carriers": link.speed.carriers,
            "gb_per_s": link.speed.bytes_per_second / 1e9,
        }

    async def digest(self, number: int, first: int, end: int) -> Answer:
        """Of the rows, as they lie in this pod's own order of blocks."""
        part = Part(0, MODEL.num_layers, first, end - first, self.cache.dtype)
        out = np.empty(part.num_rows * self.cache.token_bytes, np.uint8)
        await asyncio.to_thread(self.cache.read_part(part, self._blocks(number), out, hashed=False).result)
        return {"digest": xxhash.xxh3_64_hexdigest(out.data)}

    async def state(self) -> Answer:
        """When nothing is on its way any more."""
        async with asyncio.timeout(5):
            while self.port.staging_bytes:
                await asyncio.sleep(0.001)
        stagings = self.port.sender.staging, self.port.receiver.staging
        is_on_device = not isinstance(stagings[0].try_acquire(1).memory, np.ndarray)  # type: ignore[union-attr]
        return {
            "leaked": sum(staging.num_slots - staging.num_free for staging in stagings) - 1,
            "pushes": self.port.sender.num_pushes,
            "checksum_errors": self.port.counters.checksum_errors,
            "on_device": is_on_device,
        }


async def main() -> None:
    torch.set_num_threads(1)
    pod = PushPod(sys.argv[1], **json.loads(sys.argv[2]))
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    while line := await reader.readline():
        command = json.loads(line)
        print(json.dumps(await getattr(pod, command.pop("do"))(**command)), flush=True)
    await pod.port.close()


if __name__ == "__main__":
    asyncio.run(main())
