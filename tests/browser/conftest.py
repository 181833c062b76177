"""Chromium without a window, stacks to look at, and pages that may say nothing wrong and ask no other host.

Playwright and Chromium are what `make browser-test` installs; nothing else imports them.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from kvrelay.cli.options import StackOptions
from kvrelay.cli.stack import Stack

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
API_KEY = "a-key-of-the-tests"
STEP_MS = 30
"""Of the fake engine's tokens."""

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("there is no playwright here: run `make browser-test`, which installs it")
    found = os.environ.get("KVRELAY_TEST_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.fail(f"there is no Chromium here (none of {', '.join(BROWSERS)}): run `make browser-test`")
    # Chromium's sandbox refuses to run as root, as which continuous integration runs.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=options)
        yield chromium
        chromium.close()


@contextmanager
def fake(model_dir: Path, run_dir: Path, decode: int = 1, **router_options: str | bool) -> Iterator[Stack]:
    """A stack of real processes that says words without a model: it is there in seconds, and STEP_MS a token. Pods are
    called as the stack's nodes."""
    options = StackOptions(
        model=model_dir,
        prefill=1,
        decode=decode,
        engine="fake",
        free_ports=True,
        engine_options={"fake-step-ms": str(STEP_MS), "fake-natural-length": "400", "fake-num-blocks": "512"},
        router_options={"local-prefill-tokens": "0", **router_options},
        pod_options={name: {"pod-id": name} for name in ("prefill-0", *(f"decode-{i}" for i in range(decode)))},
    )
    with Stack(options, run_dir) as stack:
        try:
            yield stack
        except BaseException:  # whatever ends the test: the logs are gone with the folder
            print(stack.logs())
            raise


@pytest.fixture(scope="session")
def stack(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """For tests that leave it as it was."""
    with fake(model_dir, tmp_path_factory.mktemp("run")) as stack:
        yield stack


@pytest.fixture(scope="session")
def locked(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Answers those who have API_KEY."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"another\n{API_KEY}\n")
    with fake(model_dir, tmp_path_factory.mktemp("locked"), **{"api-key-file": str(file)}) as stack:
        yield stack


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[OpenPage]:
    """`open_page(url, ...)`: the console of the router at that address, in a browser of its own; other options are the context's.

    At the end the test fails for what a page said on its console, and for what it asked of other hosts. `expected`: a pattern
    of messages that belong to the test.
    """
    closing = []
    said: list[str] = []
    hosts: set[str] = set()
    allowed: set[str] = set()

    def open_page(url: str, *, expected: str = r"(?!)", **options: object) -> "Page":
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})  # type: ignore[arg-type]
        closing.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        allowed.add(urlsplit(url).netloc)

        def note(text: str) -> None:
            if not re.search(expected, text):
                said.append(text)

        page.on("console", lambda message: note(f"{message.type}: {message.text} {message.location}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        context.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(f"{url}/console")
        return page

    yield open_page
    for context in closing:
        context.close()
    assert said == []
    assert hosts <= allowed, "another host was asked"
