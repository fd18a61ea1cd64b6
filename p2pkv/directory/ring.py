"""The ring: which members hold the directory entry of a page.

Consistent hashing: each member with a seat has virtual nodes on a circle of 64 bits, a key belongs to the first
distinct members at or after its position. An immutable function of the members' ids and weights alone, so that two
nodes with the same view agree without talking. Looking up is numpy throughout: nothing in Python is done
per key.

There are :data:`SEATS` seats, and in a larger cluster a hash of their ids says who has them (rendezvous hashing): a
look-up of a prompt's pages would else ask nearly as many members as it has pages, and each node would hold a channel
to every other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from p2pkv.directory.view import MAX_MEMBERS, Member
from p2pkv.errors import UsageError
from p2pkv.page import KEY_BYTES, Keys

VIRTUAL_NODES = 160
"""For a member of weight 1: the busiest of 32 has about a fifth more than its share."""

SEATS = 64
"""Members that hold entries, at most. The same in every node of a cluster: it is no setting."""

NOBODY = -1
"""As an owner's index: there are fewer members than replicas."""

_POINTS_A_DIGEST = 8

Owners = NDArray[np.int32]
"""``(n, replicas)``: indexes into :attr:`Ring.members`, the first choice first."""


class Ring:
    """Where directory entries belong, for one view. Immutable, so any thread may use it."""

    members: tuple[Member, ...]
    """Those present, alive or suspected, by node id; one of weight 0 or without a seat holds no entries."""
    seated: tuple[Member, ...]
    """Those of them with a seat."""
    replicas: int
    _boots: tuple[tuple[str, int, float], ...]
    """Ids, boots and weights of those with a seat."""
    _seats: Owners
    """As :attr:`successors`, of indexes into them."""
    points: NDArray[np.uint64]
    """``(m,)``: the virtual nodes' positions, sorted."""
    successors: Owners
    """``(m, replicas)``: who owns the keys at or before each point, back to the one before."""

    def __init__(self, members: Iterable[Member], replicas: int, *, like: Ring | None = None) -> None:
        """Build it; what a ring of the same boots and weights has already is taken from ``like``."""
        if replicas < 1:
            raise UsageError(f"a ring of {replicas} replicas; at least 1")
        present = (member for member in members if member.is_present)
        self.members = tuple(sorted(present, key=lambda member: member.node_id))
        self.replicas = replicas
        seated = _seated(self.members)
        self.seated = tuple(member for _, member in seated)
        self._boots = tuple((member.node_id, member.boot_epoch, member.weight) for member in self.seated)
        if like is not None and like.is_like(self):
            self.points, self._seats = like.points, like._seats
        else:
            self._place(self.seated)
        # the last place is where NOBODY, as an index, points
        self.successors = np.array([*(index for index, _ in seated), NOBODY], np.int32)[self._seats]

    def _place(self, seated: Sequence[Member]) -> None:
        points = [np.empty(0, np.uint64), *(_points(member.node_id, member.weight) for member in seated)]
        seats = np.repeat(np.arange(-1, len(seated), dtype=np.int32), [len(each) for each in points])
        # stable: should two points ever coincide, the order of node ids decides, on every node alike
        order = np.argsort(np.concatenate(points), kind="stable")
        self.points = np.concatenate(points)[order]
        self._seats = _successors(seats[order], min(self.replicas, len(seated)), self.replicas)

    def share(self, node_key: int) -> float:
        """Return which part of all keys has this member for its first owner."""
        if not len(self.points):
            return 0.0
        index = next((i for i, member in enumerate(self.members) if member.key == node_key), NOBODY)
        arcs = np.diff(self.points, prepend=self.points[-1:])  # back to the point before, around the circle
        return float(arcs[self.successors[:, 0] == index].sum(dtype=np.float64) / 2.0**64)

    def is_like(self, other: Ring) -> bool:
        """Whether every entry belongs to the same boots of the same nodes, whatever else changed about them."""
        return (self._boots, self.replicas) == (other._boots, other.replicas)

    def owners(self, keys: Keys) -> Owners:
        """Return who holds the entries of ``keys``: distinct members, :data:`NOBODY` where none is left."""
        if keys.ndim != 2 or keys.shape[1] != KEY_BYTES or keys.dtype != np.uint8:
            raise UsageError(
                f"keys of shape {keys.shape} and dtype {keys.dtype}; (n, {KEY_BYTES}) uint8 needed"
            )
        if not len(self.points):
            return np.full((len(keys), self.replicas), NOBODY, np.int32)
        positions = np.ascontiguousarray(keys[:, :8]).view("<u8").reshape(len(keys))
        slots = np.searchsorted(self.points, positions)
        slots[slots == len(self.points)] = 0
        found: Owners = self.successors[slots]
        return found


def moved(old: Ring, new: Ring, keys: Keys) -> NDArray[np.bool_]:
    """Return a mask ``(n,)`` of the keys whose entries must be put again: an owner was gained.

    A member that came back in another boot counts as gained: it has forgotten what it was told.
    """
    if old.is_like(new):
        return np.zeros(len(keys), bool)
    index = {(member.node_id, member.boot_epoch): i for i, member in enumerate(new.members)}
    gone = -2  # equals neither an index nor NOBODY
    known = [index.get((member.node_id, member.boot_epoch), gone) for member in old.members]
    # the last place is where NOBODY, as an index, points
    translate = np.array([*known, gone], np.int32)
    before = translate[old.owners(keys)]
    now = new.owners(keys)
    kept = (now[:, :, None] == before[:, None, :]).any(axis=2)
    gained: NDArray[np.bool_] = (~kept & (now != NOBODY)).any(axis=1)
    return gained


def _seated(members: Sequence[Member]) -> list[tuple[int, Member]]:
    """Return who has a seat, with their indexes: who joins or leaves changes this by one member at most."""
    bearing = [(index, member) for index, member in enumerate(members) if member.weight > 0]
    if len(bearing) > SEATS:
        bearing.sort(key=lambda each: (_rank(each[1].node_id) / each[1].weight, each[1].node_id))
        bearing = sorted(bearing[:SEATS], key=lambda each: each[0])
    return bearing


@lru_cache(MAX_MEMBERS)
def _rank(node_id: str) -> int:
    return int.from_bytes(blake2b(b"seat/" + node_id.encode(), digest_size=8).digest(), "little")


@lru_cache(MAX_MEMBERS)
def _points(node_id: str, weight: float) -> NDArray[np.uint64]:
    n_points = max(1, round(VIRTUAL_NODES * weight))
    n_digests = -(-n_points // _POINTS_A_DIGEST)
    digests = (blake2b(b"%d/%s" % (i, node_id.encode())).digest() for i in range(n_digests))
    points = np.frombuffer(b"".join(digests), "<u8")[:n_points].astype(np.uint64)
    points.flags.writeable = False
    return points


def _successors(owners: NDArray[np.int32], n_distinct: int, replicas: int) -> Owners:
    """Return for each point the first distinct owners at or after it, padded with ``NOBODY``."""
    n_points = len(owners)
    table = np.full((n_points, replicas), NOBODY, np.int32)
    if n_points == 0:
        return table
    table[:, 0] = owners
    ahead = np.arange(n_points)
    for column in range(1, n_distinct):
        pending = np.arange(n_points)
        while len(pending):
            ahead[pending] = (ahead[pending] + 1) % n_points
            candidates = owners[ahead[pending]]
            is_new = (table[pending, :column] != candidates[:, None]).all(axis=1)
            table[pending[is_new], column] = candidates[is_new]
            pending = pending[~is_new]
    return table
