"""The failure detector: from missed probes to suspicion, and from suspicion to death.

Rules only: it sends nothing and reads no clock. Suspicion is this node's own: it says that the member does not
answer *here*. It ends in death only if no witness, asked since, has had an answer either.
"""

from __future__ import annotations

import math

from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.view import Member, State, View

Boot = tuple[str, int]
"""A node's id and boot epoch."""
_MISSES = 16
"""So many of a member's open probes are remembered, the latest."""


class FailureDetector:
    """What our own probes and our witnesses say about each member; forgotten with the member's boot."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self.stretch = 1
        """Every period is multiplied by this, which is more than 1 while this node finds that most are late."""
        self._misses: dict[Boot, list[float]] = {}  # when those probes were sent, oldest first
        self._answered: dict[Boot, float] = {}
        self._asked: dict[Boot, float] = {}
        self._suspected: dict[tuple[str, int, int], float] = {}

    def answered(self, member: Member, now: float, *, asked_at: float | None = None) -> None:
        """Note that the member answered, in this boot, a probe sent at ``asked_at`` (``now`` by default)."""
        boot = boot_of(member)
        self._misses.pop(boot, None)
        self._answered[boot] = now
        self._asked[boot] = now if asked_at is None else asked_at
        suspicion = (*boot, member.incarnation)
        if suspicion in self._suspected:
            self._suspected[suspicion] = now

    def answered_late(self, member: Member, asked_at: float) -> bool:
        """Note that the member answered, after its time, a probe sent at ``asked_at``; true if no later one is open.

        It may have answered at once, and have died since: it is as if a witness had said so.
        """
        boot = boot_of(member)
        self.vouched(boot, asked_at)
        self._asked[boot] = max(self._asked.get(boot, -math.inf), asked_at)
        self._answered[boot] = max(self._answered.get(boot, -math.inf), asked_at)
        later = [at for at in self._misses.pop(boot, []) if at > asked_at]
        if later:
            self._misses[boot] = later
        return not later

    def missed(self, member: Member, *, asked_at: float = math.inf) -> bool:
        """Note that a probe sent at ``asked_at`` went unanswered; true when it is time to suspect the member."""
        boot = boot_of(member)
        misses = [*self._misses.get(boot, []), asked_at][-_MISSES:]
        self._misses[boot] = misses
        return self.has_missed_enough(member)

    def has_missed_enough(self, member: Member) -> bool:
        """Whether so many of its probes are open that it is to be suspected."""
        return len(self._misses.get(boot_of(member), ())) >= self._timing.misses_to_suspect

    def vouched(self, boot: Boot, since: float) -> None:
        """Note that a witness has had an answer from the member after ``since``."""
        # as if the member had been silent from then on: that many probes make a suspect
        begins = since + self._timing.misses_to_suspect * self._timing.probe_interval * self.stretch
        for suspicion, at in self._suspected.items():
            if suspicion[:2] == boot:
                self._suspected[suspicion] = max(at, begins)

    def has_answered_since(self, boot: Boot, since: float) -> bool:
        """Whether the member has answered a probe of ours that was sent after ``since``."""
        return self._asked.get(boot, -math.inf) >= since

    def is_doubtful(self, member: Member) -> bool:
        """Whether the member is to be probed in every round until this is settled.

        Where most are late, a single open probe says nothing.
        """
        is_silent = self.has_missed_enough(member) if self.stretch > 1 else boot_of(member) in self._misses
        return member.state is State.SUSPECT or is_silent

    def is_proven(self, member: Member, now: float) -> bool:
        """Whether our own latest probe, a recent one, says that the member lives: rumours count less then."""
        boot = boot_of(member)
        recent = (self._timing.probe_interval + 2 * self._timing.probe_timeout) * self.stretch
        # where all are late, the latest probe of a member is mostly open
        is_open = self.stretch == 1 and boot in self._misses
        return not is_open and now - self._answered.get(boot, -math.inf) <= recent

    def observe(self, view: View, now: float) -> None:
        """Start a timer for each new suspicion in ``view``; forget what is settled."""
        present = {boot_of(member) for member in view.present()}
        self._misses = {boot: misses for boot, misses in self._misses.items() if boot in present}
        self._answered = {boot: at for boot, at in self._answered.items() if boot in present}
        self._asked = {boot: at for boot, at in self._asked.items() if boot in present}
        suspects = [member for member in view.present() if member.state is State.SUSPECT]
        suspicions = [(member.node_id, member.boot_epoch, member.incarnation) for member in suspects]
        self._suspected = {suspicion: self._suspected.get(suspicion, now) for suspicion in suspicions}

    def overdue(self, now: float) -> list[str]:
        """Return the ids of those suspected for too long."""
        # the same sum as in next_deadline: rounding must not let one say "now" and the other "not yet"
        limit = self._timing.suspicion * self.stretch
        return [node_id for (node_id, _, _), since in self._suspected.items() if since + limit <= now]

    def next_deadline(self) -> float:
        """Return when the next suspicion runs out; infinity without any."""
        return min(self._suspected.values(), default=math.inf) + self._timing.suspicion * self.stretch

    def postpone(self, seconds: float) -> None:
        """Take ``seconds`` that this node slept through out of every timer."""
        self._suspected = {suspicion: since + seconds for suspicion, since in self._suspected.items()}


def boot_of(member: Member) -> Boot:
    """Return what this module knows a member by."""
    return (member.node_id, member.boot_epoch)
