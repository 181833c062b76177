"""`kvrelay chat` without a server: what it does with a server's refusal."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from kvrelay.cli import chat
from kvrelay.cli.client import ApiError, Client
from kvrelay.cli.main import parser

pytestmark = pytest.mark.unit


def test_a_refusal_is_shown_as_it_is_and_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(client: Client, path: str, body: dict[str, object], timing: object) -> Iterator[str]:
        asked.append(body["messages"])
        raise ApiError("not [/bold] [red] here")

    monkeypatch.setattr(Client, "stream", refuse)
    monkeypatch.setattr(chat, "_typed", lambda console: iter(["one", "two"]))
    shown = io.StringIO()
    args = parser().parse_args(["chat"])
    assert args.run(args, Console(file=shown)) == 0
    assert len(asked) == 2
    assert shown.getvalue().splitlines() == ["not [/bold] [red] here"] * 2
