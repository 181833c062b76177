"""One process of a transfer over UCX: `python pod.py receive|send`, told what to do by lines of JSON on its standard input.

It answers each line with one line of JSON. It is killed, stopped and restarted by the tests.
"""

import asyncio
import json
import os
import resource
import sys
import time
from typing import Any

import msgspec
import numpy as np

from kvrelay.common.errors import KvrelayError
from kvrelay.common.ids import Epoch, PodId
from kvrelay.common.request import Ticket
from kvrelay.transfer.frame import IS_HEADER
from kvrelay.transfer.port import PortConfig, TransferPort
from kvrelay.transfer.transport import Buffer
from kvrelay.transfer.ucx import UcxPeer, UcxTransport
from tests.transfer.kv import ArraySink, ArraySource, feed, kv_of, make_layout, make_ticket

LAYERS = 6
"""With 128 bytes a row in a layer, and frames of 32 KiB: over the size from which UCX goes by rendezvous."""
CONFIG = PortConfig(frame_bytes=1 << 15, staging_bytes=1 << 20, grace_seconds=0.2, handshake_seconds=2.0)
Answer = dict[str, Any]


class Pod:
    def __init__(self, epoch: str, fingerprint: str) -> None:
        self.epoch = epoch
        self.layout = make_layout(LAYERS, fingerprint=fingerprint)
        name = "decode" if sys.argv[1] == "receive" else "prefill"
        self.port = TransferPort(UcxTransport(), PodId(name), Epoch(epoch), self.layout, CONFIG)
        self.port.start()
        self.sinks: dict[int, tuple[Ticket, int, ArraySink]] = {}

    # Receiving.

    async def open(self, seed: int, first: int, end: int, timeout_ms: int = 20_000) -> Answer:
        ticket = make_ticket(self.port.address, self.epoch, self.layout, first, end, timeout_ms=timeout_ms)
        sink = ArraySink(LAYERS, end)
        self.port.receiver.open(ticket, sink)
        self.sinks[seed] = ticket, first, sink
        return {"ticket": msgspec.msgpack.encode(ticket).hex()}

    async def revoke(self, seed: int) -> Answer:
        self.port.receiver.close(self.sinks[seed][0])
        return {}

    async def written(self, seed: int, writes: int) -> Answer:
        """Waits until so many frames were written."""
        sink = self.sinks[seed][2]
        async with asyncio.timeout(10):
            while sink.writes < writes:
                await asyncio.sleep(0.001)
        return {"writes": sink.writes}

    async def check(self, seed: int) -> Answer:
        """Waits for the end, and says whether each byte is where it belongs."""
        ticket, first, sink = self.sinks.pop(seed)
        started = time.monotonic()
        try:
            async with asyncio.timeout(20):
                final = await sink.ended
        except KvrelayError as error:
            return {"error": type(error).__name__, "seconds": time.monotonic() - started, "untouched": sink.untouched}
        kv = kv_of(seed, LAYERS, ticket.targets[0].end_token)
        equal = bool((sink.kv[:, :, first:] == kv[:, :, first:]).all() and np.isnan(sink.kv[:, :, :first]).all())
        return {"equal": equal, "prompt": final.num_prompt_tokens}

    # Sending.

    async def push(
        self, tickets: list[str], seeds: list[int], chunk: int, hold: int = -1, corrupt: bool = False
    ) -> Answer:
        """Pushes all at once and waits for their ends."""
        if hold >= 0:
            self.port.sender.hold(hold)
        send = UcxPeer.send
        if corrupt:
            UcxPeer.send = corrupted(send)  # type: ignore[method-assign]
        handles = []
        for data, seed in zip(tickets, seeds, strict=True):
            ticket = msgspec.msgpack.decode(bytes.fromhex(data), type=Ticket)
            end = ticket.targets[0].end_token
            handle = self.port.sender.push(ticket, ArraySource(kv_of(seed, LAYERS, end)))
            feed(handle, LAYERS, end, chunk)
            handles.append(handle)
        started = time.monotonic()
        if hold >= 0:
            async with asyncio.timeout(10):
                while self.port.sender.holding.num_held < len(handles):
                    await asyncio.sleep(0.001)
            print(json.dumps({"held": len(handles)}), flush=True)
        results = await asyncio.gather(*(handle.done for handle in handles), return_exceptions=True)
        UcxPeer.send = send  # type: ignore[method-assign]
        self.port.sender.release()
        errors = [type(result).__name__ for result in results if isinstance(result, BaseException)]
        messages = [str(result) for result in results if isinstance(result, BaseException)]
        return {"errors": errors, "messages": messages, "seconds": time.monotonic() - started}

    async def release(self) -> Answer:
        self.port.sender.release()
        return {}

    # Both.

    async def state(self) -> Answer:
        async with asyncio.timeout(2):
            while self.port.staging_bytes:
                await asyncio.sleep(0.001)
        counters = {name: getattr(self.port.counters, name) for name in self.port.counters.__slots__}
        transport = self.port.transport
        held = {"staging": self.port.staging_bytes, "pushes": self.port.sender.num_pushes}
        return {**counters, **held, "bytes_sent": transport.bytes_sent, "bytes_received": transport.bytes_received}

    async def idle(self, seconds: float) -> Answer:
        before = resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def corrupted(send: Any) -> Any:
    def send_flipped(peer: UcxPeer, tag: int, buffer: Buffer) -> asyncio.Future[None]:
        if tag and not tag & IS_HEADER:
            buffer = buffer.copy()
            buffer[-1] ^= 4
        future: asyncio.Future[None] = send(peer, tag, buffer)
        return future

    return send_flipped


async def main() -> None:
    pod = Pod(sys.argv[2], sys.argv[3])
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    tasks = set()

    async def answer(line: bytes) -> None:
        command = json.loads(line)
        result = await getattr(pod, command.pop("do"))(**command)
        print(json.dumps(result), flush=True)

    while line := await reader.readline():
        task = asyncio.create_task(answer(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await pod.port.close()


if __name__ == "__main__":
    asyncio.run(main())
