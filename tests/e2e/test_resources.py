"""What a stack uses, by the kernel's account: no processor when idle, bounded and flat memory, no bytes but the KV's.

In bfloat16, with 512 MiB of KV in the decode pod. `make soak` measures the same for longer.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.stack import Stack
from tests.e2e.meters import (
    BFLOAT16_TOKEN_BYTES,
    HEADER_SHARE,
    IDLE_SHARE,
    KV_CACHE_BYTES,
    ask,
    cpu_shares,
    decode_pod_limit,
    engine_of,
    has_socket_statistics,
    memory,
    pod_bytes,
    pss_bytes,
    random_prompts,
    swollen,
    tcp_bytes,
)
from tests.exactness.fixtures import running
from tests.exactness.served import assert_whole, inspect, payload_bytes

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

IDLE_SECONDS = 5.0
LONG_TOKENS = 2000
PREFILL_KV_BYTES = 96 << 20
"""Room for one long prompt and the short ones of a while: it is all in use before memory is compared."""


@pytest.fixture(scope="module")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The decode pod keeps no prefixes, so that the prefill pod, which does, can push the same prompt again and again."""
    pods: dict[str, dict[str, str | bool]] = {
        "prefill-0": {"kv-cache-bytes": str(PREFILL_KV_BYTES)},
        "decode-0": {"kv-cache-bytes": str(KV_CACHE_BYTES), "no-prefix-caching": True},
    }
    with running(
        model_dir,
        tmp_path_factory.mktemp("resources"),
        engine_options={"dtype": "bfloat16"},
        pod_options=pods,
        router_options={"local-prefill-tokens": "0"},
        threads=1,
    ) as stack:
        ask(stack, random_prompts(random.Random(1), 4, 32), at_once=1, num_tokens=8)
        assert_whole(stack.pods)
        yield stack


def test_an_idle_stack_uses_no_processor(stack: Stack) -> None:
    shares = cpu_shares(stack, IDLE_SECONDS)
    assert len(shares) == 6, f"Redis, router, two fronts, two engines: {sorted(shares)}"
    assert {name: share for name, share in shares.items() if share >= IDLE_SHARE} == {}


@pytest.mark.skipif(not has_socket_statistics(), reason="the kernel's counters are read by ss, of the package iproute2")
def test_the_kernel_counts_the_same_bytes(stack: Stack) -> None:
    sender, receiver = engine_of(stack.prefill[0]), engine_of(stack.decode[0])
    payload, wire = payload_bytes(stack), tcp_bytes(sender, receiver)
    assert wire > 0, "the connection is there already"
    ask(stack, random_prompts(random.Random(2), 8, 128), at_once=1, num_tokens=2)
    assert_whole(stack.pods)
    payload, wire = payload_bytes(stack) - payload, tcp_bytes(sender, receiver) - wire
    assert payload == 8 * 128 * BFLOAT16_TOKEN_BYTES
    assert payload < wire < payload * (1 + HEADER_SHARE)


def test_a_decode_pod_with_all_its_kv_in_use(stack: Stack) -> None:
    [node] = stack.decode
    prompts = random_prompts(random.Random(3), 1, LONG_TOKENS)
    rounds = KV_CACHE_BYTES // (BFLOAT16_TOKEN_BYTES * LONG_TOKENS) + 1
    before = pss_bytes(engine_of(node))
    ask(stack, prompts * rounds, at_once=1, num_tokens=2)
    assert inspect(stack.prefill[0]).transfer.transfers_failed == 0
    assert pss_bytes(engine_of(node)) - before > 0.9 * KV_CACHE_BYTES, "nearly all of the pool was blank before"
    assert pod_bytes(node) < decode_pod_limit()


def test_memory_is_flat(stack: Stack) -> None:
    """After the one above: what is not in use by then comes into use here."""
    rng = random.Random(4)
    ask(stack, random_prompts(rng, 50, 32), at_once=4, num_tokens=8)
    before = memory(stack)
    ask(stack, random_prompts(rng, 200, 32), at_once=4, num_tokens=8)
    after = memory(stack)
    assert swollen(before, after) == {}
    assert_whole(stack.pods)
