"""What prompts and transfers cost in seconds, as measured on the requests that went by."""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.router.load import DEFAULT_SECONDS_PER_TOKEN, Load

DEFAULT_SECONDS_PER_TOKEN_PAIR: Final = 0.8e-9
DEFAULT_TRANSFER_SECONDS: Final = 0.5e-6
"""A token, of what the push ends later than the first token."""
_DECAY: Final = 0.97
_GAIN: Final = 0.1
_PRIOR: Final = ((2_048, 0), (16_384, 0), (512, 16_384))
"""Prompts (tokens to compute, tokens before them) for which the first guess is believed, until others were seen."""

Floats = npt.NDArray[np.float64]


class Costs:
    """Computing n tokens after c others takes a · n + b · n · (c + n / 2) seconds: layers' products, and attention.

    a and b are fitted by least squares of the relative error, over all pods, old requests counting less and less; each pod's
    slowness is its own smoothed ratio to that.
    """

    def __init__(self) -> None:
        self.each = DEFAULT_SECONDS_PER_TOKEN
        self.pair = DEFAULT_SECONDS_PER_TOKEN_PAIR
        self.transfer = DEFAULT_TRANSFER_SECONDS
        self._sums = np.zeros((2, 2))
        self._means = np.zeros(2)
        self._measured = False

    def seconds(self, num_tokens: float, num_before: float, slowness: float = 1.0) -> float:
        return slowness * num_tokens * (self.each + self.pair * (num_before + num_tokens / 2))

    def seconds_by_pod(self, num_tokens: Floats, num_before: Floats, slowness: Floats) -> Floats:
        """As `seconds`, for many at once."""
        return slowness * num_tokens * (self.each + self.pair * (num_before + num_tokens / 2))

    def prefilled(self, pod: Load, num_tokens: int, num_before: int, seconds: float) -> None:
        """It computed so many tokens after so many cached ones in that time."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if not self._measured:
            self._measured = True
            self._begin(seconds / self.seconds(num_tokens, num_before))
        expected = self.seconds(num_tokens, num_before)
        ratio = min(10.0, max(0.1, seconds / expected))
        pod.slowness += _GAIN * (ratio - pod.slowness)
        pod.seconds_per_token += _GAIN * (seconds / num_tokens - pod.seconds_per_token)
        self._add(num_tokens, num_before, seconds)
        self._solve()

    def transferred(self, num_tokens: int, seconds: float) -> None:
        """So long after the first token was the push over."""
        if num_tokens > 0 and seconds >= 0:
            self.transfer += _GAIN * (seconds / num_tokens - self.transfer)

    def _begin(self, times: float) -> None:
        """The first request says how fast pods are, from graphics processors to laptops; what remains to be learned is how
        much of it is attention."""
        self.each *= times
        self.pair *= times
        for num_tokens, num_before in _PRIOR:
            self._add(num_tokens, num_before, self.seconds(num_tokens, num_before))

    def _add(self, num_tokens: float, num_before: float, seconds: float) -> None:
        features = np.array([num_tokens, num_tokens * (num_before + num_tokens / 2)]) / seconds
        self._sums = _DECAY * self._sums + np.outer(features, features)
        self._means = _DECAY * self._means + features

    def _solve(self) -> None:
        (uu, uv), (_, vv) = self._sums
        u, v = self._means
        determinant = uu * vv - uv * uv
        pair = (uu * v - uv * u) / determinant if determinant > 1e-9 * uu * vv else self.pair
        # Short prompts alone do not tell the two apart: neither may become negative.
        self.pair = float(min(max(0.0, pair), v / vv))
        self.each = float(max(1e-9, (u - self.pair * uv) / uu))
