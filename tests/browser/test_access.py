"""With API keys: the page asks for one, keeps it for its tab, and puts it nowhere but into a header."""

import pytest

from kvrelay.cli.stack import Stack
from tests.browser.asking import ask, await_end, num_tokens
from tests.browser.conftest import API_KEY, OpenPage

pytestmark = pytest.mark.browser

REFUSED = "status of 401"


def test_a_key_opens_the_page(locked: Stack, open_page: OpenPage) -> None:
    page = open_page(locked.url, expected=REFUSED)
    asked: list[tuple[str, str]] = []
    page.on("request", lambda request: asked.append((request.url, request.headers.get("authorization", ""))))
    dialog = page.get_by_role("dialog", name="API key")
    dialog.wait_for()
    assert page.locator("#pods tr").count() == 0
    key = dialog.get_by_label("Key")
    assert key.get_attribute("type") == "password"
    key.fill("wrong")
    key.press("Enter")
    page.get_by_role("alert").filter(has_text="does not know this key").wait_for()
    assert key.input_value() == ""
    key.fill(API_KEY)
    dialog.get_by_role("button", name="Use key").click()
    page.locator("#link", has_text="Live").wait_for()
    assert page.locator("#pods tr").count() == 2
    turn = ask(page, "With a key", max_tokens=4)
    await_end(page)
    assert num_tokens(turn) == 4
    assert asked[-1][1] == f"Bearer {API_KEY}"
    assert not [url for url, _ in asked if API_KEY in url]
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("document.cookie") == ""
    assert API_KEY not in page.content()
    page.reload()
    page.locator("#link", has_text="Live").wait_for()
    assert not dialog.is_visible(), "the tab keeps its key"
    page.get_by_role("button", name="Change key").click()
    dialog.wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_without_a_key_it_stays_locked_until_one_is_given(locked: Stack, open_page: OpenPage) -> None:
    page = open_page(locked.url, expected=REFUSED)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.wait_for()
    page.keyboard.press("Escape")
    page.locator("#link", has_text="Locked").wait_for()
    turn = ask(page, "Without")
    dialog.wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    await_end(page)
    assert "wants an API key" in (turn.locator(".note").text_content() or "")
    page.get_by_role("button", name="Change key").click()
    dialog.get_by_label("Key").fill(API_KEY)
    dialog.get_by_label("Key").press("Enter")
    page.locator("#link", has_text="Live").wait_for()


def test_one_key_serves_a_chat_that_was_begun_without(locked: Stack, open_page: OpenPage) -> None:
    page = open_page(locked.url, expected=REFUSED)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    turn = ask(page, "Then with", max_tokens=3)
    dialog.get_by_label("Key").fill(API_KEY)
    dialog.get_by_label("Key").press("Enter")
    await_end(page)
    assert num_tokens(turn) == 3
    page.locator("#link", has_text="Live").wait_for()
