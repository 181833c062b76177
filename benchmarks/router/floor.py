"""What a request costs at least: its calls to pods and its tokenization alone, on the core and with the libraries of the router.

    taskset -c 0 python -m benchmarks.router.floor --redis-url URL --model DIR

Against stub pods of the layout `split`. Prints one line of JSON.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import grpc.aio
import msgspec
import uvloop

from benchmarks.router import load
from benchmarks.router.pods import CLUSTER
from kvrelay.common.discovery import PodDirectory
from kvrelay.common.ids import new_request_id
from kvrelay.common.request import EngineRequest, SamplingParams
from kvrelay.common.rpc import CHANNEL_OPTIONS
from kvrelay.common.tokenizer import Tokenizer
from kvrelay.common.wire import request_to_proto
from kvrelay.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

WARMUP, CALLS, AT_ONCE = 200, 3000, 32
RATE, PATIENT_CALLS = 50.0, 200
TIMEOUT_SECONDS = 10.0


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Processor microseconds, of all threads, for each request."""

    reserve_us: float
    prefill_us: float
    """A call with its three events."""
    tokenize_us: float
    first_token_ms: float
    """Not of the processor: from the first call to the first token, at `RATE` requests a second, the median."""


class Caller:
    """The calls that the router makes for a request, without a router."""

    def __init__(self, decode: grpc.aio.Channel, prefill: grpc.aio.Channel, token_ids: Sequence[int]) -> None:
        self._reserve = decode_pb2_grpc.DecodeStub(decode).Reserve
        self._prefill = prefill_pb2_grpc.PrefillStub(prefill).Prefill
        request = EngineRequest(
            request_id=new_request_id(),
            prompt_token_ids=tuple(token_ids),
            sampling=SamplingParams(max_tokens=2, temperature=0.0, seed=0),
        )
        self._request = request_to_proto(request)

    async def reserve(self) -> decode_pb2.ReserveResponse:
        message = decode_pb2.ReserveRequest(request=self._request, attempt=1)
        return await self._reserve(message, timeout=TIMEOUT_SECONDS)

    async def prefill(self) -> None:
        message = prefill_pb2.PrefillRequest(request=self._request)
        async for _ in self._prefill(message, timeout=TIMEOUT_SECONDS):
            pass

    async def first_token(self) -> float:
        """Seconds until it comes."""
        begin = time.perf_counter()
        await self.reserve()
        seconds = 0.0
        async for event in self._prefill(prefill_pb2.PrefillRequest(request=self._request), timeout=TIMEOUT_SECONDS):
            if event.HasField("first_tokens"):
                seconds = time.perf_counter() - begin
        return seconds


async def cost_us(call: Callable[[], Coroutine[None, None, object]]) -> float:
    async def several(count: int) -> None:
        for _ in range(count // AT_ONCE):
            await call()

    await asyncio.gather(*(several(WARMUP) for _ in range(AT_ONCE)))
    begin = time.process_time()
    await asyncio.gather(*(several(CALLS) for _ in range(AT_ONCE)))
    return 1e6 * (time.process_time() - begin) / (CALLS // AT_ONCE * AT_ONCE)


async def first_token_ms(caller: Caller) -> float:
    found = []
    begin = time.perf_counter()
    for number in range(PATIENT_CALLS):
        await asyncio.sleep(max(0.0, begin + number / RATE - time.perf_counter()))
        found.append(1000 * await caller.first_token())
    return statistics.median(found)


def tokenize_us(model: Path, texts: Sequence[str]) -> float:
    tokenizer = Tokenizer(model)
    for text in texts:
        tokenizer.encode(text)
    begin = time.process_time()
    for number in range(CALLS):
        tokenizer.encode(texts[number % len(texts)])
    return 1e6 * (time.process_time() - begin) / CALLS


async def measure(redis_url: str, model: Path, num_tokens: int) -> Floor:
    directory = PodDirectory(redis_url, CLUSTER)
    await directory.start()
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async for records in directory.updates():
                addresses = {record.role: record.grpc_address for record in records.values()}
                if addresses.keys() >= {"decode", "prefill"}:
                    break
    finally:
        await directory.stop()
    texts = [str(prompt) for prompt in load.prompts(model, "text", num_tokens, count=64)]
    [ids] = load.prompts(model, "ids", num_tokens, count=1)
    async with (
        grpc.aio.insecure_channel(addresses["decode"], CHANNEL_OPTIONS) as decode,
        grpc.aio.insecure_channel(addresses["prefill"], CHANNEL_OPTIONS) as prefill,
    ):
        caller = Caller(decode, prefill, [int(each) for each in ids])
        return Floor(
            reserve_us=await cost_us(caller.reserve),
            prefill_us=await cost_us(caller.prefill),
            tokenize_us=tokenize_us(model, texts),
            first_token_ms=await first_token_ms(caller),
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.router.floor", description=__doc__.partition("\n")[0])
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    args = parser.parse_args()
    found = uvloop.run(measure(args.redis_url, args.model, args.prompt_tokens))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    main()
