"""Memory is bounded, and flat: requests in a row, with the whole KV cache in use from the beginning."""

import random

from benchmarks.soak.case import Case, Figures, Plan
from kvrelay.cli.stack import Stack
from tests.e2e.meters import (
    BFLOAT16_TOKEN_BYTES,
    FLAT_SHARE,
    KV_CACHE_BYTES,
    ask,
    decode_pod_limit,
    growth,
    memory,
    pod_bytes,
    processes,
    pss_bytes,
    random_prompts,
    swollen,
)
from tests.exactness.fixtures import running
from tests.exactness.served import assert_whole, inspect

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 8
WARM_REQUESTS = 200
SAMPLE_REQUESTS = 100
FILLING_TOKENS = 512
"""Of each of the prompts that bring the caches into use."""


def _fill(stack: Stack, rng: random.Random) -> None:
    """Every block of both pods is written once: caches that fill while memory is compared would look like a leak."""
    count = KV_CACHE_BYTES // (BFLOAT16_TOKEN_BYTES * FILLING_TOKENS) + 2
    ask(stack, random_prompts(rng, count, FILLING_TOKENS), at_once=2, num_tokens=2)
    for node in stack.pods:
        pod = inspect(node)
        assert pod.cached_blocks > 0.95 * pod.num_blocks, f"{node.name}: {pod.cached_blocks} of {pod.num_blocks}"


def _run(plan: Plan) -> Figures:
    rng = random.Random(1)
    with running(
        plan.model,
        plan.scratch,
        prefill=1,
        decode=1,
        threads=plan.threads,
        engine_options={"dtype": "bfloat16", "kv-cache-bytes": str(KV_CACHE_BYTES)},
        router_options={"local-prefill-tokens": "0"},
    ) as stack:
        _fill(stack, rng)
        [decode] = stack.decode
        full = pod_bytes(decode)
        samples: dict[int, dict[str, int]] = {0: memory(stack)}
        for done in range(SAMPLE_REQUESTS, plan.requests + 1, SAMPLE_REQUESTS):
            ask(stack, random_prompts(rng, SAMPLE_REQUESTS, PROMPT_TOKENS), at_once=1, num_tokens=OUTPUT_TOKENS)
            samples[done] = memory(stack)
        served = pod_bytes(decode)
        pss = {name: pss_bytes(pid) for name, pid in processes(stack).items()}
        assert_whole(stack.pods)
    limit = decode_pod_limit()
    assert max(full, served) < limit, f"the decode pod holds {max(full, served)} bytes"
    warm = samples[WARM_REQUESTS]
    grown = {
        done: found for done, sample in samples.items() if done > WARM_REQUESTS and (found := swollen(warm, sample))
    }
    assert not grown, f"grew by over {FLAT_SHARE:.0%} after {WARM_REQUESTS} requests: {grown}"
    last = samples[max(samples)]
    return {
        "requests": plan.requests,
        "decode_pod_bytes": max(full, served),
        "decode_pod_limit_bytes": limit,
        "growth_share": {name: bytes_ / warm[name] for name, bytes_ in growth(warm, last).items()},
        "pss_bytes_at_the_end": pss,
        "own_bytes_by_requests": {str(done): sample for done, sample in samples.items()},
    }


CASES = [
    Case(
        "memory",
        f"{PROMPT_TOKENS} tokens in, {OUTPUT_TOKENS} out, in a row on 1P1D in bfloat16: memory is flat, the decode pod bounded",
        _run,
    )
]
