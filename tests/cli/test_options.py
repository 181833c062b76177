"""Options, ports and command lines of a stack."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.cli.client import ApiError, Chunk, events
from kvrelay.cli.commands import plan
from kvrelay.cli.main import parser
from kvrelay.cli.options import StackOptions, flags, pairs
from kvrelay.cli.ports import free_ports, is_free
from kvrelay.cli.state import State, load, save
from kvrelay.cli.up import stack_options
from kvrelay.common.settings import parse
from kvrelay.kvstore.settings import FileTier, KvStoreSettings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefill": -1}, "prefill"),
        ({"decode": 0}, "decode pod"),
        ({"decode": 11}, "free ports"),
        ({"kvstore": 11}, "free ports"),
        ({"kvstore": -1}, "kvstore"),
        ({"engine": "real"}, "engine"),
        ({"threads": -1}, "threads"),
        ({"http_port": 99999}, "http_port must be between 1 and 65535"),
        ({"grpc_port": 0}, "grpc_port must be between 1 and 65535"),
        ({"http_port": 9000}, "both 9000"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StackOptions(model=Path("m"), **changes)  # type: ignore[arg-type]


def test_flags_and_pairs() -> None:
    options = pairs(["block-size=32", "test-hooks", "x=a=b"])
    assert options == {"block-size": "32", "test-hooks": True, "x": "a=b"}
    assert flags({**options, "off": False}) == ["--block-size", "32", "--test-hooks", "--x", "a=b"]
    with pytest.raises(ValueError, match="name=value"):
        pairs(["=1"])


@pytest.mark.parametrize(
    ("line", "pods"),
    [
        ([], (1, 1, 0)),
        (["--both", "1"], (0, 0, 1)),
        (["--prefill", "2", "--decode", "3"], (2, 3, 0)),
        (["--prefill", "1", "--both", "2"], (1, 0, 2)),
    ],
)
def test_pods_of_a_command_line(line: list[str], pods: tuple[int, int, int]) -> None:
    options = stack_options(parser().parse_args(["up", *line, "--dtype", "float32", "--test-hooks"]))
    assert (options.prefill, options.decode, options.both) == pods
    assert options.engine_options == {"dtype": "float32", "test-hooks": True}


@pytest.mark.parametrize(
    ("cores", "pods", "threads", "spins"),
    [
        (2, {"prefill": 1, "decode": 1}, {"prefill-0": "1", "decode-0": "2"}, "1000"),
        (
            8,
            {"prefill": 2, "decode": 2},
            {"prefill-0": "2", "prefill-1": "2", "decode-0": "4", "decode-1": "4"},
            "1000",
        ),
        (2, {"prefill": 0, "decode": 0, "both": 1}, {"both-0": "2"}, None),
        (1, {"prefill": 0, "decode": 2}, {"decode-0": "1", "decode-1": "1"}, "1000"),
        (4, {"prefill": 1, "decode": 1, "threads": 1}, {"prefill-0": "1", "decode-0": "1"}, None),
    ],
)
def test_threads_and_how_long_they_hold_a_shared_core(
    cores: int,
    pods: dict[str, int],
    threads: dict[str, str],
    spins: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    options = StackOptions(model=Path("m"), cores=cores, free_ports=True, redis_url="redis://h:1", **pods)  # type: ignore[arg-type]
    engines = [command for command in plan(options, tmp_path) if command.kind != "router"]
    assert {command.name: command.line[command.line.index("--threads") + 1] for command in engines} == threads
    assert {command.env.get("GOMP_SPINCOUNT") for command in engines} == {spins}
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # inherited as it is
    assert not any("GOMP_SPINCOUNT" in command.env for command in plan(options, tmp_path))


def test_the_documented_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.commands.is_free", lambda port: True)
    commands = plan(StackOptions(model=Path("m"), prefill=2, decode=1, both=1, redis_url="redis://h:1"), tmp_path)
    assert [(command.name, command.grpc_port, command.http_port) for command in commands] == [
        ("prefill-0", 9100, 9101),
        ("prefill-1", 9110, 9111),
        ("decode-0", 9200, 9201),
        ("both-0", 9210, 9211),
        ("router", 9000, 8000),
    ]
    assert all("redis://h:1" in command.line for command in commands)


def test_kv_stores_come_before_the_pods_and_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.cli.commands.is_free", lambda port: True)
    token = tmp_path / "token"
    token.write_text("secret")
    options = StackOptions(
        model=Path("m"), prefill=1, decode=2, kvstore=2, redis_url="redis://h:1", pod_auth_token_file=str(token)
    )
    commands = plan(options, tmp_path)
    names = [command.name for command in commands]
    assert names == ["kvstore-0", "kvstore-1", "prefill-0", "decode-0", "decode-1", "router"]
    assert [(command.grpc_port, command.http_port) for command in commands[:2]] == [(9300, 9301), (9310, 9311)]
    pods = [command.line[command.line.index("--kvstore") + 1] for command in commands[2:5]]
    assert pods == ["127.0.0.1:9300", "127.0.0.1:9310", "127.0.0.1:9300"]
    for number, store in enumerate(commands[:2]):
        parsed = parse(KvStoreSettings, store.line[3:], {}, "kvrelay-kvstore")
        memory, files = parsed.tiers
        assert memory.bytes <= 512 << 20
        assert isinstance(files, FileTier)
        assert (files.bytes, files.directory) == (2 << 30, tmp_path / f"kvstore-{number}")
        assert parsed.auth_token_file == token
    assert not any("--kvstore" in command.line for command in plan(replace(options, kvstore=0), tmp_path))


def test_tiers_that_are_given_know_the_stores_name(tmp_path: Path) -> None:
    tiers = "[{tier: cpu, bytes: 1MiB}, {tier: file, bytes: 1MiB, directory: /data/{name}}]"
    options = StackOptions(model=Path("m"), kvstore=2, kvstore_tiers=tiers, redis_url="redis://h:1", free_ports=True)
    stores = plan(options, tmp_path)[:2]
    found = [parse(KvStoreSettings, store.line[3:], {}, "kvrelay-kvstore").tiers[1] for store in stores]
    assert [str(tier.directory) for tier in found if isinstance(tier, FileTier)] == [
        "/data/kvstore-0",
        "/data/kvstore-1",
    ]


def test_kv_stores_have_options_of_their_own(tmp_path: Path) -> None:
    line = ["up", "--free-ports", "--kvstore", "2", "--kvstore-option", "log-format=json"]
    options = replace(
        stack_options(parser().parse_args(line)),
        redis_url="redis://h:1",
        pod_options={"kvstore-1": {"log-level": "debug"}},
    )
    stores = [command for command in plan(options, tmp_path) if command.kind == "kvstore"]
    told = [parse(KvStoreSettings, store.line[3:], {}, "kvrelay-kvstore") for store in stores]
    assert [(each.log_format, each.log_level) for each in told] == [("json", "info"), ("json", "debug")]


@pytest.mark.parametrize(("line", "stores"), [([], 1), (["--no-kvstore"], 0), (["--kvstore", "3"], 3)])
def test_kv_stores_of_a_command_line(line: list[str], stores: int) -> None:
    assert stack_options(parser().parse_args(["up", *line])).kvstore == stores


def test_no_kv_store_and_some_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        stack_options(parser().parse_args(["up", "--no-kvstore", "--kvstore", "1"]))


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_free(port)
        options = StackOptions(model=Path("m"), http_port=port, redis_url="redis://h:1")
        with pytest.raises(OSError, match=f"port {port}, for router"):
            plan(options, tmp_path)


def test_free_ports_differ() -> None:
    assert len(set(free_ports(50))) == 50


def test_a_state_reads_back(tmp_path: Path) -> None:
    options = StackOptions(model=Path("/m"), engine_options={"block-size": "32", "test-hooks": True}, free_ports=True)
    save(tmp_path, State(options=options))
    assert load(tmp_path) == State(options=options)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match="state"):
        load(tmp_path)


def test_events_of_a_stream() -> None:
    lines = [": ping", 'data: {"choices": [{"text": "a"}]}', "", 'data: {"choices": [{"delta": {"content": "b"}}]}']
    assert [chunk.text for chunk in events(iter([*lines, "data: [DONE]", "data: never"]))] == ["a", "b"]
    with pytest.raises(ApiError, match="before it was done"):
        list(events(iter(lines)))
    with pytest.raises(ApiError, match="too much"):
        list(events(iter(['data: {"error": {"message": "too much"}}'])))
    assert Chunk().text == ""
