"""Flags over variables over the file over defaults; whatever is wrong stops the start by name."""

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from kvrelay.common.settings import BadOption, Names, ServiceSettings, Size, format_size, load, parse, parse_size

pytestmark = pytest.mark.unit


class Options(ServiceSettings):
    """A service for this test."""

    cache_bytes: Size = Field(default=512 << 20, ge=1)
    """How much is kept."""
    share: float = Field(default=0.5, ge=0, le=1)
    """A share, 100% at most."""
    names: Names = ()
    """Some names."""
    quick: bool = False
    """Be quick."""
    limit: int | None = None
    """A limit."""


def _parse(*argv: str, **environ: str) -> Options:
    return parse(Options, argv, environ, "service")


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("share: 0.1\nlimit: 1\ncache-bytes: 1MiB\ncluster: filed\nnames: [x, y]\n")
    variables = {"KVRELAY_CONFIG": str(file), "KVRELAY_SHARE": "0.2", "KVRELAY_LIMIT": "2"}
    settings = _parse("--share", "0.3", **variables)
    assert (settings.share, settings.limit, settings.cache_bytes) == (0.3, 2, 1 << 20)
    assert (settings.cluster, settings.quick, settings.names) == ("filed", False, ("x", "y"))


def test_redis_url_of_the_platform_comes_after_our_own() -> None:
    assert _parse(REDIS_URL="redis://a:1/0").redis_url == "redis://a:1/0"
    assert _parse(REDIS_URL="redis://a:1/0", KVRELAY_REDIS_URL="redis://b:1/0").redis_url == "redis://b:1/0"
    assert _parse("--redis-url", "redis://c:1/0", REDIS_URL="redis://a:1/0").redis_url == "redis://c:1/0"


def test_names_and_switches() -> None:
    assert _parse("--names", "a, b,").names == ("a", "b")
    assert _parse(KVRELAY_NAMES="c").names == ("c",)
    assert _parse("--quick").quick
    assert not _parse("--no-quick", KVRELAY_QUICK="true").quick


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        (["--nonsense", "1"], {}, "--nonsense"),
        (["--shar", "1"], {}, "--shar"),
        (["--share", "1.5"], {}, "--share"),
        (["--share", "nan"], {}, "--share"),
        (["--cache-bytes", "12 parsecs"], {}, "--cache-bytes"),
        (["--cache-bytes", "0"], {}, "--cache-bytes"),
        (["--limit", "many"], {}, "--limit"),
        (["--redis-url", "http://x"], {}, "--redis-url"),
        (["--log-level", "loud"], {}, "--log-level"),
        ([], {"KVRELAY_NONSENSE": "1"}, "KVRELAY_NONSENSE"),
        ([], {"KVRELAY_SHARE": "-1"}, "--share"),
        (["--config", "/nowhere/at.all"], {}, "/nowhere/at.all"),
    ],
)
def test_bad_options_are_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(BadOption) as caught:
        parse(Options, argv, environ, "service")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["nonsense: 1", "share: 7", "- share", "a: b: c", "share: [1"])
def test_bad_files_are_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(BadOption) as caught:
        _parse("--config", str(file))
    assert "\n" not in str(caught.value)
    assert "share" in str(caught.value) or "nonsense" in str(caught.value) or str(file) in str(caught.value)


def test_service_links_of_kubernetes_are_no_options() -> None:
    links = {
        "KVRELAY_ROUTER_SERVICE_HOST": "10.0.0.1",
        "KVRELAY_ROUTER_PORT": "tcp://10.0.0.1:80",
        "KVRELAY_ROUTER_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert _parse(**links) == _parse()


def test_load_prints_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Options, ["--share", "2"], "service")
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_help_shows_text_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(Options, ["--help"], "service")
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "How much is kept. [512MiB]" in text
    assert "A share, 100% at most. [0.5]" in text


def test_settings_are_frozen() -> None:
    settings = _parse()
    with pytest.raises(ValidationError):
        settings.share = 0.9  # type: ignore[misc]


@pytest.mark.parametrize("size", [0, 1, 1000, 1024, 3 << 20, 512 << 20, 1 << 30, 5 << 40])
def test_sizes_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_sizes_may_have_a_fraction() -> None:
    assert parse_size("1.5GiB") == 3 << 29


@pytest.mark.parametrize("text", ["9" * 400, "1e9", "2000000TiB", "9" * 308 + "GiB"])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no size|is over"):
        parse_size(text)
