"""A conversation finds its past whichever pods it meets, and a store that is killed, stopped or out of Redis costs time alone."""

import asyncio
import json
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from kvrelay.cli.commands import HOST
from kvrelay.cli.stack import Stack
from tests.exactness.fixtures import running
from tests.exactness.reference import References
from tests.exactness.served import SECONDS, assert_whole
from tests.exactness.small import VOCAB, make
from tests.exactness.storing import all_attached, all_stored, assert_store_whole, metric
from tests.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]

OUTPUT_TOKENS = 12
BLOCK = 16


@pytest.fixture(scope="module")
def small_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("small") / "model", model_dir)


@pytest.fixture(scope="module")
def references(small_dir: Path) -> References:
    return References(small_dir)


@pytest.fixture(scope="module")
def stack(small_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {"prefill": 2, "decode": 2, "kvstore": 1, "engine_options": {"kvstore-load": "always"}}
    router = {"local-prefill-tokens": "0", "policy": "round_robin"}
    run_dir = tmp_path_factory.mktemp("run")
    with running(small_dir, run_dir, router_options=router, **options) as stack:
        eventually(lambda: all_attached(stack), "all pods are attached")
        yield stack


@pytest.fixture(autouse=True)
def whole(stack: Stack) -> Iterator[None]:
    """After each test everything runs, and the store holds nothing for anyone."""
    yield
    mend(stack)
    assert_store_whole(stack.node("kvstore-0"))


async def stream(url: str, prompt: Sequence[int], **options: str) -> tuple[tuple[int, ...], int]:
    """The tokens, and how many of the prompt's were not computed, as the stream says."""
    body = {"model": "smollm2", "prompt": list(prompt), "temperature": 0, "max_tokens": OUTPUT_TOKENS, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True, "ignore_eos": True, **options}
    tokens: list[int] = []
    cached = -1
    async with (
        httpx.AsyncClient(base_url=url, timeout=SECONDS) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tuple(tokens), cached


def ask(stack: Stack, references: References, prompt: Sequence[int], **options: str) -> tuple[tuple[int, ...], int]:
    """As `stream`, once the answer is known to be right."""
    tokens, cached = asyncio.run(stream(stack.url, prompt, **options))
    references.of(prompt, OUTPUT_TOKENS).check(f"a prompt of {len(prompt)}", tokens)
    return tokens, cached


def new_tokens(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB) for _ in range(count))


def test_a_conversation_of_ten_turns_computes_only_what_is_new(stack: Stack, references: References) -> None:
    prompt = new_tokens(1, 150)
    answer, cached = ask(stack, references, prompt)
    assert cached == 0
    for turn in range(2, 11):
        eventually(lambda: all_stored(stack), "what was computed is stored")
        said = new_tokens(turn, 5 + 3 * turn)
        prompt = prompt + answer + said
        answer, cached = ask(stack, references, prompt)
        assert len(prompt) - cached <= len(said) + BLOCK, f"turn {turn}: {cached} of {len(prompt)} were cached"
    used = [pod.name for pod in stack.pods if metric(pod, "kvrelay_pod_prompt_tokens")]
    assert used == [pod.name for pod in stack.pods], "the conversation met only some of the pods"


def test_tenants_of_other_salts_share_nothing(stack: Stack, references: References) -> None:
    prompt = new_tokens(7, 200)
    for salt in ("", "one", "two"):
        options = {"cache_salt": salt} if salt else {}
        _, cached = ask(stack, references, prompt, **options)
        assert cached == 0, f"salt {salt!r} found what is another's"
        eventually(lambda: all_stored(stack), "what was computed is stored")
        for _ in range(2):  # on either prefill pod
            _, cached = ask(stack, references, prompt, **options)
            assert cached == 199 // BLOCK * BLOCK


def kill_store(stack: Stack) -> None:
    stack.node("kvstore-0").kill()


def stop_store(stack: Stack) -> None:
    stack.node("kvstore-0").pause()


def kill_redis(stack: Stack) -> None:
    stack.redis.kill()


def stop_redis(stack: Stack) -> None:
    stack.redis.pause()


def flush_redis(stack: Stack) -> None:
    assert command(stack, "FLUSHALL") == b"+OK\r\n"


def fill_redis(stack: Stack) -> None:
    """Redis takes nothing any more, and what was there with a time to live has gone: all leases."""
    assert command(stack, "CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK\r\n"
    assert command(stack, "CONFIG", "SET", "maxmemory", "1") == b"+OK\r\n"
    assert command(stack, "SET", "any", "thing").startswith(b"-OOM")
    for kind in ("pod", "node"):
        eventually(
            lambda kind=kind: command(stack, "KEYS", f"kvrelay:*:{kind}:*") == b"*0\r\n", f"the {kind}s' leases end"
        )


def mend(stack: Stack) -> None:
    """Whatever has been done to it."""
    for node in stack.nodes:
        node.resume()
        if not node.alive:
            node.restart()

    def takes() -> bool:
        try:
            return command(stack, "CONFIG", "SET", "maxmemory", "0") == b"+OK\r\n"
        except OSError:
            return False

    eventually(takes, "Redis takes what it is given")
    stack.wait_ready()
    eventually(lambda: all_attached(stack), "all pods are attached")


def command(stack: Stack, *words: str) -> bytes:
    """The raw answer to one inline command."""
    with socket.create_connection((HOST, stack.redis.grpc_port), 2) as connection:
        connection.sendall(" ".join(words).encode() + b"\r\n")
        return connection.recv(65536)


@pytest.mark.parametrize("harm", [kill_store, stop_store, kill_redis, stop_redis, flush_redis, fill_redis])
def test_requests_go_on_without(stack: Stack, references: References, harm: Callable[[Stack], None]) -> None:
    """And afterwards prefixes are found again."""
    seed = hash_of(harm.__name__)
    before = new_tokens(seed, 200)
    ask(stack, references, before)
    eventually(lambda: all_stored(stack), "what was computed is stored")
    harm(stack)
    for number in range(4):
        ask(stack, references, before + new_tokens(seed + number, 20))
    assert_whole([node for node in stack.pods if node.alive])
    mend(stack)
    after = new_tokens(seed + 100, 200)
    ask(stack, references, after)
    eventually(lambda: all_stored(stack), "what was computed is stored")
    for number in range(2):
        _, cached = ask(stack, references, after + new_tokens(seed + number, 20))
        assert cached >= 200 // BLOCK * BLOCK


def hash_of(name: str) -> int:
    return sum(name.encode())
