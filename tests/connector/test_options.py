"""How a pod is told of its stores."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.engine.config import KvStoreOptions
from kvrelay.engine.pod.settings import PodSettings

pytestmark = pytest.mark.unit


def test_none() -> None:
    assert PodSettings(engine="fake").kvstore_options() is None


@pytest.mark.parametrize(
    ("given", "addresses"),
    [
        ("127.0.0.1:9300", ("127.0.0.1:9300",)),
        ("127.0.0.1:9300,[::1]:9310,far:1", ("127.0.0.1:9300", "[::1]:9310", "far:1")),
    ],
)
def test_one_or_several(given: str, addresses: tuple[str, ...]) -> None:
    options = PodSettings(engine="fake", kvstore=given, auth_token="secret").kvstore_options()  # type: ignore[arg-type]
    assert options == KvStoreOptions(addresses=addresses, token="secret")


@pytest.mark.parametrize("given", ["host", "host:", ":1", "a:1,", ",a:1", "a:1,,b:1", "a:1, b:1", "a:1 b:1", "a:x"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ValidationError, match="kvstore"):
        PodSettings(engine="fake", kvstore=given)


def test_a_name_without_an_authority() -> None:
    with pytest.raises(ValidationError, match="--kvstore-tls-name needs --kvstore-tls-ca"):
        PodSettings(engine="fake", kvstore="a:1", kvstore_tls_name="store")


def test_with_tls(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pem" for name in ("tls_cert", "tls_key", "kvstore_tls_ca")}
    given = PodSettings(engine="fake", kvstore="a:1,b:2", kvstore_tls_name="store", **files)  # type: ignore[arg-type]
    options = given.kvstore_options()
    assert options is not None
    assert (options.addresses, options.token, options.tls_name) == (("a:1", "b:2"), "", "store")
    assert [options.tls_ca, options.tls_cert, options.tls_key] == [
        str(files[name]) for name in ("kvstore_tls_ca", "tls_cert", "tls_key")
    ]
