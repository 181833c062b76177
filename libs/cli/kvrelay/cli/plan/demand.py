"""What is asked for: the requests of a trace, or of rates."""

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

TRACE_BLOCK = 512
"""Tokens of a block of Mooncake's traces."""


class Request(NamedTuple):
    arrival: float
    """Seconds."""
    num_prompt: int
    num_cached: int
    """Tokens of the prompt that need not be computed."""
    num_output: int


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int] = []
    """Of the prompt's blocks of TRACE_BLOCK tokens, each with those before it."""


def of_trace(path: Path, cache_tokens: int | None) -> list[Request]:
    """In order of arrival. Prefixes are found in one cache of `cache_tokens` that all pods share, the least recently used out first;
    None: without a limit. Raises ValueError, OSError."""
    try:
        lines = msgspec.json.Decoder(_Line).decode_lines(path.read_bytes())
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no trace in Mooncake's format: {error}") from error
    if not lines:
        raise ValueError(f"{path} has no requests")
    lines.sort(key=lambda line: line.timestamp)
    limit = None if cache_tokens is None else cache_tokens // TRACE_BLOCK
    cached: OrderedDict[int, None] = OrderedDict()
    requests = []
    for line in lines:
        held = sum(1 for _ in itertools.takewhile(cached.__contains__, line.hash_ids))
        hit = min(held * TRACE_BLOCK, line.input_length - 1)
        requests.append(Request(line.timestamp / 1000, line.input_length, hit, line.output_length))
        for block in reversed(line.hash_ids):
            cached[block] = None
            cached.move_to_end(block)
        while limit is not None and len(cached) > limit:
            cached.popitem(last=False)
    return requests


def of_rate(
    rate: float, num_prompt: int, num_output: int, hit_rate: float, seconds: float, seed: int = 0
) -> list[Request]:
    """`rate` requests a second at random times (Poisson), all alike; `hit_rate`: of a prompt's tokens. Raises ValueError."""
    if rate <= 0 or num_prompt < 1 or num_output < 1 or not 0 <= hit_rate < 1:
        raise ValueError("a rate and lengths must be positive, and a hit rate from 0 to under 1")
    rng = random.Random(seed)
    requests, at = [], rng.expovariate(rate)
    while at < seconds:
        requests.append(Request(at, num_prompt, int(num_prompt * hit_rate), num_output))
        at += rng.expovariate(rate)
    if not requests:
        raise ValueError(f"{rate:g} requests a second give none in {seconds:g} s")
    return requests


def faster(requests: Sequence[Request], factor: float) -> list[Request]:
    """The same requests, at `factor` times their rate."""
    return [request._replace(arrival=request.arrival / factor) for request in requests]


def rate_of(requests: Sequence[Request]) -> float:
    """Requests a second, from the first to the last."""
    return (len(requests) - 1) / max(requests[-1].arrival - requests[0].arrival, 1e-9) if len(requests) > 1 else 0.0
