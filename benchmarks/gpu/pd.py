"""KV out of one process's GPU memory into another's, by the pods' own ports, at an 8B model's shape.

    python -m benchmarks.gpu.pd transfer                     # from GPU 0 to GPU 1
    python -m benchmarks.gpu.pd transfer --devices 0,0       # two processes of one GPU
    python -m benchmarks.gpu.pd transfer --frame-mib 32 --depth 8 --out results.json

A push is timed from its first frame to its acknowledgement: packed, hashed, sent, checked, unpacked. Beside it: a copy of as many
bytes from one device to the other, as torch makes it. After the runs of a size both sides hash what lies in their blocks, token by
token in the sequence's order.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from benchmarks.gpu.copies import MODEL
from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import Epoch, Fingerprint, PodId, RequestId
from kvrelay.common.layout import KvDtype
from kvrelay.common.request import Ticket, TicketTarget
from kvrelay.engine.cache import KvCache
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.gpu.cache import DeviceKvCache
from kvrelay.engine.gpu.kernels import CopyKernels
from kvrelay.engine.push import BlockSource
from kvrelay.engine.transfer import open_port
from kvrelay.kernels.triton.checksum import leaves
from kvrelay.kernels.triton.pack import pack, unpack
from kvrelay.transfer.copies import Check, Copy, Part
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.port import TransferPort
from kvrelay.transfer.transport import Memory

TOKENS = (64, 256, 1024, 2048, 4096, 8192)
STEP_TOKENS = 2048
"""That a prefill pod computes at a time, and gives to the push together."""
EPOCH = Epoch("bench")
DTYPE = KvDtype.BFLOAT16


class End:
    """One process's: a cache of the largest prompt's size and a port."""

    def __init__(self, device: str, options: argparse.Namespace) -> None:
        num_bytes = max(options.tokens) * MODEL.num_layers * 2 * MODEL.kv_size * DTYPE.itemsize
        if device == "cpu":
            self.cache = KvCache(MODEL, DTYPE, 16, num_bytes)
        else:
            self.cache = self._device_cache(device, num_bytes)
        self.layout = self.cache.layout(Fingerprint("bench"))
        config = EngineConfig(
            model=Path("none"),
            device=device,
            frame_bytes=options.frame_mib and options.frame_mib << 20,
            staging_bytes=options.staging_mib and options.staging_mib << 20,
            transfer_depth=options.depth,
            checksums=not options.no_checksums,
            kv_buffer_device=options.kv_buffer_device,
        )
        pod_id = PodId(f"{device}-{secrets.token_hex(4)}")
        self.port: TransferPort = open_port(config, pod_id, EPOCH, self.layout, self.cache)

    @staticmethod
    def _device_cache(device: str, num_bytes: int) -> DeviceKvCache:
        kernels = CopyKernels(pack, unpack, leaves)
        cache = DeviceKvCache(MODEL, DTYPE, 16, num_bytes, torch.device(device), kernels)
        cache.rehearse()
        return cache

    def blocks(self, seed: int) -> list[int]:
        found: list[int] = np.random.default_rng(seed).permutation(self.cache.num_blocks).tolist()
        return found

    def digest(self, blocks: list[int], num_tokens: int) -> str:
        """Of keys and values of all layers."""
        hashed = xxhash.xxh3_64()
        for layer in range(MODEL.num_layers):
            part = Part(layer, 1, 0, num_tokens, DTYPE)
            out = np.empty(part.num_rows * self.cache.token_bytes, np.uint8)
            self.cache.read_part(part, blocks, out, hashed=False).result()
            hashed.update(out.data)
        return hashed.hexdigest()


class Sink:
    def __init__(self, cache: KvCache, blocks: list[int]) -> None:
        self._cache = cache
        self._blocks = blocks
        self.ended: asyncio.Future[FinalFrame] = asyncio.get_running_loop().create_future()

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        return self._cache.write_part(part, self._blocks, data, check)

    def complete(self, final: FinalFrame) -> None:
        self.ended.set_result(final)

    def failed(self, error: KvrelayError) -> None:
        self.ended.set_exception(error)


def make_ticket(end: End, num_tokens: int) -> Ticket:
    bits = 1 + secrets.randbelow((1 << 40) - 1)
    target = TicketTarget(
        rank=0, group=0, address=end.port.address, ticket_bits=bits, first_token=0, end_token=num_tokens
    )
    return Ticket(
        request_id=RequestId(f"r-{bits}"),
        attempt=1,
        pod_id=PodId("receiver"),
        epoch=EPOCH,
        generation=1,
        timeout_ms=60_000,
        targets=(target,),
        layout=end.layout,
    )


async def receive(options: argparse.Namespace) -> None:
    """For each line with a number of tokens a ticket; for an empty one, what lies there after it."""
    end = End(options.devices[1], options)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    num_tokens, sink, blocks = 0, None, end.blocks(2)
    while line := (await reader.readline()).decode():
        if line.strip():
            num_tokens, sink = int(line), Sink(end.cache, blocks)
            ticket = make_ticket(end, num_tokens)
            end.port.receiver.open(ticket, sink)
            print(msgspec.json.encode(ticket).decode(), flush=True)
        elif sink is not None:
            await sink.ended
            print(end.digest(blocks, num_tokens), flush=True)
    await end.port.close()


async def push(end: End, ticket: Ticket, blocks: list[int], num_tokens: int) -> float:
    """Seconds."""
    handle = end.port.sender.push(ticket, BlockSource(end.cache, blocks))
    for start in range(0, num_tokens, STEP_TOKENS):
        for layer in range(MODEL.num_layers):
            handle.ready(layer, start, min(start + STEP_TOKENS, num_tokens))
    handle.finish(FinalFrame(deltas=(), num_prompt_tokens=num_tokens))
    return (await handle.done).seconds


def copy_seconds(devices: list[str], num_bytes: int, runs: int) -> float:
    """Median, of one copy from one device to the other."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for device in devices)
    wait: Callable[[], None] = torch.cuda.synchronize if source.is_cuda else lambda: None
    times = []
    for _ in range(runs + 1):
        wait()
        started = time.perf_counter()
        target.copy_(source)
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


