"""The roster: what this node believes about every node, and the rules by which it changes its mind.

Precedence is SWIM's: the higher boot, within it the higher incarnation, within it the graver state. Only a
node itself raises its incarnation, to object to being dead. No I/O and no clock here.

Suspicion is this node's own and not believed of others: whoever reaches a member goes on asking it and reading from
it, whatever somebody else can't reach. A rumour of death about a member that answers us is not believed either; it
is kept for that member to hear of, which then objects.

Rules about this node's own id:

* a record of our boot that says dead is refuted with a higher incarnation; where there is none, it is a rival;
* a record of a higher boot is a rival: somebody was started in our place, or we were, by a clock that is behind.
  The engine asks it. If it answers, we are expelled: the higher boot wins wherever two meet, so that all nodes
  choose the same one without talking (in the same nanosecond: the greater address). If it is silent, it is gone,
  and we take a boot above it;
* a record of one of the last boots that can be told is not believed, unless it is ours: above what we believe there
  must be room for boots that we take, and what we said above the last one nobody could read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from p2pkv.directory.view import LAST_EPOCH, MAX_MEMBERS, Member, State, View, node_key

log = logging.getLogger(__name__)

_MOST_BELIEVED = LAST_EPOCH - 2**32
"""The greatest boot of its own that a node believes to have had. What has it take one more is that somebody lies once
more, or that two start in its place, so that what is left does not end."""
MAX_BURIED = 1024
"""Of the dead remembered; the longest dead are forgotten first. A quarter of what a view may hold."""


class Roster:
    """The records of this node and of all it heard of. Owned by one thread."""

    expelled: str | None = None
    """Why this node must go, while it must."""
    successor: Member | None = None
    """The record of its id for which this node was expelled."""
    rival: Member | None = None
    """A record of our id above ours; whoever finds out who is right resets it."""
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
        self._view = View([own])
        self._changed: dict[str, Member] = {}
        self._dropped: set[str] = set()
        self._news: dict[str, Member] = {own.node_id: own}
        self._rumours: dict[str, Member] = {}
        self._settled_from: tuple[int, int] | None = None

    @property
    def own(self) -> Member:
        """The record of this node itself."""
        return self._records[self._own_id]

    def view(self) -> View:
        """Return all of it; the same object until something changes."""
        if self._changed or self._dropped:
            self._view = self._view.replacing(self._changed.values(), self._dropped)
            self._changed, self._dropped = {}, set()
        return self._view

    def news(self) -> list[Member]:
        """Return the records that changed since the last call, in what peers should know of them."""
        news, self._news = list(self._news.values()), {}
        return news

    def rumours(self) -> list[Member]:
        """Return what was said since the last call of members that are proven to live."""
        rumours, self._rumours = list(self._rumours.values()), {}
        return rumours

    def take(self, record: Member, *, now: float, is_proven: Callable[[Member], bool]) -> None:
        """Believe ``record`` if it is newer than what is known."""
        if record.node_id == self._own_id:
            self._hear_of_self(record)
            return
        known = self._records.get(record.node_id)
        if known is None and not record.is_present:
            # not news; and the dead would be passed round for ever by nodes that forget at different moments
            return
        if known is not None and record.state is State.SUSPECT and record.boot_epoch == known.boot_epoch:
            record = replace(record, state=State.ALIVE)
        if known is not None and record.boot_epoch == known.boot_epoch:
            # who does not know of kept memory passes records on without it, and what is said later is greater
            kept_since = max(known.kept_since, record.kept_since)
            if kept_since > known.kept_since and record.precedence <= known.precedence:
                self._put(replace(known, kept_since=kept_since), now)
            record = replace(record, kept_since=kept_since)
        if known is not None and record.precedence <= known.precedence:
            return
        if known is not None and record.state is State.DEAD and is_proven(record):
            self._rumours[record.node_id] = record
            return
        if known is None and not self._has_room_for(record):
            return
        self._put(record, now)

    def suspect(self, member: Member, now: float) -> None:
        """Doubt a member, unless something newer than ``member`` was heard of it meanwhile."""
        known = self._records.get(member.node_id)
        if member.state is State.ALIVE and known is not None and known.precedence == member.precedence:
            self._put(replace(known, state=State.SUSPECT), now)

    def trust(self, member: Member, now: float) -> None:
        """Doubt a member no more, since it answers."""
        known = self._records.get(member.node_id)
        if known is not None and known.state is State.SUSPECT and known.boot_epoch == member.boot_epoch:
            self._put(replace(known, state=State.ALIVE), now)

    def bury(self, node_id: str, now: float) -> None:
        """Give up a suspected member."""
        member = self._records[node_id]
        if member.state is State.SUSPECT:
            self._put(replace(member, state=State.DEAD), now)

    def leave(self, now: float) -> None:
        """Mark this node itself as departed."""
        self._put(replace(self.own, state=State.LEFT), now)

    def drain(self) -> None:
        """Mark this node itself as one that is about to leave, if it is not yet."""
        if not self.own.is_draining:
            self._put(
                replace(self.own, incarnation=self.own.incarnation + 1, weight=0.0, is_draining=True), 0.0
            )

    def settle(self) -> None:
        """Have nothing count that this node has said of its pages in earlier boots."""
        own = self.own
        if 0 < own.kept_since < own.boot_epoch:
            self._settled_from = (own.boot_epoch, own.incarnation)
            self._put(replace(own, incarnation=own.incarnation + 1, kept_since=own.boot_epoch), 0.0)

    def reboot(self, boot_epoch: int, address: str | None = None, *, kept_since: int | None = None) -> None:
        """Go on under a higher boot epoch, at another address if one is given.

        The pool of a node whose memory is kept counts from this boot on, or since an earlier one if that is given.
        """
        boot_epoch = min(boot_epoch, LAST_EPOCH)
        own = self.own if address is None else replace(self.own, address=address)
        if kept_since is None:
            kept_since = boot_epoch if own.kept_since else 0
        self._put(replace(own, boot_epoch=boot_epoch, incarnation=0, kept_since=kept_since), 0.0)

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
        if record.boot_epoch > max(own.boot_epoch, _MOST_BELIEVED):
            self._refuse(
                record, f"no clock tells boot epoch {record.boot_epoch}, so this node can't have had it"
            )
            return
        is_last = record.incarnation >= LAST_EPOCH and not record.is_present
        if (record.boot_epoch, record.address) > (own.boot_epoch, own.address) or (
            is_last and record.boot_epoch == own.boot_epoch
        ):
            if self.rival is None or record.precedence > self.rival.precedence:
                self.rival = record
        elif record.precedence > own.precedence and not record.is_present:
            self.was_dead = True
            self._put(replace(own, incarnation=record.incarnation + 1), 0.0)
        elif not record.is_present and (record.boot_epoch, record.incarnation) == self._settled_from:
            # said of the incarnation before, and objected to by the present one without knowing it
            self.was_dead, self._settled_from = True, None

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
        known = self._records.get(member.node_id)
        if known is None or not _is_same_to_others(known, member):
            self._news[member.node_id] = member
        self._records[member.node_id] = self._changed[member.node_id] = member
        self._dropped.discard(member.node_id)
        self._keys[node_key(member.node_id)] = member.node_id
        if member.is_present:
            self._buried.pop(member.node_id, None)
        elif member.node_id != self._own_id:
            self._buried.setdefault(member.node_id, now)

    def _drop(self, node_id: str) -> None:
        del self._records[node_id], self._buried[node_id], self._keys[node_key(node_id)]
        self._news.pop(node_id, None)
        if node_id in self._view:
            self._dropped.add(node_id)
        self._changed.pop(node_id, None)


def _is_same_to_others(before: Member, now: Member) -> bool:
    """Whether two records differ at most in what this node suspects."""
    if before.is_present != now.is_present or (now.state != before.state and not now.is_present):
        return False
    return before.precedence[:2] == now.precedence[:2] and before.address == now.address
