"""How long something takes, learnt from how long it took: a shape learnt slowly, times a level that follows fast.

What a link or an engine is made of changes rarely, and how busy it is changes all the time. So the shape, what the
fixed part is beside what grows with the work, is a least-squares fit that forgets slowly; the level is a moving mean of
the logarithm of by how much the last times were off, and follows a jump within a few samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_KEPT = 0.95
"""How much of the shape's weight is left after another sample: it is that of some twenty. A guess."""
_LEVEL_STEP = 0.4
"""How far the level goes to where a sample says it is. With times that scatter by 20 % it is off by 10 %."""
_SCATTER_STEP, _MOST_SCATTER = 0.1, 1.0
"""Of the moving mean of squared errors of the logarithm, and what one of them is taken for at most."""
_LEAST_S = 1e-7
"""Seconds; times are never taken for less, whose logarithm would carry the level away."""


class Estimate:
    """Seconds as a sum of features, each times a rate that is not negative. Not thread-safe.

    Times count relatively: one of a millisecond that was two is as wrong as one of a second that was two.
    """

    def __init__(self, stiffness: Sequence[float]) -> None:
        """Take one number a feature: the greater, the less is put down to it as long as others explain as much."""
        n = len(stiffness)
        self._stiffness = np.array(stiffness)
        self._gram = np.zeros((n, n))
        self._moment = np.zeros(n)
        self._shape = np.zeros(n)
        self._level = 0.0
        self._scatter = 0.0
        self.n_samples = 0

    @property
    def is_known(self) -> bool:
        """Whether there was a sample."""
        return self.n_samples > 0

    def seconds(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what work of each row of ``(n, k)`` features takes in the mean; needs a sample.

        The more the times scatter, the more the mean is above what is usual: what is often quick and sometimes takes
        fifty times as long is no bargain.
        """
        return self._usual(features) * math.exp(self._scatter / 2)

    def _usual(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        seconds: NDArray[np.float64] = features @ (self._shape * math.exp(self._level))
        return seconds

    def add(self, features: NDArray[np.float64], seconds: float) -> None:
        """Learn that work of these ``(k,)`` features took so long."""
        seconds = max(seconds, _LEAST_S)
        if self.is_known:
            error = math.log(seconds / max(float(self._usual(features)), _LEAST_S))
            self._level += _LEVEL_STEP * error
            self._scatter += _SCATTER_STEP * (min(error * error, _MOST_SCATTER) - self._scatter)
        self.n_samples += 1
        # the shape is learnt at the level's measure: else the times of before a jump would have to be forgotten first
        row = features / (seconds / math.exp(self._level))
        self._gram = _KEPT * self._gram + np.outer(row, row)
        self._moment = _KEPT * self._moment + row
        self._shape = self._fitted()

    def doubt(self) -> None:
        """Learn that something took longer than anybody waited: that such work scatters."""
        self._scatter += _SCATTER_STEP * (_MOST_SCATTER - self._scatter)

    def _fitted(self) -> NDArray[np.float64]:
        """Return the rates that fit best and are not negative: what would be is left out, the worst first."""
        scale = np.sqrt(np.maximum(np.diag(self._gram), 1e-300))
        gram = self._gram / np.outer(scale, scale) + np.diag(self._stiffness)
        moment, used = self._moment / scale, np.diag(self._gram) > 0
        while True:
            rates = np.zeros(len(scale))
            rates[used] = np.linalg.solve(gram[np.ix_(used, used)], moment[used])
            if (rates >= 0).all():
                fitted: NDArray[np.float64] = rates / scale
                return fitted
            used[np.argmin(rates)] = False
