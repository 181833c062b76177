"""The chat: an answer comes piece by piece, can be stopped, is text whatever it says, and fails in words."""

import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kvrelay.cli.stack import Stack
from tests.browser.asking import ask, await_end, note, num_tokens, words
from tests.browser.conftest import OpenPage
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

HOSTILE = (
    '<img src=x onerror="window.broken=1"><script>window.broken=1</script><b>bold</b> [a](javascript:broken) \u202e'
)
COUNT_PIECES = """() => {
  window.pieces = 0;
  new MutationObserver((changes) => {
    for (const change of changes) if (change.target.classList?.contains("words")) window.pieces += change.addedNodes.length;
  }).observe(document.getElementById("log"), { subtree: true, childList: true });
}"""


def rows(stack: Stack) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = httpx.get(f"{stack.url}/console/api/state").json()["requests"]
    return told


def answer_with(page: "Page", body: str) -> None:
    """In the router's place."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_an_answer_comes_token_by_token(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    page.evaluate(COUNT_PIECES)
    turn = ask(page, "Say something long.", max_tokens=60)
    lengths: list[int] = []
    while not page.locator("#send:enabled").count():
        lengths.append(len(words(turn)))
    assert len(set(lengths)) > 8, "it grew while one looked"
    assert lengths == sorted(lengths)
    assert num_tokens(turn) == 60
    assert page.evaluate("window.pieces") > 30
    assert re.search(r"first after [\d.]+ m?s · \d+ tok/s · \d+ of \d+ prompt tokens reused", note(turn))


def test_a_second_turn_carries_the_first_and_clear_forgets_it(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    sent: list[list[dict[str, str]]] = []
    page.on("request", lambda request: sent.append(request.post_data_json["messages"]) if request.post_data else None)
    first = ask(page, "One")
    await_end(page)
    said = words(first)
    ask(page, "Two")
    await_end(page)
    page.get_by_role("button", name="Clear").click()
    assert page.locator(".turn").count() == 0
    ask(page, "Three")
    await_end(page)
    user = [{"role": "user", "content": text} for text in ("One", "Two", "Three")]
    assert sent == [[user[0]], [user[0], {"role": "assistant", "content": said}, user[1]], [user[2]]]


@pytest.mark.parametrize("how", ["button", "Escape", "Clear"])
def test_an_answer_can_be_stopped_and_the_pods_hear_of_it(stack: Stack, open_page: OpenPage, how: str) -> None:
    page = open_page(stack.url)
    turn = ask(page, "Never end.", max_tokens=400)
    eventually(lambda: len(words(turn)) > 20, "the answer has begun")
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop" if how == "button" else "Clear").click()
    await_end(page)
    eventually(lambda: rows(stack)[0]["status"] == "cancelled", "the router knows")
    assert 0 < rows(stack)[0]["output_tokens"] < 400
    if how == "Clear":
        assert page.locator(".turn").count() == 0
        return
    stopped = words(turn)
    assert note(turn).endswith("· stopped")
    assert stopped
    after = ask(page, "And now?", max_tokens=5)
    await_end(page)
    assert num_tokens(after) == 5
    assert words(turn) == stopped


def test_what_the_model_says_is_text(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    pieces = [HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)]
    chunks = [{"id": HOSTILE, "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    answer_with(page, body)
    turn = ask(page, HOSTILE)
    await_end(page)
    assert words(turn) == HOSTILE
    assert page.locator(".turn.user .words").text_content() == HOSTILE
    assert page.locator("#log :is(img, script, b, a)").count() == 0
    assert page.evaluate("window.broken") is None


def test_what_pods_and_clients_call_themselves_is_text(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    ask(page, "One row at least")
    await_end(page)
    told = httpx.get(f"{stack.url}/console/api/state").json()
    told["stores"] = [{"id": HOSTILE, "answers": True, "num_pods": 1, "tiers": [tier(HOSTILE)]}]
    for row in (*told["pods"], *told["requests"]):
        row.update({name: HOSTILE for name, value in row.items() if isinstance(value, str) and name != "state"})
    told["router"] |= {"model": HOSTILE, "policy": HOSTILE, "ready": False, "reason": HOSTILE}
    page.route("**/console/api/state", lambda route: route.fulfill(json=told))
    page.locator("#link", has_text="Not ready").wait_for()
    page.locator("#requests button").first.click()
    for place in ("#about", "#link", "#pods", "#tiers", "#requests", ".details"):
        assert "<img src=x" in (page.locator(place).first.text_content() or ""), place
    assert page.locator("body :is(img, b, a:not(.skip))").count() == 0
    assert page.evaluate("window.broken") is None


def tier(text: str) -> dict[str, object]:
    numbers = ("num_blocks", "used_bytes", "limit_bytes", "hits", "misses", "bytes_read", "bytes_written")
    return {"tier": text, "healthy": False, "reason": text, **dict.fromkeys(numbers, 1)}


def test_a_refused_request_says_why(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url, expected="status of 400")
    turn = ask(page, "Too much", max_tokens=1_000_000)
    await_end(page)
    assert "max_tokens is 1000000" in note(turn)
    assert page.locator(".note.bad").count() == 1
    again = ask(page, "Less", max_tokens=3)
    await_end(page)
    assert num_tokens(again) == 3, "the refused one is no part of the conversation"


def test_an_error_in_mid_answer_and_one_that_breaks_off(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    begun = 'data: {"id": "a", "choices": [{"index": 0, "delta": {"content": "So far"}}]}\n\n'
    for rest, told in (
        ('data: {"error": {"message": "all pods are gone"}}\n\n', "all pods are gone"),
        ("", "The answer broke off."),
    ):
        body = begun + rest
        answer_with(page, body)
        turn = ask(page, "Begin")
        await_end(page)
        assert words(turn) == "So far"
        assert note(turn).endswith(told)
