"""The console's data and files: who gets them, what they say of pods, requests and stores, and what they never say."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.router.console.files import page_files
from kvrelay.router.console.timeline import NoTimeline, Timeline
from kvrelay.router.core import Router
from tests.router.cluster import LONG, Local, collect, source
from tests.router.stack import Fronts, Settings, fronts_of

STATE = "/console/api/state"
SECRET = "zebra-quartz-violin"
"""Stands in prompts, and in names that clients choose."""


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[Local]:
    local = Local(model_dir)
    yield local
    await local.close()


@contextlib.asynccontextmanager
async def fronts(router: Router, *keys: str) -> AsyncIterator[Fronts]:
    async with fronts_of(router, Settings(api_keys=keys), router.console) as running:
        yield running


async def state(running: Fronts) -> dict[str, Any]:
    answer = await running.http.get(STATE)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


async def state_where(running: Fronts, condition: Any) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while not condition(seen := await state(running)):
            await asyncio.sleep(0.05)
    return seen


# What an operator sees.


@pytest.mark.integration
async def test_a_request_goes_through_its_phases(local: Local) -> None:
    await local.add("p0", "prefill")
    await local.add("d0", "decode", fake_step_ms=20.0)
    router = await local.start(policy="least_loaded")
    async with fronts(router) as running:
        prepared = await router.prepare(source(LONG, max_tokens=40, ignore_eos=True))
        asked = asyncio.create_task(collect(router, prepared))
        live = await state_where(
            running, lambda seen: seen["requests"] and 0 < seen["requests"][0]["output_tokens"] < 40
        )
        await asked
        ended = await state_where(running, lambda seen: seen["requests"][0]["status"] != "running")
    [row] = live["requests"]
    assert row["status"] == "running"
    assert (row["prefill"], row["decode"], row["attempts"]) == ("p0", "d0", 1)
    assert live["router"]["running"] == 1
    [after] = ended["requests"]
    assert (after["number"], after["status"]) == (row["number"], "ok")
    assert (after["prompt_tokens"], after["output_tokens"]) == (len(LONG), 40)
    assert [phase for phase, _ in after["phases"]] == ["queue", "prefill", "push", "decode"]
    took = dict(after["phases"])
    assert took["decode"] > 30 * 20, "40 tokens at 20 ms a step"
    assert took["queue"] + took["prefill"] + took["push"] < took["decode"]
    assert abs(after["arrived_ms"] - live["now_ms"]) < 20_000
    assert ended["router"]["running"] == 0


@pytest.mark.integration
async def test_a_prompt_that_the_decode_pod_computes_has_no_push(local: Local) -> None:
    await local.add("d0", "decode")
    router = await local.start()
    async with fronts(router) as running:
        await collect(router, await router.prepare(source(LONG, max_tokens=3)))
        [row] = (await state(running))["requests"]
    assert (row["prefill"], row["decode"], row["status"]) == ("", "d0", "ok")
    assert [phase for phase, _ in row["phases"]] == ["queue", "prefill", "decode"]


@pytest.mark.integration
async def test_reused_tokens_are_told(local: Local) -> None:
    await local.add("p0", "prefill")
    await local.add("d0", "decode")
    router = await local.start(policy="least_loaded")
    async with fronts(router) as running:
        for _ in range(2):
            await collect(router, await router.prepare(source(LONG, max_tokens=3)))
        second, first = (await state(running))["requests"]
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, (len(LONG) - 1) // 16 * 16)


@pytest.mark.integration
async def test_a_request_that_fails_says_why(local: Local) -> None:
    router = await local.start(unavailable_after_ms=50)
    async with fronts(router) as running:
        body = {"model": "fake", "prompt": list(LONG)}
        assert (await running.http.post("/v1/completions", json=body)).status_code == 503
        seen = await state(running)
    [row] = seen["requests"]
    assert (row["status"], row["decode"], row["attempts"]) == ("unavailable", "", 0)
    [(phase, waited)] = row["phases"]
    assert phase == "queue"
    assert waited >= 50
    assert (seen["router"]["ready"], seen["pods"], seen["num_pods"]) == (False, [], 0)


@pytest.mark.integration
async def test_a_client_that_leaves_is_told_as_cancelled(local: Local) -> None:
    await local.add("d0", "decode", fake_step_ms=20.0)
    router = await local.start()
    async with fronts(router) as running:
        events = router.generate(await router.prepare(source(LONG, max_tokens=200, ignore_eos=True)))
        await anext(events)
        await events.aclose()
        [row] = (await state(running))["requests"]
    assert row["status"] == "cancelled"
    assert row["output_tokens"] < 200


@pytest.mark.integration
async def test_pods_are_told_with_their_load(local: Local) -> None:
    await local.add("p0", "prefill")
    await local.add("d0", "decode", fake_step_ms=20.0, fake_num_blocks=64)
    router = await local.start(policy="least_loaded")
    async with fronts(router) as running:
        asked = asyncio.create_task(
            collect(router, await router.prepare(source(LONG, max_tokens=100, ignore_eos=True)))
        )
        seen = await state_where(running, lambda seen: any(pod["running"] for pod in seen["pods"]))
        await asked
    assert [(pod["id"], pod["role"], pod["state"]) for pod in seen["pods"]] == [
        ("p0", "prefill", "ready"),
        ("d0", "decode", "ready"),
    ]
    decode = seen["pods"][1]
    assert decode["num_blocks"] == 64
    assert 0 < 64 - decode["free_blocks"] <= 12
    assert seen["num_pods"] == 2


@pytest.mark.integration
async def test_a_pod_that_leaves_is_gone_and_one_that_drains_drains(local: Local) -> None:
    await local.add("d0", "decode")
    lost = await local.add("d1", "decode")
    router = await local.start()
    async with fronts(router) as running:
        await state(running)
        await lost.pod.stop()
        await state_where(running, lambda seen: "unreachable" in [pod["state"] for pod in seen["pods"]])
        local.directory.remove(lost.record.pod_id)
        seen = await state_where(running, lambda seen: "gone" in [pod["state"] for pod in seen["pods"]])
        assert [(pod["id"], pod["state"]) for pod in seen["pods"]] == [("d0", "ready"), ("d1", "gone")]
        assert seen["num_pods"] == 1
        del local.pods["d1"]


# Who gets it.


@pytest.mark.integration
async def test_without_a_key_no_data(local: Local) -> None:
    router = await local.start()
    async with fronts(router, "right", "schlüssel") as running:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}):
            answer = await running.http.get(STATE, headers=headers)
            assert answer.status_code == 401
            assert "pods" not in answer.text
        assert (await running.http.get(f"{STATE}?api_key=right&key=right")).status_code == 401
        for path in (
            "/console/api/state/",
            "/console//api/state",
            "/console/../console/api/state",
            "/CONSOLE/api/state",
        ):
            assert (await running.http.get(path)).status_code in (401, 404)
        for key in (b"right", "schlüssel".encode()):
            assert (await running.http.get(STATE, headers={"Authorization": b"Bearer " + key})).status_code == 200
        assert (await running.http.get("/console")).status_code == 200, "the page itself tells nothing"


@pytest.mark.integration
async def test_where_it_is_off_there_is_nothing(local: Local) -> None:
    await local.add("d0", "decode")
    router = await local.start(console=False)
    assert router.console is None
    assert isinstance(router._timeline, NoTimeline)
    async with fronts(router) as running:
        await collect(router, await router.prepare(source(LONG, max_tokens=3)))
        assert router._timeline.rows() == []
        for path in ("/console", "/console/", "/console/main.js", STATE):
            assert (await running.http.get(path)).status_code == 404


@pytest.mark.integration
async def test_nothing_of_what_is_said_is_told(local: Local) -> None:
    """Of clients' words only the beginning of an id that they chose."""
    await local.add("p0", "prefill")
    await local.add("d0", "decode")
    router = await local.start()
    async with fronts(router) as running:
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": f"{SECRET} " * 20, "name": "who"}],
            "max_tokens": 20,
            "cache_salt": f"salt {SECRET}",
            "user": f"user {SECRET}",
            "stop": [f"stop {SECRET}"],
            "request_id": f"a-name-of-the-clients-own-{SECRET}",
        }
        answer = await running.http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": SECRET})
        said = answer.json()["choices"][0]["message"]["content"]
        told = (await running.http.get(STATE)).text
    assert json.loads(told)["requests"][0]["id"] == "chatcmpl-a-name-o…"
    assert len(said) > 10
    assert said not in told
    for word in SECRET.split("-"):
        assert word not in told


