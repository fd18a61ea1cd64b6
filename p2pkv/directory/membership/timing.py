"""Time as the membership engines see it: an injected clock, the periods they keep, and their own lateness.

A node must not blame others for what it missed itself. If its interpreter was held, or the process was
stopped, answers lay unread and timers ran out without meaning anything. :class:`Punctuality` notices that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Where an engine takes the time from."""

    def monotonic(self) -> float:
        """Return seconds since some moment; never goes back."""

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970, as good as this machine knows."""


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_ns(self) -> int:
        return time.time_ns()


@dataclass(frozen=True, slots=True)
class Timing:
    """The periods of an engine, in seconds.

    A node killed right after it answered is probed at 0.5 and 1.0 s, suspected at 1.4 s and dead at 2.4 s:
    within 3 s even if one round comes half a second late.
    """

    probe_interval: float = 0.5
    probe_timeout: float = 0.4  # below 500 ms: within it a silent holder of a join address is passed over
    exchange_timeout: float = 0.25
    misses_to_suspect: int = 2
    suspicion: float = 1.0
    duplicate_timeout: float = 1.0
    agreement: float = 0.5
    """How long a starting node waits until its peers know it. One whose interpreter is held does not hold it
    up for longer."""
    leave_timeout: float = 0.5
    join_interval: float = 1.0
    lateness_tolerance: float = 0.3
    """Beyond it a round doesn't count. A guess between a busy machine's hiccups and half a probe interval."""
    burial: float = 600.0
    """How long the dead are remembered. Longer than most pauses and restarts, so that the paused learn they
    were dead and the restarted get a higher boot even with a clock set back; a paused node that comes back
    later than this assumes it."""


class Punctuality:
    """Measures how late this thread comes back, compared with what it promised."""

    def __init__(self, clock: Clock, tolerance: float) -> None:
        self._clock = clock
        self._tolerance = tolerance
        self._due = clock.monotonic()

    def promise(self, seconds: float) -> None:
        """Allow ``seconds`` more until the next :meth:`lateness`; computing takes no time."""
        self._due += seconds

    def lateness(self) -> float:
        """Return by how much the promises were missed, 0.0 within the tolerance, and start anew."""
        now = self._clock.monotonic()
        late = now - self._due
        self._due = now
        return late if late > self._tolerance else 0.0
