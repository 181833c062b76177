"""KV out of a GPU's cache to a store's memory and back, at an 8B model's shape: kernels alone beside what their memory traffic would
take, then whole pieces as the connector copies them beside plain copies of as many bytes over PCIe.

python -m benchmarks.gpu.copies
"""

import mmap
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.ops import Timing, sets_for, time_us
from kvrelay.common.blocks import SPAN
from kvrelay.common.layout import KvDtype
from kvrelay.engine.gpu.cache import PIECE_BYTES, DeviceKvCache
from kvrelay.engine.gpu.kernels import CopyKernels
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.kernels.triton.checksum import leaves
from kvrelay.kernels.triton.pack import pack, unpack
from kvrelay.transfer import checksum

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_positions=131072,
    tie_embeddings=False,
    rope=RopeSettings(),
)
CACHE_BYTES = 8 << 30
SPANS = (1, 16, 64, 512)
"""Of a call: a block, what is on its way at a time, what a pod stores at a time, a prompt of 8k tokens."""
REPEATS = 7


def make_cache() -> DeviceKvCache:
    kernels = CopyKernels(pack, unpack, leaves)
    cache = DeviceKvCache(MODEL, KvDtype.BFLOAT16, SPAN, CACHE_BYTES, torch.device("cuda"), kernels)
    cache.data.view(torch.int16).random_()
    return cache


def kernel_timings(cache: DeviceKvCache) -> Iterator[Timing]:
    planes = cache.data.view(2 * MODEL.num_layers, -1, MODEL.kv_size)
    num_slots = planes.shape[1]
    piece = PIECE_BYTES // cache.span_bytes(KvDtype.BFLOAT16)

    def slots(count: int, length: int, sets: int) -> list[torch.Tensor]:
        return [torch.randperm(num_slots // length, device="cuda")[:count] * length for _ in range(sets)]

    for count, dtype in ((1, torch.bfloat16), (piece, torch.bfloat16), (piece, torch.float8_e4m3fn)):
        numbers = count * len(planes) * SPAN * MODEL.kv_size
        moved = numbers * (2 + dtype.itemsize)
        sets = sets_for(moved)
        at = slots(count, SPAN, sets)
        packed = [torch.empty(count, len(planes), SPAN, MODEL.kv_size, dtype=dtype, device="cuda") for _ in at]
        shape = f"{count} spans, {str(dtype)[6:]}"
        yield Timing(
            "pack", shape, time_us(lambda i, at=at, packed=packed: pack(planes, at[i], packed[i]), sets), moved
        )
        yield Timing(
            "unpack", shape, time_us(lambda i, at=at, packed=packed: unpack(planes, at[i], packed[i]), sets), moved
        )
        raw = [each.view(count, -1).view(torch.uint8) for each in packed]
        hashed = numbers * dtype.itemsize
        yield Timing("leaves", shape, time_us(lambda i, raw=raw: leaves(raw[i]), sets), hashed)
    for tokens in (256, 8192):
        moved = tokens * 2 * MODEL.kv_size * 4
        sets = sets_for(moved)
        at = slots(tokens, 1, sets)
        rows = [torch.empty(2, tokens, 1, MODEL.kv_size, dtype=torch.bfloat16, device="cuda") for _ in at]
        us = time_us(lambda i, at=at, rows=rows: pack(planes[:2], at[i], rows[i].transpose(0, 1)), sets)
        yield Timing("pack rows of a layer", f"{tokens} tokens", us, moved)


def seconds(call: Callable[[], object]) -> float:
    """Median, until all is done."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def whole_pieces(cache: DeviceKvCache, count: int, memory: NDArray[np.uint8], kind: str) -> Iterator[str]:
    """Lines of a table: store and load of `count` spans, of what as many bytes in one copy reach between pinned memory and the GPU."""
    size = cache.span_bytes(KvDtype.BFLOAT16)
    spans = [memory[start : start + size] for start in range(0, count * size, size)]
    slots = (torch.randperm(cache.num_blocks)[:count] * SPAN).tolist()
    there = torch.empty(count * size, dtype=torch.uint8, device="cuda")
    here = torch.empty(count * size, dtype=torch.uint8, pin_memory=True)
    cases = [
        ("store", lambda: cache.read_spans(slots, spans, KvDtype.BFLOAT16), lambda: here.copy_(there)),
        ("load", lambda: cache.write_spans(slots, spans, KvDtype.BFLOAT16), lambda: there.copy_(here)),
    ]
    for name, call, plain in cases:
        call()
        took, floor = seconds(call), seconds(plain)
        yield (
            f"{name:6} {count:4} spans, {kind:10} {took * 1e3:8.2f} ms {count * size / took / 1e9:6.1f} GB/s"
            f"   plain copy {count * size / floor / 1e9:6.1f} GB/s   {floor / took:4.0%} of it"
        )
    assert cache.write_spans(slots, spans, KvDtype.BFLOAT16)[-1] == checksum.leaves(spans[-1].data)


def main() -> None:
    cache = make_cache()
    for timing in kernel_timings(cache):
        print(timing, flush=True)
    memory = np.frombuffer(mmap.mmap(-1, max(SPANS) * cache.span_bytes(KvDtype.BFLOAT16)), np.uint8)
    memory.fill(1)
    for count in SPANS:
        print(*whole_pieces(cache, count, memory, "not pinned"), sep="\n", flush=True)
    started = time.perf_counter()
    unpin = cache.pin(memory)
    print(f"pinned {len(memory) >> 20} MiB in {time.perf_counter() - started:.2f} s")
    for count in SPANS:
        print(*whole_pieces(cache, count, memory, "pinned"), sep="\n", flush=True)
    unpin()


if __name__ == "__main__":
    main()