async def measure(options: argparse.Namespace, child: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    def ask(line: str) -> str:
        assert child.stdin is not None
        assert child.stdout is not None
        print(line, file=child.stdin, flush=True)
        return child.stdout.readline()

    end = End(options.devices[0], options)
    end.cache.data.view(torch.int16).random_()
    blocks, found = end.blocks(1), []
    for num_tokens in options.tokens:
        times = []
        for _ in range(options.runs + 1):
            ticket = msgspec.json.decode(await asyncio.to_thread(ask, str(num_tokens)), type=Ticket)
            times.append(await push(end, ticket, blocks, num_tokens))
        assert (await asyncio.to_thread(ask, "")).strip() == end.digest(blocks, num_tokens), "the KV is not the same"
        num_bytes = num_tokens * end.layout.token_bytes
        seconds, copied = statistics.median(times[1:]), copy_seconds(options.devices, num_bytes, options.runs)
        (link,) = end.port.links
        found.append(
            {
                "tokens": num_tokens,
                "mib": num_bytes / (1 << 20),
                "ms": round(1e3 * seconds, 3),
                "gb_per_s": round(num_bytes / seconds / 1e9, 2),
                "best_gb_per_s": round(num_bytes / min(times[1:]) / 1e9, 2),
                "copy_gb_per_s": round(num_bytes / copied / 1e9, 2),
                "of_copy": round(copied / seconds, 3),
                "link_gb_per_s": round(link.speed.bytes_per_second / 1e9, 2),
                "carriers": link.speed.carriers,
            }
        )
        print(json.dumps(found[-1]), flush=True)
    await end.port.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["transfer"])
    parser.add_argument("--devices", default="0,1", help="of the sender and the receiver: numbers of GPUs, or cpu,cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--frame-mib", type=int)
    parser.add_argument("--staging-mib", type=int)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--no-checksums", action="store_true")
    parser.add_argument("--kv-buffer-device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, help="a file for all results, as JSON")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.devices = [name if name == "cpu" else f"cuda:{name}" for name in options.devices.split(",")]
    if options.receive:
        asyncio.run(receive(options))
        return
    command = [sys.executable, "-m", "benchmarks.gpu.pd", *sys.argv[1:], "--receive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            found = asyncio.run(measure(options, child))
        finally:
            assert child.stdin is not None
            child.stdin.close()
    if options.out is not None:
        told = {name: value for name, value in vars(options).items() if name not in ("out", "receive", "part")}
        options.out.write_text(json.dumps({"options": told, "transfer": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
