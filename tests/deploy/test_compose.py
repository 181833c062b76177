"""`docker compose up` for real: images built, a stack of containers, its faults, and nothing left behind."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence

import httpx
import openai
import pytest

from kvrelay.cli.ports import free_ports
from tests.deploy.docker_engine import DockerEngine, NoEngine
from tests.deploy.images import ROOT, TARGETS, Builder
from tests.deploy.project import HTTP_PORTS, UP_SECONDS, Project
from tests.waiting import eventually

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

MODEL = "smollm2"
BLOCK = 16
MAX_TORCHLESS_BYTES = 300_000_000
DOCKER_FOLDER = ROOT / "var" / "docker"
USER = "10001:10001"
SERVICES = {"decode": 2, "kvstore": 1, "prefill": 2, "redis": 1, "router": 1, "s3": 1}
# Room for two prompts in the first two tiers together, so that what is older goes to S3.
TIERS = {"CPU_TIER": "48MiB", "FILE_TIER": "48MiB", "S3_TIER": "2GiB", "ARENA": "100m"}
PROMPT_WORDS = 600


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    try:
        with DockerEngine(DOCKER_FOLDER / "data") as engine:
            yield engine
    except NoEngine as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="module")
def builder(engine: DockerEngine) -> Builder:
    return Builder(engine, DOCKER_FOLDER / "cache", os.environ.get("TORCH", "torch==2.13.0"))


@pytest.fixture(scope="module")
def idle(engine: DockerEngine, builder: Builder) -> Project:
    """With all images, and nothing started."""
    http, grpc = free_ports(2)
    settings = {"ROUTER_HTTP_PORT": str(http), "ROUTER_GRPC_PORT": str(grpc), "MODEL_WHEEL": str(builder.model_wheel())}
    project = Project(engine, {**settings, **TIERS})
    services = project.config()["services"]
    builder.all(services["redis"]["image"], services["s3"]["image"])
    return project


@pytest.fixture(scope="module")
def project(idle: Project) -> Iterator[Project]:
    with idle.running():
        yield idle


@pytest.fixture
def whole(project: Project) -> Project:
    """As the compose file says, whatever the test before has done."""
    if project.healthy() != SERVICES:
        _mend(project)
    return project


def _mend(project: Project) -> None:
    """`up --wait` would not do: it gives up at once where a router has been without decode pods for a while."""
    project.compose("up", "--detach", "--no-build", seconds=UP_SECONDS)
    eventually(lambda: project.healthy() == SERVICES, lambda: f"all are healthy: {project.healthy()}", UP_SECONDS)


@pytest.fixture
def client(whole: Project) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{whole.url}/v1", api_key=_key(whole), max_retries=0, timeout=120)


def _key(project: Project) -> str:
    return project.read("router", "/run/kvrelay/api/keys").strip()


def _ask(client: openai.OpenAI, prompt: str, max_tokens: int = 4) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were not computed."""
    answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=max_tokens)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details.cached_tokens if details else None) or 0


