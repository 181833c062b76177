"""Pods that want a token, or a certificate: a router that has it serves, any other is told why and gets nothing."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.common.errors import Unavailable
from kvrelay.router.settings import RouterSettings
from tests.router.cluster import Local, collect, source, until

pytestmark = pytest.mark.integration


@pytest.fixture
async def local(model_dir: Path) -> AsyncIterator[Local]:
    local = Local(model_dir)
    yield local
    await local.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pod` and `router`, each `.pem` and `.key`; each signs itself, and is its own authority."""
    folder = tmp_path_factory.mktemp("certificates")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    for name in ("pod", "router"):
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run([*command.split(), *names, *files], check=True, capture_output=True, timeout=30)
    return folder


async def serves(local: Local) -> None:
    prepared = await local.router.prepare(source(max_tokens=5))
    assert (await collect(local.router, prepared)).tokens == [local.expected(prepared)]
    await local.whole()


async def is_refused(local: Local, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """With pods already added to a router that may not use them."""
    await until(lambda: sum("cannot use pod" in record.getMessage() for record in caplog.records) == len(local.pods))
    assert all(reason in record.getMessage() for record in caplog.records if "cannot use" in record.getMessage())
    assert not local.router.ready().ready
    with pytest.raises(Unavailable):
        await collect(local.router, await local.router.prepare(source()))
    for pod in local.pods.values():
        assert (await pod.engine.inspect()).num_requests == 0


async def test_the_right_token(local: Local, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    await local.add("p0", "prefill", auth_token_file=tmp_path / "token")
    await local.add("d0", "decode", auth_token="secret")
    await local.start(pod_auth_token="secret")
    await serves(local)
    assert local.pods["p0"].engine.stats.prompt_tokens > 0


@pytest.mark.parametrize("token", [{}, {"pod_auth_token": "guess"}])
async def test_no_token_or_a_wrong_one(
    local: Local, caplog: pytest.LogCaptureFixture, token: dict[str, object]
) -> None:
    await local.start(unavailable_after_ms=100, **token)
    await local.add("p0", "prefill", auth_token="secret")
    await local.add("d0", "decode", auth_token="secret")
    await is_refused(local, caplog, "the token is missing or wrong")


async def test_certificates_of_both_sides(local: Local, certificates: Path) -> None:
    pod = {"tls_cert": certificates / "pod.pem", "tls_key": certificates / "pod.key"}
    for name, role in (("p0", "prefill"), ("d0", "decode")):
        await local.add(name, role, tls_ca=certificates / "router.pem", **pod)  # type: ignore[arg-type]
    await local.start(
        pod_tls_ca=certificates / "pod.pem",
        pod_tls_cert=certificates / "router.pem",
        pod_tls_key=certificates / "router.key",
    )
    await serves(local)
    assert local.pods["p0"].engine.stats.prompt_tokens > 0


@pytest.mark.parametrize("shown", ["nothing", "no certificate", "a stranger's"])
async def test_without_the_right_certificate(
    local: Local, certificates: Path, caplog: pytest.LogCaptureFixture, shown: str
) -> None:
    options: dict[str, object] = {} if shown == "nothing" else {"pod_tls_ca": certificates / "pod.pem"}
    if shown == "a stranger's":
        options |= {"pod_tls_cert": certificates / "pod.pem", "pod_tls_key": certificates / "pod.key"}
    await local.start(unavailable_after_ms=100, **options)
    pod = {"tls_cert": certificates / "pod.pem", "tls_key": certificates / "pod.key"}
    await local.add("d0", "decode", tls_ca=certificates / "router.pem", **pod)
    await is_refused(local, caplog, "d0")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pod_auth_token": "a", "pod_auth_token_file": "b"}, "--pod-auth-token and --pod-auth-token-file"),
        ({"pod_auth_token_file": "none"}, "--pod-auth-token-file: none"),
        ({"pod_tls_ca": "a", "pod_tls_cert": "b"}, "--pod-tls-cert and --pod-tls-key"),
        ({"pod_tls_cert": "a", "pod_tls_key": "b"}, "needs --pod-tls-ca"),
    ],
)
def test_options_that_do_not_fit(model_dir: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RouterSettings(model=model_dir, **options)  # type: ignore[arg-type]
