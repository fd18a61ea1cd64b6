"""The directory as one node uses it: put, get and drop entries at the shards that own them.

A key's entry lies at ``replicas`` nodes of the ring. They are asked in parallel. An entry found anywhere counts;
"not found" is final when every healthy owner said so; an owner that stays silent while another has spoken is waited
for :data:`SILENT_OWNER_S` and no longer. The node's own shard is called directly. What newcomers don't know is asked of
those who owned it before they came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control import ControlClient, Request
from p2pkv.directory.channels import DirectoryChannels
from p2pkv.directory.newcomers import SETTLING_S, Newcomers
from p2pkv.directory.ring import Ring, moved
from p2pkv.directory.view import Member, State, View, node_key
from p2pkv.errors import ClosedError
from p2pkv.metrics import Metrics
from p2pkv.page import LOCATION, Keys, Locations, as_bytes
from p2pkv.pool import Pieces, Pool, PoolStatus
from p2pkv.wire import Kind, Reply

SILENT_OWNER_S = 0.020
"""Twenty round trips on a busy machine, and no more than a fetch may lose to a peer that has stopped."""


def do_nothing() -> None:
    """Stand in for something to do meanwhile."""


@dataclass(frozen=True, slots=True)
class _Route:
    """What one view means for requests. Never changes, so a call uses one route from beginning to end."""

    ring: Ring
    table: _native.RingTable
    member_keys: NDArray[np.uint64]
    before: _Route | None = None
    """The same without the newcomers, to whom not everything may have been put yet; None: there are none."""
    before_until: float = 0.0
    """When nobody is new any more, a time of ``time.monotonic()``."""


@dataclass(frozen=True, slots=True)
class Lease:
    """For how long owners keep what they promote; ``number`` is drawn at random, 0 for one that is not released."""

    seconds: float
    number: int = 0


class Told(NamedTuple):
    """What became of the pages of a :meth:`DirectoryClient.publish`."""

    is_told: NDArray[np.uint8]
    """``(n,)``: 1 for those in the pool that at least one owner knows of."""
    n_readable: int
    """In the pool, stored or found there."""
    nbytes: int
    """Copied, of pages that were stored."""
    n_late: int
    """Not copied, for want of time."""
    may_be_gone: bool
    """Whether some of them may have left the pool while the directory was told of them."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What a call asks the owners: ``kind``, and for each key a record. Answers to GET fill the last two."""

    kind: Kind
    ask: _native.AskBatch
    records: NDArray[np.uint8]
    found: NDArray[np.uint8] | None = None
    locations: NDArray[np.uint8] | None = None

    def send(self, owners: list[int], channels: list[_native.DirectoryChannel]) -> _native.AskedOwners:
        """Ask over channels, one an owner, and wait for nothing."""
        return self.ask.send(self.kind, self.records, owners, channels, self.found, self.locations)

    def take(self, index: int, reply: Reply) -> None:
        """Take an owner's good reply."""
        if self.found is not None and self.locations is not None:
            self.ask.take_found(index, reply.body, self.found, self.locations)
        else:
            self.ask.acknowledge(index)


