"""What is pushed is what the decode pod lacks, byte for byte, and the kernel saw the same."""

import asyncio
import random
from collections.abc import Iterator

from benchmarks.soak.case import Case, Figures, Plan
from kvrelay.cli.stack import Stack
from tests.e2e.meters import HEADER_SHARE, engine_of, tcp_bytes
from tests.exactness.fixtures import OVER_PREFILL_PODS, running
from tests.exactness.served import ask_all, assert_whole, inspect
from tests.exactness.test_served import TOKEN_BYTES

PROMPTS = 80
SPAN = 16
LONGEST = 20
"""Spans of a prompt, at most."""
Tokens = tuple[int, ...]


class Known:
    """Every span-aligned beginning of what was asked before: what the decode pod has."""

    def __init__(self) -> None:
        self._beginnings: set[Tokens] = set()

    def missing(self, prompt: Tokens) -> int:
        """Tokens after the longest beginning that is known."""
        ends = range(0, len(prompt) + 1, SPAN)
        return len(prompt) - max(end for end in ends if not end or prompt[:end] in self._beginnings)

    def add(self, prompt: Tokens) -> None:
        self._beginnings.update(prompt[:end] for end in range(SPAN, len(prompt) + 1, SPAN))


def prompts(rng: random.Random, count: int) -> Iterator[Tokens]:
    """Multiples of a span: new ones, former ones again, and continuations of a beginning of a former one."""
    former: list[Tokens] = []
    for _ in range(count):
        start = rng.choice(former) if former and rng.random() < 0.6 else ()
        kept = rng.randint(0, len(start) // SPAN)
        added = rng.randint(0 if kept else 1, LONGEST - kept)
        prompt = start[: kept * SPAN] + tuple(rng.randrange(100, 40_000) for _ in range(added * SPAN))
        former.append(prompt)
        yield prompt


def _sent(stack: Stack) -> int:
    return inspect(stack.prefill[0]).transfer.payload_bytes_sent


def _run(plan: Plan) -> Figures:
    rng = random.Random(1)
    known = Known()
    found = 0
    with running(
        plan.model,
        plan.scratch,
        prefill=1,
        decode=1,
        threads=plan.threads,
        engine_options={"kv-cache-bytes": "2GiB"},
        router_options=OVER_PREFILL_PODS,
    ) as stack:
        asyncio.run(ask_all(stack.url, [[7] * SPAN], 1, max_tokens=2))
        pids = engine_of(stack.prefill[0]), engine_of(stack.decode[0])
        first, first_wire = inspect(stack.prefill[0]).transfer, tcp_bytes(*pids)
        for i, prompt in enumerate(prompts(rng, PROMPTS)):
            before, missing = _sent(stack), known.missing(prompt)
            asyncio.run(ask_all(stack.url, [prompt], 1, max_tokens=4, ignore_eos=True, n=4 if i % 5 == 4 else 1))
            sent = _sent(stack) - before
            assert sent == missing * TOKEN_BYTES, f"prompt {i}: {sent} bytes for {missing} tokens of {len(prompt)}"
            known.add(prompt)
            found += len(prompt) - missing
        assert_whole(stack.pods)
        last, wire = inspect(stack.prefill[0]).transfer, tcp_bytes(*pids) - first_wire
    payload = last.payload_bytes_sent - first.payload_bytes_sent
    framed = last.bytes_sent - first.bytes_sent
    overlapped = last.payload_bytes_overlapped - first.payload_bytes_overlapped
    assert found > 0
    assert last.transfers_failed == first.transfers_failed
    assert overlapped >= payload / 2, f"{overlapped} of {payload} bytes entered UCX before the last layer"
    assert framed <= wire <= framed * (1 + HEADER_SHARE), f"the kernel sent {wire} bytes, the transport {framed}"
    return {
        "prompts": PROMPTS,
        "tokens_found": found,
        "tokens_pushed": payload // TOKEN_BYTES,
        "payload_bytes": payload,
        "payload_bytes_overlapped": overlapped,
        "transport_bytes": framed,
        "kernel_bytes": wire,
        "kernel_over_payload": wire / payload,
    }


CASES = [Case("payload", "bytes pushed = tokens not found × bytes a token; the kernel's TCP counters agree", _run)]
