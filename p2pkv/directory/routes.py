"""By which ring requests go: that of the last view, and of who owned entries before the newest members came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.directory.membership.timing import Clock
from p2pkv.directory.newcomers import SETTLING_S, Newcomers
from p2pkv.directory.ring import Ring
from p2pkv.directory.view import Member, State, View, node_key


@dataclass(frozen=True, slots=True)
class Route:
    """What one view means for requests. Never changes, so a call uses one route from beginning to end."""

    ring: Ring
    own_index: int
    """Of this node among the ring's members; -1 if it is none."""
    table: _native.RingTable
    member_keys: NDArray[np.uint64]
    before: Route | None = None
    """The same without those who are new in the directory, to whom not everything may have been put yet, and with those
    who gave way to them; None: there are none."""
    before_until: float = 0.0
    """When nobody is new any more, a time of the clock's ``monotonic()``."""
    away: tuple[Member, ...] = ()
    """Those who may come back with their pages."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A route as the member goes by it that an attached engine tells the directory for."""

    of: Route
    told_by: int
    table: _native.RingTable

    @classmethod
    def made(cls, route: Route, told_by: int) -> Beside:
        """Make it of ``route``, for the member with the key ``told_by``."""
        found = np.flatnonzero(route.member_keys == told_by)
        return cls(route, told_by, _table(route.ring, int(found[0]) if len(found) else -1))


class Routes:
    """Any thread may ask; one thread follows views. The shard is told of what is followed."""

    def __init__(self, own_key: int, shard: _native.Shard, replicas: int, clock: Clock) -> None:
        self._own_key = own_key
        self._shard = shard
        self._replicas = replicas
        self._clock = clock
        self._newcomers = Newcomers(clock)
        self._beside: Beside | None = None
        self.now = self._made(())
        """What requests go by that begin now."""

    def follow(self, view: View) -> None:
        """Route by ``view`` from now on; entries of owners outside it stop counting, for as long as they are away."""
        present = view.present()
        old = self.now
        route = self._made(present, like=old)
        settled = self._newcomers.settled(route.ring.seated, present)
        if settled and set(settled) != set(route.ring.seated):
            before = self._made(settled, like=old.before or old)
            route = replace(route, before=None if before.ring.is_like(route.ring) else before)
        away = tuple(member for member in view.values() if member.may_come_back)
        self._take(replace(route, away=away))

    def confirm(self) -> None:
        """Say that the last view still is up to date; without it no entry is swept out. Newcomers settle by it."""
        route = self.now
        if route.before is not None and self._clock.monotonic() > route.before_until:
            self._take(replace(route, before=None))
        self._shard.confirm_view()

    def before(self, route: Route) -> Route | None:
        """Return the route of before the newcomers, as long as they are that."""
        return route.before if self._clock.monotonic() <= route.before_until else None

    def beside(self, told_by: int) -> Beside:
        """Return the ring as the member with this key goes by it now; the same object until the ring changes."""
        beside = self._beside
        if beside is None or beside.of is not self.now or beside.told_by != told_by:
            beside = self._beside = Beside.made(self.now, told_by)
        return beside

    def _take(self, route: Route) -> None:
        members = [*route.ring.members, *route.away]
        self._shard.set_view(
            [*route.member_keys.tolist(), *(member.key for member in route.away)],
            [member.boot_epoch for member in members],
            [member.first_boot for member in members],
            n_away=len(route.away),
        )
        self._shard.set_rings([route.table] if route.before is None else [route.table, route.before.table])
        self.now = route

    def _made(self, members: Sequence[Member], *, like: Route | None = None) -> Route:
        ring = Ring(members, self._replicas, like=like.ring if like is not None else None)
        keys = [node_key(member.node_id) for member in ring.members]
        own_index = keys.index(self._own_key) if self._own_key in keys else -1
        member_keys, until = np.array(keys, np.uint64), self._clock.monotonic() + SETTLING_S
        return Route(ring, own_index, _table(ring, own_index), member_keys, None, until)


def _table(ring: Ring, own_index: int) -> _native.RingTable:
    is_healthy = np.array([member.state is State.ALIVE for member in ring.members], np.uint8)
    return _native.RingTable(ring.points, ring.successors, is_healthy, own_index)
