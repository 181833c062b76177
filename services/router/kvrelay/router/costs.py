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
_FARTHEST: Final = 4.0
"""A request counts as no farther from what was expected than so many times."""
_PRIOR: Final = ((2_048, 0), (16_384, 0), (512, 16_384), (64, 2_048))
"""Prompts (tokens to compute, tokens before them) for which the first guess is believed, until others were seen."""
_TYPICAL_TOKENS: Final = 2_048
_EAGER: Final = 32
"""The first so many requests each make a new fit,"""
_AT_ONCE: Final = 16
"""and later ones so many together."""

Floats = npt.NDArray[np.float64]


class Costs:
    """Computing n tokens after c others takes f + a · n + b · n · (c + n / 2) seconds: what each request takes, layers' products,
    and attention.

    The three are fitted by least squares of the relative error, none under 0, over all pods, old requests counting less and
    less; each pod's slowness is its own smoothed ratio to that.
    """

    def __init__(self) -> None:
        self.transfer = DEFAULT_TRANSFER_SECONDS
        self._fit = DEFAULT_SECONDS
        self._squares = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._num_measured = 0
        self._new: list[tuple[float, float, float]] = []
        """Features of requests that are not in the sums yet."""

    def seconds(self, num_tokens: float, num_before: float, slowness: float = 1.0) -> float:
        fixed, each, pair = self._fit
        return slowness * (fixed + num_tokens * (each + pair * (num_before + num_tokens / 2)))

    def seconds_by_pod(self, num_tokens: Floats, num_before: Floats, slowness: Floats) -> Floats:
        """As `seconds`, for many at once."""
        fixed, each, pair = self._fit
        seconds: Floats = slowness * (fixed + num_tokens * (each + pair * (num_before + num_tokens / 2)))
        return seconds

    def prefilled(self, pod: Load, num_tokens: int, num_before: int, seconds: float) -> None:
        """It computed so many tokens after so many cached ones in that time."""
        if num_tokens <= 0 or seconds <= 0:
            return
        if not self._num_measured:
            self._begin(seconds / self.seconds(num_tokens, num_before))
        expected = self.seconds(num_tokens, num_before)
        ratio = min(_FARTHEST, max(1 / _FARTHEST, seconds / expected))
        pod.slowness += _GAIN * (ratio - pod.slowness)
        self._add(num_tokens, num_before, ratio * expected)
        self._num_measured += 1
        if self._num_measured <= _EAGER or len(self._new) >= _AT_ONCE:
            self._solve()
        pod.seconds_per_token = self.seconds(_TYPICAL_TOKENS, 0, pod.slowness) / _TYPICAL_TOKENS

    def transferred(self, num_tokens: int, seconds: float) -> None:
        """So long after the first token was the push over."""
        if num_tokens > 0 and seconds >= 0:
            self.transfer += _GAIN * (seconds / num_tokens - self.transfer)

    def _begin(self, times: float) -> None:
        """The first request says how fast pods are, from graphics processors to laptops; what remains to be learned is how
        much of it is what."""
        fixed, each, pair = self._fit
        self._fit = (fixed * times, each * times, pair * times)
        for num_tokens, num_before in _PRIOR:
            self._add(num_tokens, num_before, self.seconds(num_tokens, num_before))

    def _add(self, num_tokens: float, num_before: float, seconds: float) -> None:
        pairs = num_tokens * (num_before + num_tokens / 2)
        self._new.append((1 / seconds, num_tokens / seconds, pairs / seconds))

    def _solve(self) -> None:
        """The parts that would be negative are 0. A little pulls towards the former fit: requests that are all alike do not tell
        the parts apart."""
        features, decay = np.array(self._new), _DECAY ** len(self._new)
        self._new.clear()
        self._squares = decay * self._squares + features.T @ features
        self._sums = decay * self._sums + features.sum(axis=0)
        scale = np.sqrt(np.diag(self._squares))
        squares = self._squares / np.outer(scale, scale) + 1e-3 * np.eye(3)
        sums = self._sums / scale + 1e-3 * np.array(self._fit) * scale
        left = np.arange(3)
        while len(left):
            fit = np.linalg.solve(squares[np.ix_(left, left)], sums[left])
            if (fit > 0).all():
                whole = np.zeros(3)
                whole[left] = fit / scale[left]
                self._fit = (float(whole[0]), float(whole[1]), float(whole[2]))
                return
            left = left[fit > 0]
