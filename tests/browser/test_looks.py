"""For everyone: by keyboard, on narrow screens, in light and dark, without motion, with names for those who listen."""

import re
from typing import TYPE_CHECKING, Literal

import pytest

from kvrelay.cli.stack import Stack
from tests.browser.asking import ask, await_end, num_tokens, words
from tests.browser.conftest import OpenPage
from tests.browser.looks import beside, contrasts, has_visible_focus
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

LONG_WORD = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3


def focused(page: "Page") -> str:
    return str(
        page.evaluate("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
    )


def tab_to(page: "Page", wanted: str, key: str = "Tab") -> None:
    for _ in range(40):
        page.keyboard.press(key)
        assert has_visible_focus(page), focused(page)
        if focused(page) == wanted:
            return
    raise AssertionError(f"{wanted} is not reached by {key}")


def test_by_keyboard_alone(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    page.locator("#link", has_text="Live").wait_for()
    page.keyboard.press("Tab")
    assert focused(page) == "skip"
    assert has_visible_focus(page)
    page.keyboard.press("Enter")
    assert focused(page) == "message"
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    turn = page.locator(".turn.assistant").last
    assert page.locator(".turn.user .words").text_content() == "One line\nand another"
    eventually(lambda: len(words(turn)) > 10, "the answer has begun")
    assert focused(page) == "message", "one can write on"
    page.keyboard.press("Escape")
    await_end(page)
    tab_to(page, "max-tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("7")
    tab_to(page, "message", "Shift+Tab")
    page.keyboard.type("Seven tokens")
    tab_to(page, "send")
    page.keyboard.press("Space")
    await_end(page)
    assert num_tokens(page.locator(".turn.assistant").last) == 7
    tab_to(page, "pause", "Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#link", has_text="Paused").wait_for()
    page.keyboard.press("Enter")
    page.locator("#link", has_text="Live").wait_for()
    tab_to(page, "scroll")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    row = page.locator(".details")
    assert row.count() == 1
    eventually(lambda: "7 output tokens" in (row.text_content() or ""), "the first row is of the last request")
    page.keyboard.press("Enter")
    assert row.count() == 0


def test_paused_it_asks_nothing(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    page.locator("#link", has_text="Live").wait_for()
    page.get_by_role("button", name="Pause").click()
    page.locator("#link", has_text="Paused").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    ask(page, "Still", max_tokens=60)
    await_end(page)  # 60 tokens take longer than the time between two questions
    assert [url for url in asked if "api/state" in url] == []


@pytest.mark.parametrize("pixels", [360, 320, 768, 1024, 1120, 1200])
def test_nothing_is_beside_a_narrow_screen(stack: Stack, open_page: OpenPage, pixels: int) -> None:
    page = open_page(stack.url, viewport={"width": pixels, "height": 700})
    page.locator("#link", has_text="Live").wait_for()
    assert beside(page) == []
    ask(page, f"{LONG_WORD} {LONG_WORD}", max_tokens=30)
    assert beside(page) == []
    await_end(page)
    page.locator("#requests button").first.click()
    page.locator(".details").wait_for()
    assert beside(page) == []
    page.route("**/console/api/state", lambda route: route.fulfill(json=_troubled(route.fetch().json())))
    page.locator("#link", has_text="Not ready").wait_for()
    assert beside(page) == []
    for name in ("Send", "Stop", "Clear", "Pause"):
        at = page.get_by_role("button", name=name).bounding_box()
        assert at is not None
        assert at["x"] >= 0
        assert at["x"] + at["width"] <= pixels
        assert min(at["width"], at["height"]) >= 24


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(stack: Stack, open_page: OpenPage, scheme: Literal["light", "dark"]) -> None:
    page = open_page(stack.url, color_scheme=scheme, expected="status of 400")
    page.locator("#link", has_text="Live").wait_for()
    ask(page, "Refused", max_tokens=1_000_000)
    await_end(page)
    ask(page, "Words to look at", max_tokens=100)
    page.locator(".requests .state.live").first.wait_for()
    page.locator("#requests button").first.click()
    page.locator(".details").wait_for()
    seen = contrasts(page)
    page.get_by_role("button", name="Stop").click()
    page.locator("#send:enabled").wait_for()
    page.route("**/console/api/state", lambda route: route.fulfill(json=_troubled(route.fetch().json())))
    page.locator("#link", has_text="Not ready").wait_for()
    page.evaluate("document.getElementById('key-dialog').showModal()")
    seen += contrasts(page)
    texts = [text for text, _ in seen]
    for text in ("Live", "running", "Write a message", "API key", "unreachable", "gone 9 s ago", "disk full", "Stop"):
        assert text in texts
    assert any(text.startswith("bar ") for text in texts)
    assert {text: ratio for text, ratio in seen if ratio < 4.5} == {}
    light = scheme == "light"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(243, 245, 248)" if light else "rgb(15, 20, 27)"
    )


def _troubled(told: dict[str, object]) -> dict[str, object]:
    pod, other = told["pods"]  # type: ignore[misc]
    states = [
        {**pod, "id": f"pod-{state}", "state": state, "gone_seconds": 9}
        for state in ("unreachable", "gone", "draining")
    ]
    numbers = ("num_blocks", "used_bytes", "limit_bytes", "hits", "misses", "bytes_read", "bytes_written")
    tiers = [{"tier": "file", "healthy": False, "reason": "disk full", **dict.fromkeys(numbers, 5)}]
    stores = [{"id": "store", "answers": True, "num_pods": 1, "tiers": tiers}]
    router = {**told["router"], "ready": False, "reason": "no decode pod"}  # type: ignore[dict-item]
    requests = [{**row, "status": "deadline_exceeded"} for row in told["requests"]]  # type: ignore[attr-defined]
    return {**told, "requests": requests, "router": router, "pods": [pod, other, *states], "stores": stores}


def test_everything_has_a_name_and_a_role(stack: Stack, open_page: OpenPage) -> None:
    page = open_page(stack.url)
    ask(page, "A row", max_tokens=5)
    await_end(page)
    page.get_by_role("img", name=re.compile(r"queue .* ms, prefill .* ms, push .* ms, decode .* ms")).first.wait_for()
    for role, name in (
        ("heading", "kvrelay"),
        ("heading", re.compile("^Pods")),
        ("heading", re.compile("^Chat")),
        ("table", re.compile("^Pods")),
        ("table", re.compile("^Requests")),
        ("region", re.compile("^Requests")),
        ("columnheader", "KV blocks in use"),
        ("log", "Conversation"),
        ("textbox", "Message"),
        ("spinbutton", "Temperature"),
        ("spinbutton", "Max tokens"),
        ("link", "Skip to the chat"),
    ):
        assert page.get_by_role(role, name=name).count() >= 1, (role, name)  # type: ignore[arg-type]
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.get_by_role("status").filter(has_text="Answer complete, 5 tokens").count() == 1
    rows = page.locator("#requests button")
    assert rows.first.get_attribute("aria-expanded") == "false"
    rows.first.click()
    assert rows.first.get_attribute("aria-expanded") == "true"
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, [role=img], [tabindex]")]
          .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length || one.getAttribute("aria-labelledby")))
          .map((one) => one.outerHTML)"""
    )
    assert nameless == []


def test_without_motion_nothing_blinks(stack: Stack, open_page: OpenPage) -> None:
    for motion, name in (("no-preference", "blink"), ("reduce", "none")):
        page = open_page(stack.url, reduced_motion=motion)
        ask(page, "Blink", max_tokens=200)
        page.locator(".turn.live").wait_for()
        script = "getComputedStyle(document.querySelector('.turn.live .words'), '::after').animationName"
        assert page.evaluate(script) == name
        page.keyboard.press("Escape")
        await_end(page)
