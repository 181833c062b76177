"""With a KV store answers stay what they are cold: random conversations through all tiers, while pods and stores die in between."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from kvrelay.cli.stack import Stack
from kvrelay.v1 import kvstore_pb2 as pb
from tests.exactness.conversations import OUTPUT_TOKENS, Case, Conversations
from tests.exactness.fixtures import running
from tests.exactness.reference import References
from tests.exactness.served import SECONDS, Answer, complete
from tests.exactness.small import TOKEN_BYTES, VOCAB, make
from tests.exactness.storing import all_attached, assert_store_whole, loaded_tokens, stat
from tests.fixtures_s3 import S3Server
from tests.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]

BLOCK_BYTES = 16 * TOKEN_BYTES
MIB = 1 << 20


@pytest.fixture(scope="module")
def small_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("small") / "model", model_dir)


@pytest.fixture(scope="module")
def small_references(small_dir: Path) -> References:
    return References(small_dir)


async def _ask(url: str, cases: Sequence[Case], at_once: int) -> list[list[Answer]]:
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:

        async def one(case: Case) -> list[Answer]:
            async with places:
                return await complete(
                    client, case.reference.prompt, max_tokens=OUTPUT_TOKENS, n=case.n, ignore_eos=True
                )

        return await asyncio.gather(*(one(case) for case in cases))


def check(stack: Stack, cases: Sequence[Case], at_once: int) -> None:
    for case, answers in zip(cases, asyncio.run(_ask(stack.url, cases, at_once)), strict=True):
        assert len(answers) == case.n
        for answer in answers:
            case.reference.check(f"a prompt of {len(case.reference.prompt)}", answer.tokens, answer.logprobs)


def restart(kind: str) -> Callable[[Stack], None]:
    def act(stack: Stack) -> None:
        node = stack.node(kind)
        node.kill()
        node.restart()
        stack.wait_ready()
        eventually(lambda: all_attached(stack), "all pods are attached")

    return act


def nothing(stack: Stack) -> None:
    pass


def test_random_conversations_through_all_tiers(
    model_dir: Path, small_dir: Path, small_references: References, tmp_path: Path, s3_server: S3Server
) -> None:
    """At least 200 prompts: whole and partial hits, hits that end in a block, choices, preemptions, evictions through the tiers."""
    keys = {"access_key_id": s3_server.access_key_id, "secret_access_key": s3_server.secret_access_key}
    for name, key in keys.items():
        (tmp_path / name).write_text(key)
    tiers = [
        f"{{tier: cpu, bytes: {60 * BLOCK_BYTES}, policy: lru}}",
        f"{{tier: file, bytes: {100 * (BLOCK_BYTES + 4096)}, directory: {tmp_path}/files-{{name}}, policy: lru}}",
        f"{{tier: s3, bytes: 64MiB, bucket: {s3_server.bucket}, endpoint: '{s3_server.endpoint}', region: us-east-1, "
        + ", ".join(f"{name}_file: {tmp_path}/{name}" for name in keys)
        + "}",
    ]
    conversations = Conversations(small_references, seed=3, vocab=VOCAB)
    engine = {"kv-cache-bytes": str(64 * BLOCK_BYTES), "max-model-len": "600", "max-num-batched-tokens": "128"}
    engine["kvstore-load"] = "always"
    between = [
        nothing,
        restart("decode-0"),
        nothing,
        restart("kvstore-0"),
        restart("prefill-0"),
        nothing,
        restart("kvstore-0"),
    ]
    options = {"prefill": 1, "decode": 1, "kvstore": 1, "kvstore_tiers": f"[{', '.join(tiers)}]"}
    router = {"local-prefill-tokens": "0"}
    with running(small_dir, tmp_path / "run", engine_options=engine, router_options=router, **options) as stack:
        eventually(lambda: all_attached(stack), "all pods are attached")
        loaded, hits = 0.0, dict.fromkeys((pb.TIER_CPU, pb.TIER_FILE, pb.TIER_S3), 0)
        for act in between:
            check(stack, conversations.take(30), at_once=5)
            loaded += loaded_tokens(stack)
            counters = {tier.tier: tier.counters for tier in stat(stack.node("kvstore-0")).tiers}
            hits = {tier: count + counters[tier].hits for tier, count in hits.items()}
            act(stack)
        check(stack, conversations.take(10), at_once=1)
        assert_store_whole(stack.node("kvstore-0"))
        assert loaded > 1000, "hardly anything came out of the store"
        assert all(hits.values()), f"a tier had no hits: {hits}"
