"""Bandwidth of a KV push between two processes of this machine: source, staging, checksum, UCX, checksum, sink.

python benchmarks/transfer.py [--mib 1024] [--frame-kib 1024] [--depth 8] [--runs 3] [--no-checksums] [--tls tcp]
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import Epoch, Fingerprint, PodId, RequestId
from kvrelay.common.layout import KvDtype, KvGroup, KvGroupKind, KvLayout
from kvrelay.common.request import Ticket, TicketTarget
from kvrelay.transfer.checksum import leaves
from kvrelay.transfer.copies import Check, Copy, Done, Part
from kvrelay.transfer.frame import FinalFrame
from kvrelay.transfer.port import PortConfig, TransferPort
from kvrelay.transfer.transport import Memory

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
TOKEN_BYTES = 2 * HEADS * HEAD_DIM * 2
"""Of an 8B model in bfloat16, in one layer."""


class Memory:
    """Source and sink: one layer's worth of rows, used for all layers, so that it is memory and not paging that is measured."""

    def __init__(self, num_tokens: int) -> None:
        self.rows = np.ones((2, num_tokens, TOKEN_BYTES // 2), np.uint8)
        self.completed = asyncio.Event()

    def read(self, part: Part, out: Memory, *, hashed: bool) -> Copy[bytes]:
        assert isinstance(out, np.ndarray)
        rows = self.rows[:, part.first_token : part.end_token]
        for layer in out.reshape(part.num_layers, *rows.shape):
            layer[:] = rows
        return Done(leaves(out.data) if hashed else b"")

    def write(self, part: Part, data: Memory, check: Check | None) -> Copy[None]:
        assert isinstance(data, np.ndarray)
        if check is not None:
            check(leaves(data.data))
        rows = self.rows[:, part.first_token : part.end_token]
        for layer in data.reshape(part.num_layers, *rows.shape):
            rows[:] = layer
        return Done(None)

    def complete(self, final: FinalFrame) -> None:
        self.completed.set()

    def failed(self, error: KvrelayError) -> None:
        raise error


def make_port(options: argparse.Namespace, pod: str) -> TransferPort:
    os.environ["UCX_TLS"] = options.tls
    from kvrelay.transfer.ucx import UcxTransport  # reads the environment when it is imported

    group = KvGroup(
        kind=KvGroupKind.FULL,
        layers=tuple(range(LAYERS)),
        block_size=16,
        dtype=KvDtype.BFLOAT16,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        shard_heads=HEADS,
    )
    layout = KvLayout(fingerprint=Fingerprint("bench"), groups=(group,))
    config = PortConfig(frame_bytes=options.frame_kib << 10, depth=options.depth, checksums=not options.no_checksums)
    port = TransferPort(UcxTransport(), PodId(pod), Epoch(pod), layout, config)
    port.start()
    return port


def make_ticket(address: bytes, run: int, num_tokens: int) -> Ticket:
    target = TicketTarget(rank=0, group=0, address=address, ticket_bits=run + 1, first_token=0, end_token=num_tokens)
    return Ticket(
        request_id=RequestId(f"run-{run}"),
        attempt=1,
        pod_id=PodId("receive"),
        epoch=Epoch("receive"),
        generation=1,
        timeout_ms=600_000,
        targets=(target,),
        layout=KvLayout(fingerprint=Fingerprint("bench"), groups=()),
    )


async def receive(options: argparse.Namespace, num_tokens: int) -> None:
    port = make_port(options, "receive")
    memory = Memory(num_tokens)
    tickets = [make_ticket(port.address, run, num_tokens) for run in range(options.runs + 1)]
    for ticket in tickets:
        port.receiver.open(ticket, memory)
    print(msgspec.json.encode(tickets).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await port.close()


async def send(options: argparse.Namespace, num_tokens: int, tickets: list[Ticket]) -> list[float]:
    port = make_port(options, "send")
    memory = Memory(num_tokens)
    rates = []
    for ticket in tickets:
        handle = port.sender.push(ticket, memory)
        for layer in range(LAYERS):
            handle.ready(layer, 0, num_tokens)
        handle.finish(FinalFrame(deltas=(), num_prompt_tokens=num_tokens))
        result = await handle.done
        rates.append(result.payload_bytes / result.seconds / 1e9)
    await port.close()
    return rates[1:]  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--frame-kib", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-checksums", action="store_true")
    parser.add_argument("--tls", default="tcp")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_tokens = (options.mib << 20) // (LAYERS * TOKEN_BYTES)
    if options.receive:
        asyncio.run(receive(options, num_tokens))
        return
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--receive"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        tickets = msgspec.json.decode(child.stdout.readline(), type=list[Ticket])
        rates = asyncio.run(send(options, num_tokens, tickets))
        child.stdin.close()
    # Of both processes, start included: says more than the clock does where other work runs beside.
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    gigabytes = (options.runs + 1) * num_tokens * LAYERS * TOKEN_BYTES / 1e9
    cpu_s_per_gb = sum(one.ru_utime + one.ru_stime for one in used) / gigabytes
    report = {
        "gb_per_s": [round(rate, 2) for rate in rates],
        "best": round(max(rates), 2),
        "cpu_s_per_gb": round(cpu_s_per_gb, 2),
        **vars(options),
    }
    print(json.dumps({name: value for name, value in report.items() if name != "receive"}))


if __name__ == "__main__":
    main()
