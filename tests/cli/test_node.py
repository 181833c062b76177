"""What a node's /readyz is read as."""

import httpx
import pytest

from kvrelay.cli.node import Readiness, _read

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("status", "body", "read"),
    [
        (200, b'{"ready":true,"reason":"fine","num_prefill":1,"num_decode":2}', Readiness(True, "fine", 1, 2)),
        (503, b'{"ready":false,"reason":"loading"}', Readiness(False, "loading")),
        (200, b'{"ready":true,"reason":"","num_prefill":"x"}', Readiness(True, "status 200")),
        (502, b"<html>", Readiness(False, "status 502")),
        (200, b"[1]", Readiness(True, "status 200")),
    ],
)
def test_readiness(status: int, body: bytes, read: Readiness) -> None:
    assert _read(httpx.Response(status, content=body)) == read