class DirectoryClient:
    """Thread-safe. Calls block at most until their deadline, a time of ``time.monotonic()``."""

    def __init__(
        self,
        *,
        own_key: int,
        shard: _native.Shard,
        client: ControlClient,
        channels: DirectoryChannels,
        replicas: int,
        metrics: Metrics,
    ) -> None:
        self._own_key = own_key
        self._shard = shard
        self._client = client
        self._channels = channels
        self._replicas = replicas
        self._metrics = metrics
        self._sequences = _native.Sequences()
        self._newcomers = Newcomers()
        self.on_missed: Callable[[str], None] = lambda _: None
        """Called with the id of an owner that did not take a put: what it missed must be put again."""
        self.set_view(View())

    def set_view(self, view: View) -> None:
        """Route by ``view`` from now on; entries of owners outside it stop counting."""
        self._channels.set_view(view)
        present = view.present()
        settled = self._newcomers.settled(present)
        before = self._make_route(settled) if 0 < len(settled) < len(present) else None
        route = self._make_route(present, before)
        members = route.ring.members
        self._shard.set_view(route.member_keys.tolist(), [member.boot_epoch for member in members])
        self._route = route

    def _make_route(self, members: Sequence[Member], before: _Route | None = None) -> _Route:
        ring = Ring(members, self._replicas)
        keys = [node_key(member.node_id) for member in ring.members]
        is_healthy = np.array([member.state is State.ALIVE for member in ring.members], np.uint8)
        own_index = keys.index(self._own_key) if self._own_key in keys else -1
        table = _native.RingTable(ring.points, ring.successors, is_healthy, own_index)
        return _Route(ring, table, np.array(keys, np.uint64), before, time.monotonic() + SETTLING_S)

    @property
    def ring(self) -> Ring:
        """The ring that requests go by now."""
        return self._route.ring

    def get(self, keys: Keys, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Look up where pages lie.

        Returns ``(n,)`` 1 for those found at an owner that is in the view, and ``(n, 64)`` raw locations, undefined
        where not found.
        """
        found, locations = self._shard.get(keys)
        n_own = int(found.sum())
        self._metrics.count(self._metrics.looked_up_pages, "own_shard", n_own)
        if n_own < len(keys):
            self._metrics.count(self._metrics.looked_up_pages, "peers", len(keys) - n_own)
            route = self._route
            ask = _native.AskBatch(keys, found, route.table)
            self._ask_owners(route, _Question(Kind.GET, ask, keys, found, locations), deadline)
            self._ask_earlier_owners(route, keys, found, locations, deadline)
            found = self._shard.keep_present(locations, found)
        return found, locations

    def _ask_earlier_owners(
        self,
        route: _Route,
        keys: Keys,
        found: NDArray[np.uint8],
        locations: NDArray[np.uint8],
        deadline: float,
    ) -> None:
        """Look up what was not found and has a newcomer for an owner where it lay before."""
        before = route.before
        if before is None or found.all() or time.monotonic() > route.before_until:
            return
        is_done = (found.astype(bool) | ~moved(before.ring, route.ring, keys)).astype(np.uint8)
        if is_done.all():
            return
        self._metrics.count(self._metrics.looked_up_pages, "earlier_owners", len(keys) - int(is_done.sum()))
        ask = _native.AskBatch(keys, is_done, before.table)
        self._ask_owners(before, _Question(Kind.GET, ask, keys, found, locations), deadline)

    def promote(
        self, keys: Keys, locations: NDArray[np.uint8], deadline: float, *, answer_s: float, lease: Lease
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Ask the owners of pages that lie on disk to bring them into their pools.

        ``locations`` is ``(n, 64)`` raw. They answer within ``answer_s`` seconds (0: at once, and load meanwhile) and
        keep what is there for the lease. Returns, as :meth:`get` does, what can be read now and where.
        """
        route = self._route
        found = np.zeros(len(keys), np.uint8)
        where = np.zeros((len(keys), LOCATION.itemsize), np.uint8)
        ask = _native.AskBatch.of_page_owners(locations, route.member_keys, route.table)
        entries = _native.promote_entries(keys, int(answer_s * 1000), int(lease.seconds * 1000), lease.number)
        self._ask_owners(route, _Question(Kind.PROMOTE, ask, entries, found, where), deadline)
        return found, where

    def release(self, lease: Lease, locations: NDArray[np.uint8]) -> None:
        """Tell the owners that were asked to promote the pages at ``locations`` that they were read, or won't be.

        Waits for nothing. An owner without a free channel is told by the next one, or keeps them until the lease's end.
        """
        route = self._route
        ask = _native.AskBatch.of_page_owners(locations, route.member_keys, route.table)
        for owner in ask.owners():
            self._channels.release(route.ring.members[owner], lease.number, lease.seconds)

    def put(
        self,
        keys: Keys,
        locations: Locations,
        deadline: float,
        *,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> NDArray[np.uint8]:
        """Store where pages lie. Returns ``(n,)`` 1 for those that at least one owner has acknowledged.

        ``meanwhile`` is called once, when the owners have been asked and are not waited for yet: what it takes is
        hidden by their answers' way.
        """
        entries = _native.put_entries(keys, as_bytes(locations), self._sequences.next())
        route = self._route
        ask = _native.AskBatch(keys, None, route.table)
        ask.put_own(self._shard, entries)
        self._ask_owners(route, _Question(Kind.PUT, ask, entries), deadline, meanwhile)
        self._note_missed(route, {*ask.silent(), *ask.passed_over()})
        return ask.answered()

    def publish(
        self,
        pool: Pool,
        keys: Keys,
        pieces: Pieces,
        deadline: float,
        *,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> Told:
        """Copy pages into the pool, as :meth:`Pool.publish` does, and put where they lie, as :meth:`put` does."""
        route = self._route
        owners = route.table.peers_of(keys)
        members = [route.ring.members[owner] for owner in owners]
        channels = self._channels.lease(members)
        if channels is None:
            return self._publish_then_put(pool, keys, pieces, deadline, meanwhile)
        publishing = _native.Publishing(route.table, owners, channels)
        is_usable = [False] * len(channels)
        try:
            n_readable, nbytes, n_late = publishing.run(
                pool.native, keys, pieces, self._shard, self._sequences, deadline - time.monotonic()
            )
            if n_readable:
                meanwhile()
            is_usable = publishing.wait(deadline - time.monotonic(), SILENT_OWNER_S)
        finally:
            self._channels.give_back(members, channels, is_usable)
        if self._client.is_closed:
            raise ClosedError("the node is closed")
        if silent := publishing.silent():
            self._metrics.silent_owners.inc(len(silent))
        self._note_missed(route, {*silent, *publishing.passed_over()})
        is_told = publishing.answered()
        if self._route is not route:
            # The owners may be others now, and what was put again because it moved was not these pages: they were not
            # in the pool yet.
            is_told |= self._put_resident(pool, keys, deadline)
        return Told(is_told, n_readable, nbytes, n_late, publishing.has_lost(pool.native))

    def _publish_then_put(
        self, pool: Pool, keys: Keys, pieces: Pieces, deadline: float, meanwhile: Callable[[], None]
    ) -> Told:
        """Do the same where some owner has no channel yet."""
        statuses, locations, n_readable, nbytes = pool.publish(keys, pieces, deadline - time.monotonic())
        is_told = np.zeros(len(keys), np.uint8)
        there = np.flatnonzero(statuses <= PoolStatus.EXISTS)
        if n_readable:
            is_told[there] = self.put(keys[there], locations[there], deadline, meanwhile=meanwhile)
        n_late = int(np.count_nonzero(statuses == PoolStatus.TIMED_OUT))
        return Told(is_told, n_readable, nbytes, n_late, may_be_gone=True)

    def _put_resident(self, pool: Pool, keys: Keys, deadline: float) -> NDArray[np.uint8]:
        """Put where those of the pages lie that are in the pool; 1 for those an owner acknowledged."""
        found, locations = pool.lookup(keys)
        there = np.flatnonzero(found)
        if len(there):
            found[there] = self.put(keys[there], locations[there], deadline)
        return found

    def _note_missed(self, route: _Route, owners: set[int]) -> None:
        """Have those who did not take a put given it again."""
        for index in owners:
            self.on_missed(route.ring.members[index].node_id)

    def drop(self, keys: Keys, locations: Locations, deadline: float, *, by_owner: bool) -> None:
        """Delete the entries that still are the ones named; ``by_owner`` if this node published them."""
        sequence = self._sequences.next() if by_owner else 0
        entries = _native.drop_entries(keys, as_bytes(locations), sequence)
        self._shard.drop(entries)
        route = self._route
        ask = _native.AskBatch(keys, None, route.table)
        self._ask_owners(route, _Question(Kind.DROP, ask, entries), deadline)

    def _ask_owners(
        self,
        route: _Route,
        question: _Question,
        deadline: float,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> None:
        """Ask the owners in parallel, do ``meanwhile`` and take their answers.

        Returns when no key needs another answer, or when those who are silent have had their time.
        """
        ask = question.ask
        owners = ask.owners()
        members = [route.ring.members[owner] for owner in owners]
        channels = self._channels.lease(members)
        if channels is not None:
            is_usable = [False] * len(channels)
            try:
                asked = question.send(owners, channels)
                meanwhile()
                is_usable = asked.wait(deadline - time.monotonic(), SILENT_OWNER_S)
            finally:
                self._channels.give_back(members, channels, is_usable)
            if self._client.is_closed:
                raise ClosedError("the node is closed")
        else:
            self._ask_over_control_socket(route, question, deadline, meanwhile)
        self._metrics.silent_owners.inc(len(ask.silent()))

    def _ask_over_control_socket(
        self, route: _Route, question: _Question, deadline: float, meanwhile: Callable[[], None]
    ) -> None:
        ask = question.ask
        owners = [route.ring.members[owner] for owner, _ in ask.asks()]
        requests = [
            Request(owner.address, question.kind, ask.body(index, question.records), n, owner.boot_epoch)
            for index, (owner, (_, n)) in enumerate(zip(owners, ask.asks(), strict=True))
        ]
        patience = time.monotonic() + SILENT_OWNER_S
        with self._client.send(requests) as calls:
            meanwhile()
            while not ask.is_settled():
                now = time.monotonic()
                if now >= deadline or (now >= patience and ask.is_heard()):
                    break
                until = min(deadline, patience) if now < patience else deadline
                answer = calls.next(until - now)
                if answer is None:
                    if not calls.are_pending():
                        break
                    continue
                index, reply = answer
                if reply.ok and reply.count == requests[index].count:
                    question.take(index, reply)
                else:
                    ask.refuse(index)
