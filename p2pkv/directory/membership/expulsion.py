"""An expulsion: who has this node's id now, and for how long that one has been silent.

Rules only: it sends nothing and reads no clock. While the successor answers it is asked ever more rarely; once it does
not, in every round, until it has been silent for `Timing.take_back`.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from p2pkv.directory.membership.timing import Timing
from p2pkv.directory.view import Member, Report


class Expulsion:
    """What a node that is out knows of its successor. Owned by the engine's thread."""

    def __init__(self, successor: Member, timing: Timing, random: Random, now: float) -> None:
        self.successor = successor
        self._timing = timing
        self._random = random
        self._interval = timing.probe_interval
        self._silent_since: float | None = None
        self.due = now + self._interval
        """When to ask next."""

    def answered(self, now: float) -> None:
        """Note that the successor lives."""
        self._silent_since = None
        # jitter: those whom one network's fault has put out would otherwise ask, and come back, in step
        self.due = now + self._interval * self._random.uniform(0.75, 1.25)
        self._interval = min(2 * self._interval, self._timing.longest_absence)

    def silent(self, asked_at: float, now: float) -> None:
        """Note that a question was not answered."""
        if self._silent_since is None:
            self._silent_since = asked_at
        self._interval = self._timing.probe_interval
        self.due = now + self._interval * self._random.uniform(0.75, 1.25)

    def overslept(self) -> None:
        """Count the silence anew: this node did not listen."""
        self._silent_since = None

    def is_over(self, now: float, *, alone: bool) -> bool:
        """Whether the successor has been silent for long enough; it takes longer if nobody else answers either."""
        if self._silent_since is None:
            return False
        limit = self._timing.take_back
        if alone:
            limit = max(limit, self._timing.reboot_interval)
        return now - self._silent_since >= limit

    def has_successor(self, reports: Iterable[Report], address: str) -> bool:
        """Whether a peer still counts on somebody under this id, who is asked from then on; ``address`` is our own."""
        told = [
            member
            for report in reports
            for member in report.members
            if member.node_id == self.successor.node_id and member.address != address
        ]
        last = max(told, key=_rank, default=self.successor)
        if _rank(last) > _rank(self.successor):
            self.successor = last
            self._silent_since = None
        return any(member.is_present and _rank(member) == _rank(self.successor) for member in told)


def _rank(member: Member) -> tuple[int, str]:
    return (member.boot_epoch, member.address)
