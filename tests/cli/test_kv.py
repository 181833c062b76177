"""`kvrelay kv` against a real store."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.main import main
from kvrelay.common.ids import BlockId
from tests.kvstore.pod import SIZE, attached, chain_of
from tests.kvstore.store_process import StoreProcess

pytestmark = pytest.mark.integration

TOKEN = "secret"
IDS = chain_of(1, 10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    (tmp_path / "token").write_text(TOKEN)
    tiers = f"[{{tier: cpu, bytes: 1MiB}}, {{tier: file, bytes: 1MiB, directory: {tmp_path / 'blocks'}}}]"
    options = ("--tiers", tiers, "--redis-url", "redis://127.0.0.1:1/0", "--auth-token-file", str(tmp_path / "token"))
    process = StoreProcess(tmp_path, *options)
    process.start()
    try:
        yield process
    finally:
        process.kill()


def test_a_store_that_wants_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=any"
    names = ["-addext", "subjectAltName=DNS:kvrelay-pod", "-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/cert"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=30)
    files = ["--tls-cert", f"{tmp_path}/cert", "--tls-key", f"{tmp_path}/key", "--tls-ca", f"{tmp_path}/cert"]
    tiers = "[{tier: cpu, bytes: 1MiB}]"
    store = StoreProcess(tmp_path, "--tiers", tiers, "--redis-url", "redis://127.0.0.1:1/0", *files)
    store.start()
    try:
        asked = ["kv", "stat", "--address", store.address]
        assert main([*asked, *files, "--tls-name", "kvrelay-pod", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["tiers"][0]["tier"] == "cpu"
        for options, reason in (
            ([], f"the KV store at {store.address}"),
            (files, "Hostname Verification Check failed"),
            ([*files[:4], "--tls-name", "kvrelay-pod"], "need --tls-ca"),
            ([*files[:2], *files[4:]], "go together"),
            (["--tls-ca", f"{tmp_path}/none"], "none: No such file"),
        ):
            assert main([*asked, *options]) == 1
            assert reason in capsys.readouterr().err.replace("\n", " ")
    finally:
        store.kill()


def kv(store: StoreProcess, *words: str) -> int:
    return main(["kv", *words, "--address", store.address, "--auth-token-file", str(store.folder / "token")])


def answer(store: StoreProcess, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> object:
    capsys.readouterr()
    assert kv(store, *words, "--json") == status
    return json.loads(capsys.readouterr().out)


async def test_what_it_shows_and_does(store: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    async with attached(store.address, token=TOKEN) as pod:
        assert await pod.store(IDS) == 10
        await pod.read(IDS)
        (seen,) = answer(store, capsys, "stat")  # type: ignore[misc]
        assert (seen["num_pods"], seen["tiers"][0]["tier"], seen["tiers"][0]["num_blocks"]) == (1, "cpu", 10)
        assert seen["tiers"][0]["hits"] == 10
        held = answer(store, capsys, "ls")
        assert isinstance(held, list)
        assert {block["id"] for block in held} == {block_id.hex() for block_id in IDS}
        assert {(block["tier"], block["size"], block["dtype"]) for block in held} == {("cpu", SIZE, "float32")}
        assert answer(store, capsys, "ls", "--fingerprint", "other") == []
        (gone,) = answer(store, capsys, "rm", IDS[0].hex(), BlockId(bytes(16)).hex())  # type: ignore[misc]
        assert gone["num_removed"] == 1
        (block,) = [block async for block in pod.load(IDS[1:2])]
        pod.arena[block.offset] ^= 1
        seen = answer(store, capsys, "verify", status=1)
        assert [(tier["tier"], tier["num_whole"], tier["num_corrupt"]) for tier in seen] == [
            ("cpu", 8, 1),
            ("file", 0, 0),
        ]
        assert kv(store, "verify") == 0
        (gone,) = answer(store, capsys, "rm", "--all")  # type: ignore[misc]
        assert gone["num_removed"] == 8


async def test_for_people(store: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    async with attached(store.address, token=TOKEN) as pod:
        assert await pod.store(IDS) == 10
    assert kv(store, "ls", "--limit", "3") == 0
    shown = capsys.readouterr()
    assert sum(block_id.hex() in shown.out for block_id in IDS) == 3
    assert "the first 3" in shown.err
    assert kv(store, "stat") == 0
    shown = capsys.readouterr()
    assert "healthy" in shown.out
    assert "1.0 MiB" in shown.out


def test_what_is_refused(store: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["rm"], "name the blocks"),
        (["rm", "--all", IDS[0].hex()], "name the blocks"),
        (["rm", "xyz"], "no block's id"),
    ):
        assert kv(store, *words) == 1
        assert message in capsys.readouterr().err
    assert main(["kv", "stat", "--address", store.address]) == 1
    assert "token is missing" in capsys.readouterr().err
    assert main(["kv", "stat", "--address", "127.0.0.1:1"]) == 1
    assert "the KV store at 127.0.0.1:1" in capsys.readouterr().err
