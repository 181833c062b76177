"""KV between caches, bit for bit: of any block sizes and types, between two processes, on a CPU and on a GPU."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.common.ids import Epoch, Fingerprint, PodId
from kvrelay.common.layout import KvDtype, wire_dtype
from kvrelay.engine.cache import TORCH_DTYPES, KvCache
from kvrelay.engine.gpu.cache import DeviceKvCache
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import RopeSettings
from kvrelay.engine.push import BlockSource
from kvrelay.transfer.copies import Part
from kvrelay.transfer.loopback import LoopbackNetwork
from kvrelay.transfer.port import PortConfig, TransferPort
from tests.engine.pushpod import CacheSink
from tests.transfer.kv import make_final, make_ticket

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=10,
    hidden_size=64,
    intermediate_size=10,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    max_positions=4096,
    tie_embeddings=False,
    rope=RopeSettings(),
)
PUSHES = [(0, 2048, 512), (48, 1000, 333), (0, 1, 1), (17, 33, 16), (0, 2048, 2048)]
"""Between two processes: first token, end, tokens of a chunk."""
TURN_MS = 25.0
"""What the event loop's thread may compute between two turns while KV comes or goes."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU to push out of")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, needs_gpu])])


def make_cache(dtype: KvDtype, block_size: int, *, like_gpu: bool) -> KvCache:
    num_bytes = 12 * block_size * MODEL.num_layers * 2 * MODEL.kv_size * dtype.itemsize
    if like_gpu:
        cache: KvCache = DeviceKvCache(MODEL, dtype, block_size, num_bytes, torch.device("cpu"))
    else:
        cache = KvCache(MODEL, dtype, block_size, num_bytes)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(block_size)))
    return cache


def rows(cache: KvCache, blocks: list[int], first: int, end: int, dtype: KvDtype) -> torch.Tensor:
    part = Part(0, MODEL.num_layers, first, end - first, dtype)
    out = np.empty(2 * part.num_rows * MODEL.kv_size * dtype.itemsize, np.uint8)
    cache.read_part(part, blocks, out, hashed=False).result()
    return torch.from_numpy(out).view(TORCH_DTYPES[dtype])


