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
    """`pod`, `router` and `named`, each `.pem` and `.key`; each signs itself, and is its own authority. Only `named` has a name."""
    folder = tmp_path_factory.mktemp("certificates")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    for name, where in (("pod", "IP:127.0.0.1"), ("router", "IP:127.0.0.1"), ("named", "DNS:kvrelay-pod")):
        names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={where}"]
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


def named(certificates: Path) -> tuple[dict[str, object], dict[str, object]]:
    """Options of pods and of a router that all have the certificate with a name."""
    own = {"tls_ca": certificates / "named.pem", "tls_cert": certificates / "named.pem"}
    own["tls_key"] = certificates / "named.key"
    return {**own}, {f"pod_{option}": file for option, file in own.items()}


async def test_certificates_for_a_name_and_not_for_an_address(local: Local, certificates: Path) -> None:
    pod, router = named(certificates)
    await local.add("p0", "prefill", **pod)  # type: ignore[arg-type]
    await local.add("d0", "decode", **pod)  # type: ignore[arg-type]
    await local.start(pod_tls_name="kvrelay-pod", **router)
    await serves(local)


@pytest.mark.parametrize("wanted", ["", "another"])
async def test_a_certificate_for_another_name(
    local: Local, certificates: Path, caplog: pytest.LogCaptureFixture, wanted: str
) -> None:
    pod, router = named(certificates)
    await local.start(unavailable_after_ms=100, pod_tls_name=wanted, **router)
    await local.add("d0", "decode", **pod)  # type: ignore[arg-type]
    await is_refused(local, caplog, "Hostname Verification Check failed")


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
        ({"pod_tls_cert": "a", "pod_tls_key": "b"}, "--pod-tls-cert needs --pod-tls-ca"),
        ({"pod_tls_name": "a"}, "--pod-tls-name needs --pod-tls-ca"),
    ],
)
def test_options_that_do_not_fit(model_dir: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RouterSettings(model=model_dir, **options)  # type: ignore[arg-type]
