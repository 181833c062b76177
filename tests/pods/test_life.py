"""What surrounds the requests: health, reflection, watching, draining, metrics, tokens, TLS; in process."""

import asyncio
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay.common.errors import Draining, Internal, KvrelayError, Unauthenticated
from kvrelay.common.rpc import called, from_rpc_error
from kvrelay.common.telemetry import exposition
from kvrelay.engine.client import AsyncEngine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.fake import FakeConfig, FakeEngine
from kvrelay.engine.pod.metrics import pod_registry
from kvrelay.engine.pod.outbox import Outbox
from kvrelay.engine.pod.server import Pod, run_pod
from kvrelay.engine.pod.settings import PodSettings
from kvrelay.v1 import decode_pb2, pod_pb2, pod_pb2_grpc
from tests.pods.harness import expected, request, running, settings

pytestmark = pytest.mark.integration


async def _get(url: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, method=method, headers=headers), timeout=5
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    return await asyncio.to_thread(ask)


async def test_health_and_reflection() -> None:
    async with running("both") as pod:
        stub = health_pb2_grpc.HealthStub(pod.caller.channel)
        for service in ("", "kvrelay.v1.Pod", "kvrelay.v1.Prefill", "kvrelay.v1.Decode"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        pod.pod.state.ask_to_leave()
        await pod.pod.serve()
        answer = await stub.Check(health_pb2.HealthCheckRequest(service="kvrelay.v1.Decode"))
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("role", "services"),
    [("prefill", {"Pod", "Prefill"}), ("decode", {"Pod", "Decode"}), ("both", {"Pod", "Prefill", "Decode"})],
)
async def test_reflection_lists_the_roles_services(role: str, services: set[str]) -> None:
    async with running(role) as pod:
        stub = reflection_pb2_grpc.ServerReflectionStub(pod.caller.channel)

        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvrelay.v1.Pod")

        answers = [answer async for answer in stub.ServerReflectionInfo(ask())]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {name.removeprefix("kvrelay.v1.") for name in names if name.startswith("kvrelay.")} == services
        assert "grpc.health.v1.Health" in names
        assert answers[1].file_descriptor_response.file_descriptor_proto


async def test_info_names_the_pod() -> None:
    async with running("prefill", pod_id="p7") as pod:
        info = await called(pod.caller.pod.GetInfo(pod_pb2.GetInfoRequest()))
        assert (info.pod_id, info.epoch, info.role) == ("p7", pod.engine.info.epoch, pod_pb2.ROLE_PREFILL)
        assert info.layout.groups[0].block_size == 16


async def test_watchers_hear_of_changes_and_of_nothing() -> None:
    async with running("both", {"step_ms": 5.0}) as pod, pod.caller.stream() as reader:
        watch = pod.caller.pod.Watch(pod_pb2.WatchRequest(router_id="r"))

        async def following() -> pod_pb2.PodStatus:
            async with asyncio.timeout(5):
                status = await watch.read()
            assert isinstance(status, pod_pb2.PodStatus)
            return status

        first, idle = await following(), await following()
        assert first.ready
        assert first == idle
        await pod.caller.hold("decode")
        await pod.caller.reserve(request("a"), local=True)
        while (await following()).num_running != 1:
            pass
        await pod.caller.hold("")
        await reader.until_finished("a")
        while (await following()).num_running != 0:
            pass
        await called(pod.caller.pod.Drain(pod_pb2.DrainRequest(grace_ms=5000)))
        serving = asyncio.create_task(pod.pod.serve())
        while not (last := await following()).draining:
            pass
        assert not last.ready
        assert await serving == 0


async def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    async with running("both", {"step_ms": 10.0}) as pod, pod.caller.stream() as reader:
        wanted = request("a", max_tokens=30)
        await pod.caller.hold("decode")
        await pod.caller.reserve(wanted, local=True)
        assert (await _get(f"{pod.web}/drain"))[0] == 405
        assert (await _get(f"{pod.web}/readyz"))[0] == 200
        status, _ = await _get(f"{pod.web}/drain", "POST")
        assert status == 200
        serving = asyncio.create_task(pod.pod.serve())
        with pytest.raises(Draining):
            await pod.caller.reserve(request("b"), local=True)
        assert (await _get(f"{pod.web}/readyz"))[0] == 503
        assert (await _get(f"{pod.web}/healthz"))[0] == 200
        assert not serving.done()
        await pod.caller.hold("")
        await reader.until_finished("a")
        assert reader.tokens("a") == expected(wanted)
        assert await serving == 0


