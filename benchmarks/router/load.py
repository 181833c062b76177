"""What clients ask, and how fast they are answered: by `wrk` under full load, by one patient client otherwise."""

import http.client
import json
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.router.stack import MODEL_NAME
from kvrelay.common.tokenizer import Tokenizer

PATH = "/v1/completions"
_RESULT = "RESULT "
_LUA = Path(__file__).with_name("requests.lua")


class Wrk(msgspec.Struct, frozen=True, kw_only=True):
    """What wrk says of a burst. `refused`: answers with an error's status; `broken`: connections that failed or timed out."""

    requests: int
    seconds: float
    bytes: int
    p50_ms: float
    p99_ms: float
    refused: int
    broken: int


def find_wrk() -> str:
    """Raises RuntimeError where it is not installed."""
    found = shutil.which("wrk")
    if found is None:
        raise RuntimeError("wrk, the load generator, is not installed: apt-get install wrk")
    return found


def prompts(model: Path, kind: str, num_tokens: int, count: int, seed: int = 1) -> list[str | list[int]]:
    """`count` different ones of exactly `num_tokens` tokens, of whole words: as `text`, or as token `ids`.

    Words are as frequent as in a language (Zipf): the n-th, in the order in which the tokenizer learnt them, with weight 1 / n.
    """
    tokenizer = Tokenizer(model)
    words = sorted(
        token_id
        for token_id in range(tokenizer.vocab_size)
        if (text := tokenizer.token_text(token_id))[:1] == " " and text[1:].isascii() and text[1:].isalpha()
    )
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(words))]
    found: list[str | list[int]] = []
    while len(found) < count:
        ids = draw.choices(words, weights, k=num_tokens)
        text = tokenizer.decode(ids)
        # Read again, a text may be cut into other tokens than it was made of.
        if len(tokenizer.encode(text)) == num_tokens:
            found.append(text if kind == "text" else ids)
    return found


def bodies(prompts: Sequence[str | list[int]], max_tokens: int, *, stream: bool) -> list[bytes]:
    shared = {"model": MODEL_NAME, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    return [json.dumps({**shared, "prompt": prompt}).encode() for prompt in prompts]


def burst(port: int, file: Path, connections: int, seconds: float, cores: Sequence[int]) -> Wrk:
    """`connections` clients, each of which asks again as soon as it has its answer. Raises RuntimeError where wrk fails."""
    line = ["taskset", "-c", ",".join(map(str, cores)), find_wrk(), "--threads", "1", "--timeout", "10"]
    line += ["--connections", str(connections), "--duration", f"{seconds:.0f}s", "--script", str(_LUA)]
    line += [f"http://127.0.0.1:{port}{PATH}", "--", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds + 60, check=False)
    told = [line.removeprefix(_RESULT) for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if done.returncode or not told:
        raise RuntimeError(f"wrk failed with status {done.returncode}: {done.stderr or done.stdout}")
    return msgspec.json.decode(told[0], type=Wrk)


def first_tokens(port: int, bodies: Sequence[bytes], rate: float, count: int) -> list[float]:
    """Seconds from each of `count` requests, sent `rate` a second, to the first byte of its stream; all on one connection.

    Raises RuntimeError for an answer that is none.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Content-Type": "application/json"}
    found: list[float] = []
    begin = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, begin + number / rate - time.perf_counter()))
        sent = time.perf_counter()
        connection.request("POST", PATH, bodies[number % len(bodies)], headers)
        answer = connection.getresponse()
        answer.read(1)
        found.append(time.perf_counter() - sent)
        if answer.status != 200 or not answer.read().endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"an answer failed, with status {answer.status}")
    connection.close()
    return found
