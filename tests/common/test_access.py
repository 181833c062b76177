"""Tokens: given as an option or in a file, never half."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from kvrelay.common.access import PodAccess, bearer, token_option
from kvrelay.common.errors import Internal

pytestmark = pytest.mark.unit


def test_a_token_comes_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  from a file\n")
    assert token_option("auth-token", None, None) == ""
    assert token_option("auth-token", SecretStr("given"), None) == "given"
    assert token_option("auth-token", None, file) == "from a file"
    with pytest.raises(ValueError, match="--auth-token and --auth-token-file exclude each other"):
        token_option("auth-token", SecretStr("given"), file)


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", b"\xff\xfe", "é".encode(), b"x" * 4097])
def test_what_is_no_token_is_refused_by_option(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"option --auth-token-file: .*token"):
        token_option("auth-token", None, file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"option --auth-token-file: .*none: No such file"):
        token_option("auth-token", None, tmp_path / "none")
    with pytest.raises(Internal, match="none: No such file"):
        PodAccess.load("", ca=tmp_path / "none", cert=None, key=None)


def test_an_empty_token_is_none() -> None:
    with pytest.raises(ValueError, match="option --auth-token"):
        token_option("auth-token", SecretStr(""), None)
    assert bearer("") == ()
    assert bearer("t") == (("authorization", "Bearer t"),)