async def test_the_grace_period_ends() -> None:
    async with running("both", grace_seconds=0.2) as pod, pod.caller.stream() as reader:
        await pod.caller.hold("decode")
        await pod.caller.reserve(request("a"), local=True)
        await reader.step()
        pod.pod.state.ask_to_leave()
        assert await pod.pod.serve() == 0
        stopping = asyncio.create_task(pod.pod.stop())
        with pytest.raises(Draining):
            await reader.step()
        await stopping


async def test_http() -> None:
    async with running("decode") as pod, pod.caller.stream() as reader:
        await pod.caller.reserve(request("a", length=20), local=True)
        await reader.until_finished("a")
        await pod.caller.until_free()
        status, ready = await _get(f"{pod.web}/readyz")
        assert (status, json.loads(ready)) == (
            200,
            {"ready": True, "reason": "", "draining": False, "role": "decode", "registered": False},
        )
        status, text = await _get(f"{pod.web}/metrics")
        assert status == 200
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines["kvrelay_pod_generated_tokens_total"] == "8.0"
        assert lines['vllm:generation_tokens_total{model_name="fake"}'] == "8.0"
        assert lines['vllm:num_requests_running{model_name="fake"}'] == "0.0"
        assert lines['vllm:kv_cache_usage_perc{model_name="fake"}'] == "0.0"
        assert lines["kvrelay_transfer_payload_bytes_sent_total"] == "0.0"
        assert lines["kvrelay_pod_ready"] == "1.0"
        assert (await _get(f"{pod.web}/healthz"))[0] == 200
        assert (await _get(f"{pod.web}/other"))[0] == 404
        assert (await _get(f"{pod.web}/healthz", "DELETE"))[0] == 405


async def test_metrics_of_the_engines_process_begin_with_it(tmp_path: Path) -> None:
    chosen = settings(role="decode")
    engine = AsyncEngine(EngineConfig(model=tmp_path), chosen.make_pod_id())
    pod = Pod(chosen, engine)
    text = exposition(pod_registry(engine, pod.state, pod._routes, pod._events, "model", "decode")).decode()
    assert "kvrelay_pod_ready 0.0" in text
    assert "kvrelay_engine_process" not in text
    async with running("decode") as started:
        _, text = await _get(f"{started.web}/metrics")
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(lines["kvrelay_engine_process_resident_memory_bytes"]) > 1 << 20


