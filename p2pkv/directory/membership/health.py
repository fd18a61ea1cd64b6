"""How far this node's judgement of others is to be trusted: the local health multiplier of Lifeguard.

Where a machine has more to do than it can, everybody on it is late, and members that take each other for dead and come
back make more work yet. Who finds that its peers' answers come, but late, takes longer for everything: it asks less
often, and waits longer before it gives anybody up. Only answers say so. Silence does not, so that deaths, however many
come at once, are found as quickly as ever where those who live are on time.

After Dadgar, Phillips, Currey: "Lifeguard: Local Health Awareness for More Accurate Failure Detection" (2018), section
IV-A. There a probe without an answer counts against whoever sent it; here the late answer does, and what is multiplied
are the interval and the suspicion, not the time that a probe has: late answers are taken in whenever they come.
"""

from __future__ import annotations

import math

from p2pkv.directory.membership.timing import Timing

MOST = 9
"""Periods are multiplied by so much at most, as in Lifeguard."""
_MORE = 2
"""So much above what answers need periods grow, one a round: asking less often may make answers come sooner."""
_CALM_S = 10.0
"""Most must have been on time for so long before periods are tried again that were too short before."""
_SILENT_S = 30.0
"""The silence of most may say for so long that they are late; after that they count as gone."""


class Health:
    """The multiplier of one node. Owned by the engine's thread."""

    stretch: int = 1
    """What the probe interval and the suspicion are multiplied by."""

    def __init__(self, timing: Timing) -> None:
        self._on_time_s = timing.probe_interval + timing.probe_timeout
        self._late: dict[str, float] = {}
        self._too_short = 0
        self._is_calm = True
        self._late_at = self._erred_at = -math.inf

    def heard_late(self, node_id: str, age_s: float) -> None:
        """Take notice that a member's answer was taken in so long after it was asked for."""
        self._late[node_id] = age_s

    def judged(self, now: float, *, n_asked: int, n_silent: int) -> None:
        """Take in a round in which this node was on time itself: how many members were asked, how many are silent.

        A few slow members say nothing of the others, unless there are no others.
        """
        ages, self._late = sorted(self._late.values()), {}
        if n_asked and len(ages) * 2 >= n_asked and len(ages) >= min(2, n_asked):
            if self._is_calm:
                self._too_short, self._is_calm = self.stretch, False
            self._late_at = now
            self._follow(math.ceil(ages[len(ages) // 2] / self._on_time_s))
        elif n_silent * 2 <= n_asked or now - max(self._late_at, self._erred_at) >= _SILENT_S:
            self._calm_down(now)

    def _follow(self, needed: int) -> None:
        most = needed + _MORE
        one_step = self.stretch + (1 if self.stretch < most else -1 if self.stretch > most else 0)
        self.stretch = min(MOST, max(needed, one_step))

    def _calm_down(self, now: float) -> None:
        self._is_calm = True
        if now - self._late_at >= _CALM_S:
            self._too_short = 0
        self.stretch = min(self.stretch, max((self.stretch + 1) // 2, self._too_short + 1))

    def erred(self, now: float) -> None:
        """Take notice that many who were given up have come back, or that this node itself had been given up.

        It counts once in ten seconds: a single liar can say so without end.
        """
        if now - self._erred_at >= _CALM_S:
            self._erred_at = now
            self.stretch = min(MOST, self.stretch + 1)
