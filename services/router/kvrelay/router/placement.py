"""A request's place: its pods, and its claim on their loads."""

from collections.abc import Callable

from kvrelay.router.pods import Pod
from kvrelay.router.policy import RouteRequest


class Placement:
    """Counts in the loads of its pods from now until `release`, which its one owner calls, once.

    `prefill` None: the decode pod computes the prompt itself.
    """

    def __init__(self, prefill: Pod | None, decode: Pod, request: RouteRequest, on_release: Callable[[], None]) -> None:
        self.prefill = prefill
        self.decode = decode
        self._tokens = request.num_prompt_tokens
        self._computing: Pod | None = prefill or decode
        self._on_release = on_release
        self._kv_tokens = self._tokens + request.num_choices
        decode.load.begin(0 if prefill else self._tokens, self._kv_tokens)
        if prefill is not None:
            prefill.load.begin(self._tokens, self._tokens)

    def prefill_done(self) -> None:
        """The prompt is computed, or never will be."""
        if self._computing is not None:
            self._computing.load.computed(self._tokens)
            self._computing = None
            if self.prefill is not None:
                self.prefill.load.end(self._tokens)

    def release(self) -> None:
        self.prefill_done()
        self.decode.load.end(self._kv_tokens)
        self._on_release()