async def test_tokens() -> None:
    async with running("decode", auth_token="secret") as pod:
        stub = pod_pb2_grpc.PodStub(pod.caller.channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(Unauthenticated):
                await called(stub.GetInfo(pod_pb2.GetInfoRequest(), metadata=metadata))
            watch = stub.Watch(pod_pb2.WatchRequest(), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert isinstance(from_rpc_error(caught.value), Unauthenticated)
        good = (("authorization", "Bearer secret"),)
        assert (await called(stub.GetInfo(pod_pb2.GetInfoRequest(), metadata=good))).epoch
        health = health_pb2_grpc.HealthStub(pod.caller.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        assert (await _get(f"{pod.web}/drain", "POST"))[0] == 401
        assert not pod.pod.state.leaving.is_set()
        assert (await _get(f"{pod.web}/drain", "POST", Authorization="Bearer secret"))[0] == 200


def _certificates(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and is its own authority."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=pod"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=30)
    return cert, key


async def test_tls_with_callers_certificates(tmp_path: Path) -> None:
    cert, key = await asyncio.to_thread(_certificates, tmp_path)
    async with running("decode", tls_cert=cert, tls_key=key, tls_ca=cert) as pod:
        address = f"127.0.0.1:{pod.pod.grpc_port}"
        mine = grpc.ssl_channel_credentials(cert.read_bytes(), key.read_bytes(), cert.read_bytes())
        async with grpc.aio.secure_channel(address, mine) as channel:
            assert (await called(pod_pb2_grpc.PodStub(channel).GetInfo(pod_pb2.GetInfoRequest()))).epoch
        for other in (
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(cert.read_bytes())),
            grpc.aio.insecure_channel(address),
        ):
            async with other as channel:
                with pytest.raises(KvrelayError):
                    await called(pod_pb2_grpc.PodStub(channel).GetInfo(pod_pb2.GetInfoRequest(), timeout=5))


async def test_a_pod_ends_with_its_engine() -> None:
    chosen = settings(role="decode")
    engine = FakeEngine(FakeConfig(), chosen.make_pod_id())
    running_pod = asyncio.create_task(run_pod(chosen, engine))
    while engine._info is None:
        await asyncio.sleep(0.01)
    engine.crash()
    assert await running_pod == 1
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_taken_port_is_an_error() -> None:
    async with running("decode") as pod:
        for taken in ({"grpc_port": pod.pod.grpc_port}, {"http_port": pod.pod.http_port}):
            chosen = settings(role="decode", **taken)
            second = Pod(chosen, FakeEngine(FakeConfig(), chosen.make_pod_id()))
            with pytest.raises((Internal, OSError)):
                await second.start()
            await second.stop()


async def test_a_slow_reader_is_cut_off_and_the_others_are_not() -> None:
    """gRPC buffers some; what it does not take waits in a bounded queue."""
    async with running("both", {"step_ms": 0.0}) as pod, pod.caller.stream("fast") as fast:
        slow = pod.caller.decode.Stream(decode_pb2.StreamRequest(router_id="router-1"))
        await slow.initial_metadata()
        many = request("slow", n=64, max_tokens=4000, ignore_eos=True, logprobs=20)
        await pod.caller.reserve(many, local=True)
        async with asyncio.timeout(60):
            while pod.pod._routes.counters.slow_streams == 0:
                await asyncio.sleep(0.05)
        await pod.caller.until_free()
        assert fast.deltas == []
        slow.cancel()


@pytest.mark.unit
async def test_outboxes_are_bounded_and_end() -> None:
    box: Outbox[int] = Outbox(2)
    assert box.put(1)
    assert box.put(2)
    assert not box.put(3)
    with pytest.raises(KvrelayError, match="2 messages behind"):
        await box.get()
    ending: Outbox[int] = Outbox(2)
    ending.put(1)
    ending.end(Draining("over"))
    assert not ending.put(2)
    assert await ending.get() == 1
    with pytest.raises(Draining):
        await ending.get()


@pytest.mark.unit
async def test_what_waits_in_an_outbox_comes_together() -> None:
    box: Outbox[int] = Outbox(4)
    for number in range(4):
        box.put(number)
    assert await box.get_all(3) == [0, 1, 2]
    assert await box.get_all(3) == [3]
    waiting = asyncio.ensure_future(box.get_all(3))
    await asyncio.sleep(0)
    box.put(4)
    assert await waiting == [4]
    box.put(5)
    box.end()
    assert await box.get_all(3) == [5]
    assert await box.get_all(3) == []


@pytest.mark.unit
def test_options_of_the_engine_are_options_of_the_pod() -> None:
    fields = PodSettings.model_fields
    config = EngineConfig(model=Path("m"))
    for name in EngineConfig.__struct_fields__:
        assert name in fields, f"EngineConfig.{name} has no option"
        if name != "model":
            assert fields[name].default == getattr(config, name), name
    assert PodSettings(model=Path("m")).engine_config() == config


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "ports"),
    [({}, (9200, 9201)), ({"index": 3}, (9230, 9231)), ({"grpc_port": 5}, (5, 6)), ({"grpc_port": 0}, (0, 0))],
)
def test_ports_by_index(options: dict[str, int], ports: tuple[int, int]) -> None:
    chosen = PodSettings(engine="fake", **options)  # type: ignore[arg-type]
    assert (chosen.listen_grpc, chosen.listen_http) == ports
