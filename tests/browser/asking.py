"""What a person does in the chat."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def ask(page: "Page", text: str, max_tokens: int = 20) -> "Locator":
    """Sends it, and gives the answer's place in the conversation, where it is still being written."""
    answers = page.locator(".turn.assistant")
    number = answers.count()
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    return answers.nth(number)


def await_end(page: "Page") -> None:
    page.locator("#send:enabled").wait_for(timeout=120_000)


def words(turn: "Locator") -> str:
    return turn.locator(".words").text_content() or ""


def note(turn: "Locator") -> str:
    return turn.locator(".note").text_content() or ""


def num_tokens(turn: "Locator") -> int:
    found = re.match(r"(\d+) tokens? ", note(turn))
    assert found is not None, note(turn)
    return int(found[1])
