"""The roster: what this node believes about every node, and the rules by which it changes its mind.

Precedence is SWIM's: the higher boot, within it the higher incarnation, within it the graver state. Only a
node itself raises its incarnation, to object to being suspected or dead. No I/O and no clock here.

Rules about this node's own id:

* a record of our boot that says worse than alive is refuted with a higher incarnation;
* a record of a higher boot expels us: somebody was started in our place. The higher boot wins wherever two
  meet, so that all nodes choose the same one without talking. (In the same nanosecond: the greater
  address.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from p2pkv.directory.view import MAX_MEMBERS, Member, State, View, node_key

log = logging.getLogger(__name__)

MAX_BURIED = 1024
"""Of the dead remembered; the longest dead are forgotten first. A quarter of what a view may hold."""


class Roster:
    """The records of this node and of all it heard of. Owned by one thread."""

    expelled: str | None = None
    """Why this node must go, once it must."""
    was_dead: bool = False
    """Somebody took this node for dead; whoever acts on it resets it."""
    n_refused: int = 0
    """Records that were not taken in: too many members, or an id that shares its key with another."""

    def __init__(self, own: Member, burial: float) -> None:
        self._own_id = own.node_id
        self._burial = burial
        self._records = {own.node_id: own}
        self._keys = {node_key(own.node_id): own.node_id}
        self._buried: dict[str, float] = {}
        self._view: View | None = None

    @property
    def own(self) -> Member:
        """The record of this node itself."""
        return self._records[self._own_id]

    def view(self) -> View:
        """Return all of it; the same object until something changes."""
        if self._view is None:
            self._view = View(self._records.values())
        return self._view

    def take(self, record: Member, *, now: float, is_proven: Callable[[Member], bool]) -> None:
        """Believe ``record`` if it is newer than what is known.

        A rumour of death about a member that ``is_proven`` alive is taken as a suspicion: that node then
        hears of it and objects, while a healed partition doesn't empty the ring.
        """
        if record.node_id == self._own_id:
            self._hear_of_self(record)
            return
        known = self._records.get(record.node_id)
        if known is None and not record.is_present:
            # not news; and the dead would be passed round for ever by nodes that forget at different moments
            return
        if record.state is State.DEAD and is_proven(record):
            record = replace(record, state=State.SUSPECT)
        if known is not None and record.precedence <= known.precedence:
            return
        if known is None and not self._has_room_for(record):
            return
        self._put(record, now)

    def suspect(self, member: Member, now: float) -> None:
        """Doubt a member, unless something newer than ``member`` was heard of it meanwhile."""
        known = self._records.get(member.node_id)
        if member.state is State.ALIVE and known is not None and known.precedence == member.precedence:
            self._put(replace(known, state=State.SUSPECT), now)

    def bury(self, node_id: str, now: float) -> None:
        """Give up a suspected member."""
        member = self._records[node_id]
        if member.state is State.SUSPECT:
            self._put(replace(member, state=State.DEAD), now)

    def leave(self, now: float) -> None:
        """Mark this node itself as departed."""
        self._put(replace(self.own, state=State.LEFT), now)

    def refute(self) -> None:
        """Object to whatever is said about this node's present incarnation."""
        self._put(replace(self.own, incarnation=self.own.incarnation + 1), 0.0)

    def forget(self, now: float) -> None:
        """Drop the long dead, and the longest dead when they are many."""
        by_age = sorted(self._buried, key=lambda node_id: self._buried[node_id])
        surplus = len(by_age) - MAX_BURIED
        for position, node_id in enumerate(by_age):
            if position < surplus or now - self._buried[node_id] >= self._burial:
                self._drop(node_id)

    def _hear_of_self(self, record: Member) -> None:
        own = self.own
        if own.state is State.LEFT or self.expelled is not None:
            return
        if (record.boot_epoch, record.address) > (own.boot_epoch, own.address):
            self.expelled = (
                f"node id {own.node_id!r} was started again at {record.address} with boot epoch "
                f"{record.boot_epoch}, above ours ({own.boot_epoch} at {own.address}); "
                "give each process its own node_id"
            )
        elif record.precedence > own.precedence:
            self.was_dead |= not record.is_present
            self._put(replace(own, incarnation=record.incarnation + 1), 0.0)

    def _has_room_for(self, record: Member) -> bool:
        holder = self._keys.get(node_key(record.node_id))
        if holder is not None:
            self._refuse(record, f"its key is that of node {holder!r}; choose another node_id")
            return False
        if len(self._records) >= MAX_MEMBERS:
            if not self._buried:
                self._refuse(record, f"the cluster has {MAX_MEMBERS} members already")
                return False
            self._drop(min(self._buried, key=lambda node_id: self._buried[node_id]))
        return True

    def _refuse(self, record: Member, why: str) -> None:
        if self.n_refused == 0:  # it comes again with every exchange; once is enough in the log
            log.error("node %r at %s is not taken in: %s", record.node_id, record.address, why)
        self.n_refused += 1

    def _put(self, member: Member, now: float) -> None:
        self._records[member.node_id] = member
        self._keys[node_key(member.node_id)] = member.node_id
        if member.is_present:
            self._buried.pop(member.node_id, None)
        elif member.node_id != self._own_id:
            self._buried.setdefault(member.node_id, now)
        self._view = None

    def _drop(self, node_id: str) -> None:
        del self._records[node_id], self._buried[node_id], self._keys[node_key(node_id)]
        self._view = None
