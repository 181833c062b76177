"""The options of a store: the list of tiers from each source, and what stops the start."""

from pathlib import Path

import pytest

from kvrelay.common.settings import BadOption, parse
from kvrelay.kvstore.settings import CpuTier, FileTier, KvStoreSettings, S3Tier

pytestmark = pytest.mark.unit

TIERS = "[{tier: cpu, bytes: 64MiB, policy: lru}, {tier: file, bytes: 2GiB, directory: /data, direct: false}]"


def parsed(*argv: str, **environ: str) -> KvStoreSettings:
    return parse(KvStoreSettings, argv, environ, "kvrelay-kvstore")


def test_defaults() -> None:
    settings = parsed()
    assert settings.tiers == (CpuTier(tier="cpu", bytes=512 << 20, policy="arc"),)
    assert (settings.listen_grpc, settings.listen_http) == (9300, 9301)
    assert settings.node.endswith("-9300")
    later = parsed("--index", "2")
    assert (later.listen_grpc, later.listen_http) == (9320, 9321)
    assert parsed("--grpc-port", "0").node != parsed("--grpc-port", "0").node


def test_tiers_are_the_same_from_everywhere(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"tiers: {TIERS}")
    expected = (
        CpuTier(tier="cpu", bytes=64 << 20, policy="lru"),
        FileTier(tier="file", bytes=2 << 30, directory=Path("/data"), direct=False),
    )
    assert parsed("--tiers", TIERS).tiers == expected
    assert parsed(KVRELAY_TIERS=TIERS).tiers == expected
    assert parsed("--config", str(config)).tiers == expected


def test_credentials_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "id").write_text("me\n")
    (tmp_path / "secret").write_text("hidden\n")
    files = f"access_key_id_file: {tmp_path}/id, secret_access_key_file: {tmp_path}/secret"
    tiers = f"[{{tier: cpu, bytes: 1MiB}}, {{tier: s3, bytes: 1GiB, bucket: b, endpoint: 'http://x:1', {files}}}]"
    tier = parsed("--tiers", tiers).tiers[1]
    assert isinstance(tier, S3Tier)
    assert (tier.credential("access_key_id"), tier.credential("secret_access_key")) == ("me", "hidden")
    assert tier.credential("session_token") is None
    assert "hidden" not in repr(tier)


CPU = "{tier: cpu, bytes: 1MiB}"


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("[", "no YAML"),
        ("{}", "must be a list"),
        ("[]", "must be a list"),
        ("[3]", "entry 1 must be a mapping"),
        ("[{tier: tape, bytes: 1}]", "entry 1: tier must be one of cpu, file, s3"),
        ("[{bytes: 1}]", "entry 1: tier must be one of"),
        ("[{tier: cpu}]", r"entry 1 \(cpu\): bytes is required"),
        ("[{tier: cpu, bytes: 0}]", r"entry 1 \(cpu\): bytes"),
        ("[{tier: cpu, bytes: 1MiB, policy: fifo}]", r"entry 1 \(cpu\): policy"),
        ("[{tier: cpu, bytes: 1MiB, size: 3}]", r"entry 1 \(cpu\): size is no option"),
        (f"[{CPU}, {CPU}]", "each once"),
        ("[{tier: file, bytes: 1MiB, directory: /x}]", "cpu first"),
        (f"[{CPU}, {{tier: s3, bytes: 1MiB, bucket: b}}, {{tier: file, bytes: 1MiB, directory: /x}}]", "in this order"),
        (f"[{CPU}, {{tier: file, bytes: 1MiB}}]", r"entry 2 \(file\): directory is required"),
        (f"[{CPU}, {{tier: file, bytes: 1MiB, directory: /x, threads: 0}}]", r"entry 2 \(file\): threads"),
        (f"[{CPU}, {{tier: s3, bytes: 1MiB, bucket: b, secret_access_key: hunter2}}]", "put it into a file"),
        (f"[{CPU}, {{tier: s3, bytes: 1MiB, bucket: b, access_key_id_file: /x}}]", "go together"),
        (
            f"[{CPU}, {{tier: s3, bytes: 1, bucket: b, access_key_id_file: /nope/a, secret_access_key_file: /nope/b}}]",
            r"entry 2 \(s3\): access_key_id_file: /nope/a",
        ),
    ],
)
def test_bad_tiers_stop_the_start(tiers: str, message: str) -> None:
    with pytest.raises(BadOption, match=f"option --tiers: .*{message}") as caught:
        parsed("--tiers", tiers)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node-id", "a/b"], "--node-id"),
        (["--auth-token", "a", "--auth-token-file", "b"], "exclude each other"),
        (["--tls-cert", "a"], "go together"),
        (["--tls-ca", "a"], "needs --tls-cert"),
        (["--peer-tls-name", "a"], "needs --peer-tls-ca"),
        (["--index", "10"], "--index"),
    ],
)
def test_other_bad_options(options: list[str], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        parsed(*options)
