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

    def busy(self) -> float:
        """Return the seconds that the calling thread has computed."""


class SystemClock:
    """The clock of this machine."""

    monotonic = staticmethod(
        time.monotonic
    )  # itself: a warm call asks for it, and should run no more than it must

    def wall_ns(self) -> int:
        return time.time_ns()

    def busy(self) -> float:
        return time.thread_time()


@dataclass(frozen=True, slots=True)
class Timing:
    """The periods of an engine, in seconds.

    A node killed right after it answered is probed at 0.5 and 1.0 s, suspected at 1.4 s and dead at 2.4 s:
    within 3 s even if one round comes half a second late. Where most answer late, interval and suspicion are longer
    (:mod:`.health`).
    """

    probe_interval: float = 0.5
    probe_timeout: float = 0.4  # below 500 ms: within it a silent holder of a join address is passed over
    exchange_timeout: float = 0.25
    misses_to_suspect: int = 2
    suspicion: float = 1.0
    duplicate_timeout: float = 1.0
    ended_timeout: float = 0.1
    """The same of an earlier boot whose process is proven to have ended: what a namesake with its number has."""
    duplicate_patience: float = 4.0
    """How long a node that goes on under this one's id is asked for until it counts as gone: it may answer late."""
    agreement: float = 0.5
    """How long a starting node waits until its peers know it. One whose interpreter is held does not hold it
    up for longer."""
    leave_timeout: float = 0.5
    reboot_interval: float = 10.0
    """Between two changes of this node's own boot epoch: two nodes of one id that can't reach each other, but are both
    reached by others, would else outbid each other without end."""
    longest_absence: float = 4.0
    """The longest time in which an expelled node doesn't ask whether the one that has its id lives."""
    take_back: float = 60.0
    """How long that one is silent until the expelled node takes the id back. A guess: a successor that is only being
    started again would be refused then, and an engine takes most of a minute to start."""
    join_interval: float = 1.0
    lateness_tolerance: float = 0.3
    """Beyond it a round doesn't count. A guess between a busy machine's hiccups and half a probe interval."""
    burial: float = 600.0
    """How long the dead are remembered. Longer than most pauses and restarts, so that the paused learn they
    were dead and the restarted get a higher boot even with a clock set back; a paused node that comes back
    later than this assumes it."""

    @property
    def surely_believed(self) -> float:
        """How long after it was awake and could be reached a node is a member to all others, whatever they had missed.

        It is given up when it has been suspected for ``suspicion``, and who suspects it asks in each round: a node that
        was awake in the last of these rounds has answered.
        """
        return self.suspicion - self.probe_interval


class Punctuality:
    """Measures how late this thread comes back, compared with what it promised; what it computes is not lateness."""

    busy_s = 0.0
    """What it had computed when its lateness was asked for last, since the time before."""

    def __init__(self, clock: Clock, tolerance: float) -> None:
        self._clock = clock
        self._tolerance = tolerance
        self._due = clock.monotonic()
        self._busy = clock.busy()

    def promise(self, seconds: float) -> None:
        """Allow ``seconds`` more until the next :meth:`lateness`."""
        self._due += seconds

    def lateness(self) -> float:
        """Return by how much the promises were missed, 0.0 within the tolerance, and start anew."""
        now, busy = self._clock.monotonic(), self._clock.busy()
        self.busy_s = max(0.0, busy - self._busy)  # below zero: another thread has taken over
        late = now - self._due - self.busy_s
        self._due, self._busy = now, busy
        return late if late > self._tolerance else 0.0