def _long_prompt(subject: str) -> str:
    return " ".join(f"{subject} {number}" for number in range(PROMPT_WORDS // 2))


# Images.


@pytest.mark.parametrize("target", ["router", "kvstore"])
def test_an_image_without_torch_is_small(idle: Project, target: str) -> None:
    image = f"kvrelay/{target}"
    assert int(idle.inspect(image)["Size"]) < MAX_TORCHLESS_BYTES
    with pytest.raises(RuntimeError, match="No module named 'torch'"):
        _python(idle, image, "import torch")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_holds_what_it_runs_and_no_more(idle: Project, target: str) -> None:
    image = f"kvrelay/{target}"
    config = idle.inspect(image)["Config"]
    assert config["User"] == USER
    assert not any("index" in entry.lower() or "18931" in entry for entry in config["Env"])
    if target == "tools":
        return
    assert "/healthz" in config["Healthcheck"]["Test"]
    assert str(HTTP_PORTS[target]) in config["Healthcheck"]["Test"]
    assert f"{HTTP_PORTS[target]}/tcp" in config["ExposedPorts"]
    code = "import shutil, sys, importlib.util as i; print([t for t in ('cc','gcc','ld','make') if shutil.which(t)], i.find_spec('pip'))"
    assert _python(idle, image, code).strip() == "[] None"
    assert "usage:" in idle.engine.docker("run", "--rm", "--network=none", "--read-only", image, "--help")


def _python(project: Project, image: str, code: str) -> str:
    return project.engine.docker("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", code)


# The compose file.


def test_containers_may_do_no_more_than_they_need(whole: Project) -> None:
    for service in SERVICES:
        for container in whole.containers(service):
            seen = whole.inspect(container)
            host = seen["HostConfig"]
            assert seen["Config"]["User"] == USER, service
            assert host["ReadonlyRootfs"], service
            assert host["CapDrop"] == ["ALL"], service
            assert "no-new-privileges:true" in host["SecurityOpt"], service
            assert host["Memory"] > 0, service
            assert host["RestartPolicy"]["Name"] == "unless-stopped", service
            published = [binding for bindings in host["PortBindings"].values() for binding in bindings]
            assert all(binding["HostIp"] == "127.0.0.1" for binding in published), service
            assert bool(published) == (service == "router"), service


def test_what_prometheus_is_told_to_scrape_is_there(whole: Project) -> None:
    for service, port in HTTP_PORTS.items():
        for container in whole.containers(service):
            labels = whole.inspect(container)["Config"]["Labels"]
            assert labels["prometheus.io/scrape"] == "true"
            assert labels["prometheus.io/port"] == str(port)
            path = labels["prometheus.io/path"]
            answer = httpx.get(f"http://{whole.address(container)}:{port}{path}", trust_env=False)
            assert "# TYPE kvrelay_" in answer.text


def test_the_gpu_profile_has_pods_for_gpus_in_place_of_the_others(idle: Project) -> None:
    services = idle.config("--profile", "gpu")["services"]
    assert sorted(services) == ["bucket", "decode-gpu", "kvstore", "prefill-gpu", "redis", "router", "s3", "setup"]
    for name in ("prefill-gpu", "decode-gpu"):
        [device] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
        assert services[name]["environment"]["KVRELAY_DEVICE"] == "cuda"


# The stack.


def test_a_chat_is_answered_through_prefill_and_decode(client: openai.OpenAI, whole: Project) -> None:
    pushed = _total(whole, "prefill", "kvrelay_transfer_bytes_sent_total")
    question = "Which animals live in the sea? Name as many of them as you can, with a word on what each of them eats and where."
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    text = answer.choices[0].message.content
    assert text
    parts = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert _total(whole, "prefill", "kvrelay_transfer_bytes_sent_total") > pushed


def test_a_client_without_the_key_is_refused(whole: Project) -> None:
    stranger = openai.OpenAI(base_url=f"{whole.url}/v1", api_key="guessed", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_stream_goes_on_when_its_decode_container_is_killed(client: openai.OpenAI, whole: Project) -> None:
    options = {
        "model": MODEL,
        "prompt": "Once upon a time, in a house by the sea,",
        "temperature": 0,
        "max_tokens": 160,
    }
    undisturbed = client.completions.create(**options).choices[0].text
    text = killed = ""
    for number, part in enumerate(client.completions.create(**options, stream=True)):
        text += part.choices[0].text
        if number == 16:
            [killed] = [pod for pod in whole.containers("decode") if _running(whole, pod)]
            whole.engine.docker("kill", killed)
    assert killed
    assert killed not in whole.containers("decode")
    assert text == undisturbed


def test_a_prefix_comes_back_from_s3_when_it_is_nowhere_else(client: openai.OpenAI, whole: Project) -> None:
    whole.kv("rm", "--all")
    prompt = _long_prompt("harbour")
    text, _ = _ask(client, prompt)
    _all_stored(whole)
    ids = {block["id"] for block in whole.kv("ls", "--limit=0")}
    assert len(ids) > 20
    for subject in ("mountain", "library", "orchard", "railway"):
        _ask(client, _long_prompt(subject))
    _all_stored(whole)
    eventually(lambda: _tiers_of(whole, ids) == {"s3"}, lambda: f"only in S3: {_tiers_of(whole, ids)}", 60)
    # Pods lose what they have cached by a restart, and the nearer tiers lose the rest.
    whole.compose("restart", "prefill", "decode")
    _mend(whole)
    nearer = [block["id"] for block in whole.kv("ls", "--limit=0") if block["tier"] != "s3"]
    whole.kv("rm", *nearer)
    before = _tier(whole, "s3")
    assert [_tier(whole, tier)["num_blocks"] for tier in ("cpu", "file")] == [0, 0]

    again, num_cached = _ask(client, prompt)
    assert again == text
    assert num_cached >= (len(ids) - 1) * BLOCK
    assert _tier(whole, "s3")["hits"] - before["hits"] >= len(ids) - 1


async def test_decode_is_scaled_to_three_and_the_router_uses_the_third(whole: Project) -> None:
    former = set(whole.containers("decode"))
    whole.up("--scale", "decode=3", "--no-recreate")
    [third] = set(whole.containers("decode")) - former
    async with openai.AsyncOpenAI(base_url=f"{whole.url}/v1", api_key=_key(whole), max_retries=0) as client:
        end = time.monotonic() + 60
        while not whole.metric("decode", third, "vllm:generation_tokens_total"):
            assert time.monotonic() < end, "the router sends the third pod nothing"
            asked = (
                client.completions.create(model=MODEL, prompt=f"{number} times", max_tokens=16) for number in range(6)
            )
            await asyncio.gather(*asked)


def test_down_leaves_nothing(whole: Project) -> None:
    began = time.monotonic()
    stopped = {container: service for service in SERVICES for container in whole.containers(service)}
    whole.compose("stop", seconds=180)
    codes = {service: whole.inspect(container)["State"]["ExitCode"] for container, service in stopped.items()}
    assert not any(codes[service] for service in HTTP_PORTS), codes
    assert time.monotonic() - began < 60
    whole.down()
    assert whole.leftovers() == {}


def _total(project: Project, service: str, name: str) -> float:
    return sum(project.metric(service, container, name) for container in project.containers(service))


def _running(project: Project, decode: str) -> float:
    return project.metric("decode", decode, "vllm:num_requests_running")


def _all_stored(project: Project) -> None:
    def waiting() -> float:
        return sum(_total(project, service, "kvrelay_pod_kvstore_waiting_blocks") for service in ("prefill", "decode"))

    eventually(lambda: waiting() == 0, "pods have stored what they computed", 60)


def _tiers_of(project: Project, ids: Sequence[str] | set[str]) -> set[str]:
    return {block["tier"] for block in project.kv("ls", "--limit=0") if block["id"] in ids}


def _tier(project: Project, name: str) -> dict[str, int]:
    [report] = project.kv("stat")
    [tier] = [tier for tier in report["tiers"] if tier["tier"] == name]
    return {"num_blocks": int(tier["num_blocks"]), "hits": int(tier["hits"])}
