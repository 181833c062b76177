"""The page over a real stack under load: prefill and decode pod, KV store, the bundled model. Its picture is the one in docs/."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack
from tests.browser.asking import ask, await_end, words
from tests.browser.conftest import OpenPage
from tests.waiting import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600, func_only=True)]

SCREENSHOT = os.environ.get("KVRELAY_CONSOLE_SCREENSHOT", "")
"""Where the picture goes; empty: none is taken."""
MAX_PICTURE_BYTES = 200_000
STORIES = (
    "A relay race is run by a team, each of whom carries the baton for one part of the way. " * 8,
    "A letter goes from hand to hand, and each who carries it knows only the next one on the road. " * 8,
    "Water runs from the hills to the sea, and every mill on its way takes a little of its strength. " * 8,
)
QUESTIONS = (
    "Who carries it first?",
    "What is handed over?",
    "Why is that fast?",
    "How does a runner know when to start?",
)
CLIENTS = 3


@pytest.fixture(scope="module")
def real(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = StackOptions(
        model=model_dir,
        kvstore=1,
        free_ports=True,
        engine_options={"kv-cache-bytes": "256MiB", "kvstore-load": "always"},
        router_options={"local-prefill-tokens": "0", "policy": "least_loaded"},
        pod_options={
            # Room for a few prompts: others' prefixes come back from the store.
            "prefill-0": {"pod-id": "prefill-0", "kv-cache-bytes": "24MiB"},
            "decode-0": {"pod-id": "decode-0"},
            "kvstore-0": {"node-id": "kvstore-0"},
        },
    )
    with Stack(options, tmp_path_factory.mktemp("run")) as stack:
        try:
            yield stack
        except BaseException:  # whatever ends the test: the logs are gone with the folder
            print(stack.logs())
            raise


def client(url: str, number: int, until: threading.Event) -> None:
    for turn in range(100):
        if until.is_set():
            return
        text = STORIES[turn % len(STORIES)] + QUESTIONS[(number + turn) % len(QUESTIONS)]
        body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 24 + 8 * turn % 32}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)


@pytest.fixture
def load(real: Stack) -> Iterator[None]:
    until = threading.Event()
    clients = [threading.Thread(target=client, args=(real.url, number, until)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    yield
    until.set()
    for each in clients:
        each.join(120)


def number(cell: "Locator") -> float:
    """The first in its text; 0: there is none."""
    found = re.search(r"[\d,]+(\.\d+)?", cell.text_content() or "")
    return float(found[0].replace(",", "")) if found is not None else 0.0


def test_a_stack_under_load(real: Stack, load: None, open_page: OpenPage) -> None:
    page = open_page(real.url, viewport={"width": 1360, "height": 860})
    page.locator("#pods-count", has_text="2 of 2 ready").wait_for()
    cells = {
        "the decode pod's blocks in use": page.locator("#pods tr", has_text="decode-0").locator("td").nth(3),
        "requests": page.locator("#running"),
        "prefix hits of the prefill pod": page.locator("#pods tr", has_text="prefill-0").locator("td").nth(4),
        "reused prompt tokens": page.locator("#reused"),
        "stored blocks": page.locator("#tiers tr", has_text="CPU memory").locator("td").nth(2),
        "hit rate of the store": page.locator("#tiers tr", has_text="CPU memory").locator("td").nth(3),
        "bytes read from it": page.locator("#tiers tr", has_text="CPU memory").locator("td").nth(4),
    }
    for what, cell in cells.items():
        eventually(lambda cell=cell: number(cell) > 0, f"{what} are shown", 120)
    eventually(lambda: page.locator(".requests .state.good").count() >= 6, "some requests have ended", 120)
    turn = ask(page, "Name three rivers of Europe, with one sentence about each.", max_tokens=120)
    eventually(lambda: len(words(turn).split()) > 12 or not page.locator("#stop:enabled").count(), "it answers", 60)
    row = page.locator("#requests tr.own")
    row.wait_for()
    assert "prefill-0 → decode-0" in (row.text_content() or "")
    if SCREENSHOT:
        page.screenshot(path=SCREENSHOT)
        assert Path(SCREENSHOT).stat().st_size < MAX_PICTURE_BYTES
    await_end(page)
    eventually(lambda: row.locator(".state.good").count() == 1, "it ended well")
    label = row.get_by_role("img").get_attribute("aria-label") or ""
    assert re.fullmatch(r"queue [\d.]+ m?s, prefill [\d.]+ m?s, push [\d.]+ m?s, decode [\d.]+ m?s", label)
