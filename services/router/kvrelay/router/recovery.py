"""What follows a failure: whether to try again, when, and what stays in place."""

import enum
from dataclasses import dataclass

from kvrelay.common.discovery import RetryPolicy
from kvrelay.common.errors import IncompatibleLayout, Internal, InvalidRequest, KvrelayError, Overloaded, status_of


class Culprit(enum.StrEnum):
    """Whose failure it was: what has to be replaced."""

    PREFILL = "prefill"
    """The decode pod keeps the request."""
    TICKET = "ticket"
    """The decode pod took its reservation back: the same pods may do."""
    DECODE = "decode"
    """All starts anew, with what was delivered forced."""
    ROOM = "room"
    """The decode pod has none: no failure, the request waits again."""


class AttemptFailed(Exception):
    """One attempt of a request came to nothing; `error` is what a client would be told if it were the last."""

    def __init__(self, error: KvrelayError, culprit: Culprit) -> None:
        super().__init__(error.message)
        self.error = error
        self.culprit = culprit


PAUSE = RetryPolicy(initial_seconds=0.02, maximum_seconds=1.0)


@dataclass(frozen=True, slots=True)
class Retries:
    """At most so many failures a request, with a pause after each; the request's deadline bounds it all."""

    max_failures: int = 8
    pause: RetryPolicy = PAUSE

    def pause_seconds(self, failures: int, failure: AttemptFailed) -> float:
        """Before the next attempt; `failures` counts from 1. Raises the failure's error where there is to be none."""
        if not worth_another(failure.error, failure.culprit) or failures > self.max_failures:
            raise failure.error
        return self.pause.delay(failures)


def worth_another(error: KvrelayError, culprit: Culprit) -> bool:
    """Another pod may do better. A request that a pod calls wrong stays so; what went wrong inside a prefill pod may not."""
    if isinstance(error, InvalidRequest):
        return False
    if culprit is Culprit.PREFILL and isinstance(error, Internal | IncompatibleLayout):
        return True
    return isinstance(error, Overloaded) or status_of(error).retryable