# What it costs.


@pytest.mark.integration
async def test_all_who_look_share_one_answer(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await local.start()
    made = 0
    build = Timeline.rows

    def counted(timeline: Timeline) -> list[object]:
        nonlocal made
        made += 1
        return list(build(timeline))

    monkeypatch.setattr(Timeline, "rows", counted)
    async with fronts(router) as running:
        begin = time.monotonic()
        answers = await asyncio.gather(*(running.http.get(STATE) for _ in range(100)))
        took = time.monotonic() - begin
    assert {answer.status_code for answer in answers} == {200}
    assert 1 <= made <= 1 + took / 0.25


@pytest.mark.integration
async def test_no_method_but_get(local: Local) -> None:
    router = await local.start()
    async with fronts(router) as running:
        for path in (STATE, "/console"):
            assert (await running.http.post(path, content=b"{}")).status_code == 405


# Files.


@pytest.mark.integration
async def test_the_page_and_all_that_it_names_are_served_under_a_strict_policy(local: Local) -> None:
    router = await local.start()
    async with fronts(router) as running:
        page = await running.http.get("/console")
        found = set(re.findall(r'(?:src|href)="([^"#]+)"', page.text))
        used: set[str] = set()
        while new := found - used:
            used |= new
            for name in new:
                found |= await imports_of(running.http, name)
        assert {f"console/{name}" for name in page_files()} - {"console/index.html"} == used, "no file is of no use"
        for path in ("console", *used):
            answer = await running.http.get(f"/{path}")
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
        moved = await running.http.get("/console/")
        assert (moved.status_code, moved.headers["location"]) == (308, "../console")
        for missing in ("/console/none.js", "/console/..%2fstate.py", "/console/page/main.js", "/console/state.py"):
            assert (await running.http.get(missing)).status_code == 404


async def imports_of(http: httpx.AsyncClient, name: str) -> set[str]:
    text = (await http.get(f"/{name}")).text if name.endswith(".js") else ""
    return {f"console/{module}" for module in re.findall(r'from "\./([^"]+)"', text)}


@pytest.mark.unit
def test_no_file_makes_markup_of_text_or_names_another_host() -> None:
    for name, file in page_files().items():
        text = file.body.decode()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            name
        )
        assert not re.search(r"localStorage|document\.cookie", text), name
        assert not re.search(r"\sstyle=|\son\w+=\"", text), name
        hosts = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, name
