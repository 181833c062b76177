"""Closed-loop clients of an OpenAI endpoint, on bare sockets: the clients share the cores with what they measure."""

import asyncio
import time
from urllib.parse import urlsplit

import msgspec
import orjson

from benchmarks.workload import Measured, Record, Workload, record_of

Prompt = tuple[int, ...]


class RequestFailed(Exception):
    """A request was refused or broke off: the run counts for nothing."""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    usage: _Usage | None = None


_last = msgspec.json.Decoder(_Event)


async def drive(url: str, served_model_name: str, workload: Workload, prompts: tuple[Prompt, ...]) -> Measured:
    """Raises RequestFailed."""
    waiting = list(reversed(prompts))
    records: list[Record] = []

    async def client() -> None:
        while waiting:
            records.append(await _ask(url, served_model_name, waiting.pop(), workload.output_tokens))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(workload.clients):
            group.create_task(client())
    return Measured(seconds=time.perf_counter() - started, records=tuple(records))


async def _ask(url: str, served_model_name: str, prompt: Prompt, output_tokens: int) -> Record:
    body = orjson.dumps(
        {
            "model": served_model_name,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    at = urlsplit(url)
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {at.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return await _read(reader, sent, output_tokens)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, sent: float, output_tokens: int) -> Record:
    status = await reader.readline()
    if b" 200 " not in status:
        raise RequestFailed(f"{status.decode().strip()}: {(await reader.read(2000)).decode('utf-8', 'replace')}")
    arrivals: list[float] = []
    last = b""
    # Lines of the chunked transfer coding stand between events; only events begin with "data:".
    while line := await reader.readline():
        if not line.startswith(b"data:"):
            continue
        if b"[DONE]" in line:
            break
        arrivals.append(time.perf_counter())
        last = line[5:]
    usage = _last.decode(last).usage if last else None
    if usage is None or usage.completion_tokens != output_tokens:
        raise RequestFailed(f"the stream ended with {last[:200]!r}, not with the usage of {output_tokens} tokens")
    # The event of the usage carries no token.
    return record_of(sent, arrivals[:-1], usage.completion_tokens)
