"""Pods that die, a router that dies and comes back: the page stays and says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.cli.stack import Stack
from tests.browser.asking import ask, await_end, num_tokens, words
from tests.browser.conftest import OpenPage, fake
from tests.waiting import eventually

pytestmark = pytest.mark.browser


@pytest.fixture
def frail(model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    with fake(model_dir, tmp_path / "run", decode=2) as stack:
        yield stack


def test_a_pod_that_dies_is_gone_and_the_answer_goes_on(frail: Stack, open_page: OpenPage) -> None:
    page = open_page(frail.url)
    page.locator("#pods-count", has_text="3 of 3 ready").wait_for()
    turn = ask(page, "Outlive it", max_tokens=200)
    eventually(lambda: len(words(turn)) > 20, "the answer has begun")
    serving = page.locator("#requests td.pods").first
    eventually(lambda: "→" in (serving.text_content() or ""), "the time line names its pods")
    name = (serving.text_content() or "").partition(" → ")[2]
    victim = frail.node(name)
    victim.kill()
    page.locator("#pods tr.gone", has_text=name).filter(has_text="gone").wait_for()
    page.locator("#pods-count", has_text="2 of 2 ready").wait_for()
    await_end(page)
    assert num_tokens(turn) == 200
    page.locator("#requests button").first.click()
    page.locator(".details", has_text="2 attempts").wait_for()
    assert page.locator("#link").text_content() == "Live"
    victim.restart()
    page.locator("#pods-count", has_text="3 of 3 ready").wait_for(timeout=60_000)


def test_a_router_that_dies_and_comes_back(frail: Stack, open_page: OpenPage) -> None:
    page = open_page(frail.url, expected="ERR_|Failed to load|network")
    page.locator("#link", has_text="Live").wait_for()
    turn = ask(page, "Interrupted", max_tokens=300)
    eventually(lambda: len(words(turn)) > 20, "the answer has begun")
    frail.router.kill()
    await_end(page)
    assert page.locator(".note.bad").count() == 1
    page.locator("#link", has_text="does not answer").wait_for()
    assert page.locator("#pods tr").count() == 3, "what was known stands"
    frail.router.restart()
    page.locator("#link", has_text="Live").wait_for(timeout=60_000)
    again = ask(page, "Again", max_tokens=5)
    await_end(page)
    assert num_tokens(again) == 5
