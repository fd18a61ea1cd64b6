"""Who is so new among those that hold the directory that its part may not have reached it yet.

A node that joins takes entries over from others, and owners of pages put them there again; so does a member of a large
cluster that takes the seat of a lost one. Where that takes an owner long (its interpreter is busy, it has millions of
pages), and every replica of an entry has gone to newcomers, a reader that asks them alone misses pages that are there.
The ring without the newcomers says who had those entries before, and still has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from p2pkv.directory.membership.timing import Clock, SystemClock
from p2pkv.directory.view import Member

SETTLING_S = 3.0
"""For how long a seat's holder is new: as long as a busy owner may take to put entries again."""

_Boot = tuple[str, int]


class Newcomers:
    """Remembers since when each member has a seat, as this node sees it. Not thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._since: dict[_Boot, float] = {}
        self._gave_way: dict[_Boot, float] = {}  # when who had settled was seen without a seat
        self._has_seen_others = False

    def settled(self, seated: Iterable[Member], present: Iterable[Member]) -> list[Member]:
        """Return who of those ``present`` now had entries before newcomers took any over; who has a seat is ``seated``.

        New is who was first seen with a seat here less than :data:`SETTLING_S` ago, whatever its clock says. Of those
        that this node finds when it comes itself, those that started so short ago by their boot epoch: there is no
        other sign. Who has given its seat up to another still has its entries for as long.
        """
        now, wall_ns = self._clock.monotonic(), self._clock.wall_ns()
        settled_ns = wall_ns - int(SETTLING_S * 1e9)
        since: dict[_Boot, float] = {}
        for member in seated:
            boot = _boot(member)
            is_found = not self._has_seen_others and member.boot_epoch < settled_ns
            since[boot] = self._since.get(boot, -math.inf if is_found else now)
        self._gave_way = {boot: at for boot, at in self._gave_way.items() if now - at <= SETTLING_S}
        for boot, at in self._since.items():
            if boot not in since and now - at > SETTLING_S:
                self._gave_way[boot] = now
        self._since = since
        self._has_seen_others |= bool(since)
        # Who is back in its seat already is as new in it as anybody: entries were put with its stand-ins meanwhile.
        gave_way = self._gave_way.keys() - since.keys()
        settled = {boot for boot, at in since.items() if now - at > SETTLING_S}
        has_entries = settled | gave_way
        return [member for member in present if _boot(member) in has_entries]


def _boot(member: Member) -> _Boot:
    return (member.node_id, member.boot_epoch)