@pytest.mark.unit
@pytest.mark.parametrize("sizes", [(16, 16), (16, 48), (64, 32)], ids=str)
@pytest.mark.parametrize("theirs", list(TORCH_DTYPES))
@pytest.mark.parametrize("own", list(TORCH_DTYPES))
@pytest.mark.parametrize("like_gpu", [False, True], ids=["cpu", "twins"])
async def test_bit_for_bit(own: KvDtype, theirs: KvDtype, sizes: tuple[int, int], like_gpu: bool) -> None:
    """In the narrower of two types, and nothing beside the ticket's tokens is written."""
    torch.set_num_threads(1)
    first, end, chunk = 16, 139, 37
    source, target = (
        make_cache(dtype, size, like_gpu=like_gpu) for dtype, size in zip((own, theirs), sizes, strict=True)
    )
    before = target.data.clone()
    network = LoopbackNetwork()
    ports = [
        TransferPort(
            network.transport(),
            PodId(name),
            Epoch("e1"),
            cache.layout(Fingerprint("model")),
            PortConfig(frame_bytes=20_000),
        )
        for name, cache in (("prefill", source), ("decode", target))
    ]
    for port in ports:
        port.start()
    own_blocks, their_blocks = [11, 2, 7, 5, 0, 3, 9, 1, 4][: -(-end // sizes[0])], [4, 9, 0, 10, 2, 8, 3, 6, 11]
    sink = CacheSink(target, their_blocks)
    ticket = make_ticket(ports[1].address, "e1", target.layout(Fingerprint("model")), first, end)
    ports[1].receiver.open(ticket, sink)
    handle = ports[0].sender.push(ticket, BlockSource(source, own_blocks))
    for start in range(0, end, chunk):
        for layer in range(MODEL.num_layers):
            handle.ready(layer, start, min(start + chunk, end))
    handle.finish(make_final(end))
    await handle.done
    await sink.ended
    sent = rows(source, own_blocks, first, end, wire_dtype(own, theirs))
    assert torch.equal(rows(target, their_blocks, first, end, theirs), sent.to(TORCH_DTYPES[theirs]))
    slots = torch.from_numpy(target.slots(their_blocks, first, end - first))
    for data in (target.data, before):
        data.flatten(2, 3)[:, :, slots] = 0
    assert torch.equal(target.data, before)
    for port in ports:
        await port.close()


class Child:
    """A process of `pushpod`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, do: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 90)
        assert line, "the process has ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    async def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        self.tell(do, **arguments)
        return await self.hear()


Start = Callable[..., Coroutine[Any, Any, Child]]


@pytest.fixture
async def start() -> AsyncGenerator[Start, None]:
    children: list[Child] = []

    async def start_child(device: str, **options: object) -> Child:
        # Connections within this machine only; between processes of one GPU whatever UCX finds.
        tls = {"UCX_TLS": "tcp"} if device == "cpu" else {}
        env = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1", **tls}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.engine.pushpod", device, json.dumps(options)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=env,
        )
        child = Child(process)
        children.append(child)
        await child.hear()
        return child

    yield start_child
    for child in children:
        if child.process.returncode is None:
            child.process.send_signal(signal.SIGCONT)
            assert child.process.stdin is not None
            child.process.stdin.close()
    codes = [await asyncio.wait_for(child.process.wait(), 20) for child in children]
    assert all(code in (0, -signal.SIGKILL) for code in codes)


async def started(start: Start, device: str, **options: object) -> tuple[Child, Child]:
    """A receiver and a sender, whose caches differ."""
    options = {"transfer_probe_bytes": 4 << 20, "staging_bytes": 64 << 20, **options}
    receiver, sender = await asyncio.gather(start(device, **options), start(device, **options))
    await asyncio.gather(receiver.ask("fill", seed=1), sender.ask("fill", seed=2))
    return receiver, sender


async def check_nothing_is_held(device: str, *children: Child) -> None:
    for child in children:
        state = await child.ask("state")
        assert state == {"leaked": 0, "pushes": 0, "checksum_errors": 0, "on_device": device != "cpu"}


@pytest.mark.integration
@DEVICES
@pytest.mark.parametrize("frame_bytes", [1 << 20, 8 << 20], ids=["1M", "8M"])
async def test_between_two_processes(start: Start, device: str, frame_bytes: int) -> None:
    receiver, sender = await started(start, device, frame_bytes=frame_bytes)
    for number, (first, end, chunk) in enumerate(PUSHES):
        ticket = (await receiver.ask("open", number=number, first=first, end=end))["ticket"]
        pushed = await sender.ask("push", number=number, ticket=ticket, chunk=chunk)
        assert "error" not in pushed
        assert pushed["gb_per_s"] > 0
        ended = await receiver.ask("check", number=number)
        if number:  # the first one touches memory that was never used before
            assert max(ended["turn_ms"], pushed["turn_ms"]) < TURN_MS
        there, here = [await child.ask("digest", number=number, first=first, end=end) for child in (receiver, sender)]
        assert there == here
        names = {carrier.partition("/")[0] for carrier in pushed["carriers"]}
        assert "tcp" in names if device == "cpu" else "cuda_ipc" in names
    await check_nothing_is_held(device, receiver, sender)


@pytest.mark.integration
@DEVICES
async def test_a_process_killed_in_the_middle(start: Start, device: str) -> None:
    receiver, sender = await started(start, device, frame_bytes=1 << 20)
    ticket = (await receiver.ask("open", number=1, first=0, end=2048))["ticket"]
    sender.tell("push", number=1, ticket=ticket, chunk=512, hold=3)
    await receiver.ask("written", number=1, writes=3)
    receiver.process.send_signal(signal.SIGKILL)
    assert (await sender.hear())["error"] == "TransferFailed"
    successor, _ = await asyncio.gather(
        start(device, transfer_probe_bytes=4 << 20, staging_bytes=64 << 20), receiver.process.wait()
    )
    ticket = (await successor.ask("open", number=2, first=0, end=2048))["ticket"]
    sender.tell("push", number=2, ticket=ticket, chunk=512, hold=3)
    await successor.ask("written", number=2, writes=3)
    sender.process.send_signal(signal.SIGKILL)
    assert (await successor.ask("check", number=2))["error"] == "TransferFailed"
    await check_nothing_is_held(device, successor)


@pytest.mark.integration
@DEVICES
async def test_a_stopped_receiver_costs_no_more_than_the_deadline(start: Start, device: str) -> None:
    receiver, sender = await started(start, device, frame_bytes=1 << 20)
    ticket = (await receiver.ask("open", number=1, first=0, end=2048, timeout_ms=1500))["ticket"]
    sender.tell("push", number=1, ticket=ticket, chunk=512, hold=3)
    await receiver.ask("written", number=1, writes=3)
    receiver.process.send_signal(signal.SIGSTOP)
    loop = asyncio.get_running_loop()
    before = loop.time()
    assert (await sender.hear())["error"] == "TransferFailed"
    assert loop.time() - before < 3
    receiver.process.send_signal(signal.SIGCONT)
    assert (await receiver.ask("check", number=1))["error"] == "TransferFailed"
    await check_nothing_is_held(device, receiver, sender)


@pytest.mark.integration
@DEVICES
async def test_a_link_that_must_be_another_is_refused(start: Start, device: str) -> None:
    receiver, sender = await started(start, device, transfer_require="gga_mlx5")
    ticket = (await receiver.ask("open", number=1, first=0, end=64))["ticket"]
    assert (await sender.ask("push", number=1, ticket=ticket, chunk=64))["error"] == "TransferFailed"
    await check_nothing_is_held(device, sender)
