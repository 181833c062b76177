"""Attempts that fail: a pod that still speaks for one that was given up, a pod that has no room for one."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.errors import NoCapacity
from kvrelay.common.request import FinishReason
from kvrelay.v1 import decode_pb2, types_pb2
from tests.router.cluster import Local, collect, source, until

pytestmark = pytest.mark.integration


def counted(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("kvrelay_router_stale_tokens_total")


@pytest.mark.parametrize("reason", [types_pb2.FINISH_REASON_UNSPECIFIED, types_pb2.FINISH_REASON_ABORT])
async def test_tokens_of_another_attempt_are_ignored(
    model_dir: Path, reason: "types_pb2.FinishReason.ValueType"
) -> None:
    local = Local(model_dir)
    try:
        pod = await local.add("d0", "decode")
        router = await local.start()
        await pod.engine.set_hold("decode")
        prepared = await router.prepare(source(max_tokens=20, ignore_eos=True))
        running = asyncio.create_task(collect(router, prepared))
        await until(lambda: pod.engine.stats.num_running == 1)
        late = types_pb2.ChoiceDelta(
            request_id=prepared.request.request_id, choice=0, index=0, token_ids=[7, 7], finish_reason=reason, attempt=0
        )
        (decode,) = router._dispatcher.pods.decoding()
        decode._take_step(decode_pb2.StepTokens(deltas=[late]))
        await until(lambda: counted(router._metrics.registry) == 2)
        await pod.engine.set_hold("")
        answer = await running
        assert answer.tokens == [local.expected(prepared)]
        assert answer.finish[0].finish_reason is FinishReason.LENGTH
    finally:
        await local.close()


async def test_a_pod_without_room_is_asked_again_when_it_has_reported(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = Local(model_dir)
    try:
        await local.add("d0", "decode")
        router = await local.start()
        (decode,) = router._dispatcher.pods.decoding()
        seen: list[str] = []
        reserve, take_status = decode.reserve, decode._take_status

        async def refuse_once(*args: object, **options: object) -> object:
            seen.append("reserve")
            if seen.count("reserve") == 1:
                raise NoCapacity("no room")
            return await reserve(*args, **options)  # type: ignore[arg-type]

        def note(*args: object) -> None:
            seen.append("report")
            take_status(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(decode, "reserve", refuse_once)
        monkeypatch.setattr(decode, "_take_status", note)
        prepared = await router.prepare(source(max_tokens=2))
        assert (await collect(router, prepared)).tokens == [local.expected(prepared)]
        first = seen.index("reserve")
        assert seen[first + 1] == "report"
    finally:
        await local.close()
