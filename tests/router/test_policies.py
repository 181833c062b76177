"""Policies in a router with pods: where requests go by what the index says, and what metrics tell of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.common.blocks import BlockHasher
from kvrelay.common.ids import BlockId
from kvrelay.router.core import Router
from tests.router.cluster import LONG, Local, collect, source

pytestmark = pytest.mark.integration

ROLES = {"p": "prefill", "d": "decode"}


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[Local]:
    local = Local(model_dir)
    for name in ("p0", "p1", "p2", "d0", "d1"):
        await local.add(name, ROLES[name[0]])  # type: ignore[arg-type]
    yield local
    await local.close()


def tell(local: Local, router: Router, name: str, num_tokens: int, salt: str = "") -> None:
    """As a reader of KV events does."""
    record = local.pods[name].record
    keys = (f"salt:{salt}",) if salt else ()
    ids: list[BlockId] = []
    BlockHasher(record.fingerprint, keys).extend(ids, LONG[:num_tokens])
    router.index.add_pod(name, 16)
    router.index.stored(name, ids)


async def pushes(local: Local) -> list[int]:
    """Of each prefill pod."""
    await local.whole()
    return [(await local.pods[name].engine.inspect()).transfer.transfers_completed for name in ("p0", "p1", "p2")]


def metric(router: Router, name: str, **labels: str) -> float:
    return router._metrics.registry.get_sample_value(name, labels) or 0.0


async def test_requests_go_where_their_prefix_is(local: Local) -> None:
    router = await local.start(policy="prefix_aware")
    tell(local, router, "p2", 64)
    prepared = await router.prepare(source(max_tokens=4))
    answer = await collect(router, prepared)
    assert answer.tokens[0] == local.expected(prepared)
    assert await pushes(local) == [0, 0, 1]
    assert metric(router, "kvrelay_router_decisions_total", policy="prefix_aware", prefill="prefill") == 1
    assert metric(router, "kvrelay_router_predicted_cached_tokens_total") == 64
    # It was not there, whatever the index was told, and that is shown.
    assert metric(router, "kvrelay_router_mispredicted_tokens_total", kind="missing") == 64
    assert metric(router, "kvrelay_router_mispredicted_tokens_total", kind="unknown") == 0


async def test_a_salt_is_another_prefix(local: Local) -> None:
    router = await local.start(policy="prefix_aware")
    tell(local, router, "p1", 80, salt="mine")
    await collect(router, await router.prepare(source(max_tokens=2, cache_salt="mine")))
    assert await pushes(local) == [0, 1, 0]
    for _ in range(4):
        await collect(router, await router.prepare(source(max_tokens=2, cache_salt="other")))
    assert metric(router, "kvrelay_router_predicted_cached_tokens_total") == 79


async def test_the_decode_pod_that_has_most_of_it_computes_the_rest(local: Local) -> None:
    router = await local.start(policy="prefix_aware")
    tell(local, router, "d1", 64)
    await collect(router, await router.prepare(source(max_tokens=2)))
    assert metric(router, "kvrelay_router_decisions_total", policy="prefix_aware", prefill="decode") == 1
    assert await pushes(local) == [0, 0, 0]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "prefix_aware", "session"])
async def test_every_policy_serves_without_an_index(local: Local, policy: str) -> None:
    router = await local.start(policy=policy)
    for _ in range(6):
        prepared = await router.prepare(source(max_tokens=3))
        answer = await collect(router, prepared)
        assert answer.tokens[0] == local.expected(prepared)
    counts = await pushes(local)
    assert sum(counts) == 6
    if policy == "round_robin":
        assert counts == [2, 2, 2]


async def test_a_session_stays_on_its_pods(local: Local) -> None:
    router = await local.start(policy="session")
    for _ in range(6):
        await collect(router, await router.prepare(source(max_tokens=2, session="mine")))
    assert sorted(await pushes(local)) == [0, 0, 6]


async def test_costs_are_measured_where_pods_do_both(model_dir: Path) -> None:
    local = Local(model_dir)
    await local.add("b0", "both")
    try:
        router = await local.start(policy="prefix_aware")
        costs = router._dispatcher._costs
        before = costs.seconds(1_000, 0)
        await collect(router, await router.prepare(source(max_tokens=3)))
        assert costs.seconds(1_000, 0) != before
    finally:
        await local.close()


async def test_costs_are_measured_on_the_way(local: Local) -> None:
    router = await local.start(policy="prefix_aware")
    costs = router._dispatcher._costs
    before = (costs.seconds(1_000, 0), costs.transfer)
    for _ in range(3):
        await collect(router, await router.prepare(source(max_tokens=3)))
    await local.whole()
    assert costs.seconds(1_000, 0) != before[0]
    assert costs.transfer != before[1]
