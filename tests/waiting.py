"""Waiting for what comes about by itself, in place of sleeping for as long as it might take."""

import time
from collections.abc import Callable

POLL_SECONDS = 0.05


def eventually(condition: Callable[[], bool], what: str | Callable[[], str], seconds: float = 20.0) -> None:
    """Fails where the condition does not hold within `seconds`; `what` says what was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds:g} s not: {what if isinstance(what, str) else what()}"
        time.sleep(POLL_SECONDS)
