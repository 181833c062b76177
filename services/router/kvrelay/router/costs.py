"""What prompts and transfers cost in seconds, as measured on the requests that went by."""

from typing import Final

import numpy as np
import numpy.typing as npt

from kvrelay.router.load import DEFAULT_SECONDS_PER_TOKEN, Load

DEFAULT_SECONDS: Final = (0.002, DEFAULT_SECONDS_PER_TOKEN, 0.8e-9)
"""Of a request, of each token, of each pair of tokens that attention looks at."""
DEFAULT_TRANSFER_SECONDS: Final = 0.5e-6
"""A token, of what the push ends later than the first token."""
_DECAY: Final = 0.97
_GAIN: Final = 0.1
_FARTHEST: Final = 10.0
"""A request counts as no farther from what was expected than so many times."""
_PRIOR: Final = ((2_048, 0), (16_384, 0), (512, 16_384), (64, 2_048))
"""Prompts (tokens to compute, tokens before them) for which the first guess is believed, until others were seen."""
_TYPICAL_TOKENS: Final = 2_048

Floats = npt.NDArray[np.float64]


class Costs:
    """Computing n tokens after c others takes f + a · n + b · n · (c + n / 2) seconds: what each request takes, layers' products,
    and attention.

    The three are fitted by least squares of the relative error, none under 0, over all pods, old requests counting less and
    less; each pod's slowness is its own smoothed ratio to that.
    """

    def __init__(self) -> None:
        self.transfer = DEFAULT_TRANSFER_SECONDS
        self._fit = np.array(DEFAULT_SECONDS)
        self._squares = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._measured = False

    def seconds(self, num_tokens: float, num_before: float, slowness: float = 1.0) -> float:
        fixed, each, pair = self._fit.tolist()
        return float(slowness * (fixed + num_tokens * (each + pair * (num_before + num_tokens / 2))))

    def seconds_by_pod(self, num_tokens: Floats, num_before: Floats, slowness: Floats) -> Floats:
        """As `seconds`, for many at once."""
        fixed, each, pair = self._fit.tolist()
        seconds: Floats = slowness * (fixed + num_tokens * (each + pair * (num_before + num_tokens / 2)))
        return seconds

    def prefilled(self, pod: Load, num_tokens: int, num_before: int, seconds: float) -> None:
        """It computed so many tokens after so many cached ones in that time."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if not self._measured:
            self._measured = True
            self._begin(seconds / self.seconds(num_tokens, num_before))
        expected = self.seconds(num_tokens, num_before)
        ratio = min(_FARTHEST, max(1 / _FARTHEST, seconds / expected))
        pod.slowness += _GAIN * (ratio - pod.slowness)
        self._add(num_tokens, num_before, ratio * expected)
        self._solve()
        pod.seconds_per_token = self.seconds(_TYPICAL_TOKENS, 0, pod.slowness) / _TYPICAL_TOKENS

    def transferred(self, num_tokens: int, seconds: float) -> None:
        """So long after the first token was the push over."""
        if num_tokens > 0 and seconds >= 0:
            self.transfer += _GAIN * (seconds / num_tokens - self.transfer)

    def _begin(self, times: float) -> None:
        """The first request says how fast pods are, from graphics processors to laptops; what remains to be learned is how
        much of it is what."""
        self._fit *= times
        for num_tokens, num_before in _PRIOR:
            self._add(num_tokens, num_before, self.seconds(num_tokens, num_before))

    def _add(self, num_tokens: float, num_before: float, seconds: float) -> None:
        features = np.array((1.0, num_tokens, num_tokens * (num_before + num_tokens / 2))) / seconds
        self._squares = _DECAY * self._squares + np.outer(features, features)
        self._sums = _DECAY * self._sums + features

    def _solve(self) -> None:
        """The parts that would be negative are 0. A little pulls towards the former fit: requests that are all alike do not tell
        the parts apart."""
        scale = np.sqrt(np.diag(self._squares))
        squares = self._squares / np.outer(scale, scale) + 1e-3 * np.eye(3)
        sums = self._sums / scale + 1e-3 * self._fit * scale
        left = np.arange(3)
        while len(left):
            fit = np.linalg.solve(squares[np.ix_(left, left)], sums[left])
            if (fit > 0).all():
                self._fit = np.zeros(3)
                self._fit[left] = fit / scale[left]
                return
            left = left[fit > 0]
