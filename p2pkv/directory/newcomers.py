"""Which members are so new that their part of the directory may not have reached them yet.

A node that joins takes entries over from others, and owners of pages put them there again. Where that takes an owner
long (its interpreter is busy, it has millions of pages), and every replica of an entry has gone to newcomers, a reader
that asks them alone misses pages that are there. The ring without the newcomers says who had those entries before, and
still has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from p2pkv.directory.membership.timing import Clock, SystemClock
from p2pkv.directory.view import Member

SETTLING_S = 3.0
"""For how long a member is new: as long as a busy owner may take to put entries again."""


class Newcomers:
    """Remembers when this node first saw each member on the ring. Not thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._since: dict[tuple[str, int], float] = {}
        self._has_seen_others = False

    def settled(self, members: Iterable[Member]) -> list[Member]:
        """Return those of ``members``, all that are present now, which are not new.

        New is who was first seen here less than :data:`SETTLING_S` ago, whatever its clock says. Of those that this
        node finds when it comes itself, those that started so short ago by their boot epoch: there is no other sign.
        """
        now, wall_ns = self._clock.monotonic(), self._clock.wall_ns()
        present = list(members)
        settled_ns = wall_ns - int(SETTLING_S * 1e9)
        since: dict[tuple[str, int], float] = {}
        for member in present:
            boot = (member.node_id, member.boot_epoch)
            is_found = not self._has_seen_others and member.boot_epoch < settled_ns
            since[boot] = self._since.get(boot, -math.inf if is_found else now)
        self._since = since
        self._has_seen_others |= bool(present)
        return [m for m in present if now - since[m.node_id, m.boot_epoch] > SETTLING_S]
