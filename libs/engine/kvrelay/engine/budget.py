"""How many tokens a step may compute so that it stays under its time: learnt from the steps before it."""

_SCALE = 64.0
"""Tokens at which an error is blamed half on the fixed cost of a step and half on the cost of its tokens."""
_RATE_SLOWER, _RATE_FASTER = 0.7, 0.3
"""How much of an error is believed. A step slower than expected is believed sooner: to go over the limit costs more."""
_MARGIN = 0.8
"""Of the limit: what a step is planned to take. The rest is for context that grows and for noise."""


class StepBudget:
    """Estimates a step's time as fixed + each · tokens, by normalized least mean squares.

    Steps of a few tokens teach the fixed cost and large ones the cost of a token, so that a long run of decode steps does
    not unlearn what a prompt's chunk costs. Attention makes tokens dearer as contexts grow; the estimate follows. A single
    slow step (another process took the core) moves it by a bounded amount. No step is over twice the largest that kept
    the limit, and one that broke it halves that.
    """

    def __init__(self, *, max_step_ms: float, max_tokens: int, floor: int, start: int) -> None:
        """`floor`: tokens that a step may have whatever they take, within `max_tokens`, which is hard; `start`: what the
        first steps are held to."""
        self._limit = max_step_ms / 1000.0
        self._floor = min(floor, max_tokens)
        self._max_tokens = max_tokens
        self._proven = max(floor, start / 2)
        self._fixed = 0.0
        self._each = _MARGIN * self._limit / max(start, 1)

    @property
    def num_tokens(self) -> int:
        affordable = (_MARGIN * self._limit - self._fixed) / self._each
        return int(max(self._floor, min(affordable, 2 * self._proven, self._max_tokens)))

    def expected_seconds(self, num_tokens: int) -> float:
        return self._fixed + self._each * num_tokens

    def prompt_seconds(self, num_tokens: int) -> float:
        """Of a prompt's tokens alone, in as many steps as they take."""
        return -(-num_tokens // self.num_tokens) * self._fixed + self._each * num_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a step that took `seconds`."""
        expected = self.expected_seconds(num_tokens)
        bound = 0.5 * expected + 0.005
        error = max(-bound, min(seconds - expected, bound))
        size = num_tokens / _SCALE
        gain = (_RATE_SLOWER if error > 0 else _RATE_FASTER) * error / (1.0 + size * size)
        self._fixed = min(max(0.0, self._fixed + gain), 0.5 * self._limit)
        # Beyond the point where the floor alone takes twice the limit, more would only be slower to unlearn.
        self._each = min(max(1e-9, self._each + gain * size / _SCALE), 2.0 * self._limit / self._floor)
        if seconds <= self._limit:
            self._proven = max(self._proven, float(num_tokens))
        else:
            self._proven = max(self._floor, min(self._proven, num_tokens / 2))
