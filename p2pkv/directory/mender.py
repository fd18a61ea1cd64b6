"""Whether the owners of this node's entries still have them, and the putting of what they lack."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.wire import Kind
from p2pkv.directory.asking import Owners, Question
from p2pkv.directory.ring import NOBODY
from p2pkv.directory.routes import Route, Routes
from p2pkv.page import Keys, Locations, as_bytes


class Mended(NamedTuple):
    """What became of the entries of a :meth:`Mender.mend`."""

    is_known: NDArray[np.bool_]
    """``(n,)``: of those that every owner in question has now."""
    n_put: int
    """Those that were lacking and were put, once for each owner."""


class Mender:
    """Thread-safe. Calls block at most until their deadline, a time of the owners' clock."""

    def __init__(self, owners: Owners, shard: _native.Shard, routes: Routes) -> None:
        """``shard`` is this node's own."""
        self._owners = owners
        self._shard = shard
        self._routes = routes

    def mend(
        self,
        keys: Keys,
        locations: Locations,
        deadline: float,
        *,
        sequence: int,
        node_id: str | None = None,
    ) -> Mended:
        """Ask the owners of these entries, or the one of this id only, whether they have them, and put what they lack.

        ``sequence`` was drawn before the pages were looked up.
        """
        route = self._routes.now
        entries = _native.put_entries(keys, as_bytes(locations), sequence)
        marks = _native.check_entries(keys, as_bytes(locations))
        owners = route.ring.owners(keys)
        if node_id is not None:
            owners = only(route, owners, node_id)
        is_known = np.ones(len(keys), bool)
        n_put = 0
        for members in np.ascontiguousarray(owners.T, np.int32):
            is_kept, is_lacking = self._check(route, members, marks, deadline)
            n_put += int(is_lacking.sum())
            if is_lacking.any():
                lackers = np.where(is_lacking, members, NOBODY).astype(np.int32)
                is_kept |= self._put_at(route, lackers, entries, deadline)
            is_known &= is_kept | (members == NOBODY)
        return Mended(is_known, n_put)

    def _check(
        self, route: Route, members: NDArray[np.int32], marks: NDArray[np.uint8], deadline: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Ask a member for each entry; return where it has it, and where it lacks it or can't say."""
        ask = _native.AskBatch.of_members(members, route.table)
        kept = np.zeros(len(members), np.uint8)
        self._owners.ask(route, Question(Kind.CHECK, ask, marks, kept), deadline)
        own = np.flatnonzero(members == route.own_index)
        if len(own) and route.own_index >= 0:
            kept[own] = self._shard.check(np.ascontiguousarray(marks[own]))
        is_kept = kept.astype(bool)
        return is_kept, ~is_kept & (members != NOBODY) & ~ask.waiting().astype(bool)

    def _put_at(
        self, route: Route, members: NDArray[np.int32], entries: NDArray[np.uint8], deadline: float
    ) -> NDArray[np.bool_]:
        """Put an entry at a member each; return where that was acknowledged."""
        ask = _native.AskBatch.of_members(members, route.table)
        ask.put_own(self._shard, entries)
        self._owners.ask(route, Question(Kind.PUT, ask, entries), deadline)
        return ask.answered().astype(bool)


def only(route: Route, owners: NDArray[np.int32], node_id: str) -> NDArray[np.int32]:
    """Return ``owners`` with nobody in the place of everybody but this one."""
    members = (index for index, member in enumerate(route.ring.members) if member.node_id == node_id)
    index = next(members, NOBODY)  # it may have left since it was looked for
    return np.where(owners == index, owners, NOBODY).astype(np.int32)
