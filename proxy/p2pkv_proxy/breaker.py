"""A circuit breaker: an instance that fails is left alone for a while, and then tried with one request first.

An attempt is judged at its end: an answer that breaks off behind its first bytes is a failure like any other.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

FAILURES = 3
"""In a row, until it opens: one may be an accident of a connection."""
WINDOW, WINDOW_S = 20, 30.0
"""Ends of attempts that are remembered, and for how long."""
JUDGED, RATE = 10, 0.5
"""Of so many ends at least, so large a part failed: it opens though no three failed in a row."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Phase(str, Enum):
    """What the breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """One request, whose fate decides."""


class Breaker:
    """One instance's. Used by one thread; times are those of one monotonic clock."""

    def __init__(self) -> None:
        self.phase = Phase.CLOSED
        self.opened = 0
        """How often."""
        self._failures = 0
        self._ends: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        """When attempts ended, and whether they failed."""
        self._pause = FIRST_PAUSE_S
        self._until = 0.0
        self._trial: object | None = None

    def allows(self, now: float) -> bool:
        """Say whether a request may go there."""
        if self.phase is Phase.OPEN and now >= self._until:
            self.phase, self._trial = Phase.HALF_OPEN, None
        return self.phase is Phase.CLOSED or (self.phase is Phase.HALF_OPEN and self._trial is None)

    def begin(self, attempt: object) -> None:
        """Note that a request goes there: because it may, or because there is nobody else."""
        if self.phase is not Phase.CLOSED and self._trial is None:
            self._trial = attempt

    def succeeded(self, attempt: object, now: float) -> None:
        """Note that its answer was whole. What began before the breaker opened says nothing about now."""
        if self.phase is Phase.CLOSED:
            self._failures = 0
            self._ends.append((now, False))
        elif attempt is self._trial:
            self.reset()

    def failed(self, attempt: object, now: float) -> None:
        """Note that it was not."""
        if self.phase is Phase.CLOSED:
            self._failures += 1
            self._ends.append((now, True))
            if self._failures >= FAILURES or self._fails_often(now):
                self._open(now)
        elif attempt is not None and attempt is self._trial:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
            self._open(now)

    def abandoned(self, attempt: object) -> None:
        """Note that nothing was learnt: the client left."""
        if attempt is self._trial:
            self._trial = None

    def reset(self) -> None:
        """Close it: the instance was restarted, or has shown that it works."""
        self.phase, self._failures, self._pause, self._trial = Phase.CLOSED, 0, FIRST_PAUSE_S, None
        self._ends.clear()

    def n_failed(self, now: float) -> int:
        """Return how many of the last attempts failed."""
        return sum(has_failed for ended, has_failed in self._ends if now - ended < WINDOW_S)

    def _fails_often(self, now: float) -> bool:
        n_ended = sum(now - ended < WINDOW_S for ended, _ in self._ends)
        return n_ended >= JUDGED and self.n_failed(now) >= RATE * n_ended

    def _open(self, now: float) -> None:
        self.phase, self._until, self._trial = Phase.OPEN, now + self._pause, None
        self.opened += 1
