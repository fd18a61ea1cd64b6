"""How many attempts more a router makes: when all instances fail, retries must not be most of what they get."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_SHARE = 0.2
"""Retries for each request. A guess; what Envoy and Finagle take."""
_A_SECOND = 10.0
"""Retries that are always allowed: where requests are few, each may be tried on every instance."""
_MOST = 1000.0
"""What may be saved up: an instance that dies costs all that it had at once, which may be hundreds."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.25


class RetryBudget:
    """Grows by requests and by time, shrinks by retries. One event loop uses it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left = _MOST
        self._at = now()

    def note_request(self) -> None:
        """Count a request."""
        self._left = min(_MOST, self._left + _SHARE)

    def take(self) -> bool:
        """Take one retry, if there is one."""
        now = self._now()
        self._left = min(_MOST, self._left + (now - self._at) * _A_SECOND)
        self._at = now
        if self._left < 1.0 - 1e-9:  # what sums leave of rounding is no retry
            return False
        self._left -= 1.0
        return True


def pause(number: int) -> float:
    """Return the seconds before retry ``number`` of a request, 1 being the first: at once, then longer, by chance.

    The first goes to another instance, which has done nothing; what fails there too is likely to fail everywhere.
    """
    if number <= 1:
        return 0.0
    return random.uniform(0.0, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (number - 2)))  # noqa: S311 - no secret
