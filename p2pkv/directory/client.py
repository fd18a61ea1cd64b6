"""The directory as one node uses it: put, get and drop entries at the shards that own them.

A key's entry lies at ``replicas`` nodes of the ring. The first is asked where it is, the next when that does not know
or takes long; all are told what changes. An entry found anywhere counts; "not found" is final when every healthy owner
said so; an owner that stays silent while another has spoken is waited for ``SILENT_OWNER_S`` and no longer. The node's
own shard is called directly. What newcomers don't know is asked of those who owned it before they came. In a cluster of
many members a look-up asks for its first page alone, and the node that has it for all (:mod:`p2pkv.directory.look_up`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.wire import Kind
from p2pkv.directory.asking import Owners, Question, do_nothing
from p2pkv.directory.look_up import FEW, LookUp
from p2pkv.directory.membership.timing import Clock, SystemClock
from p2pkv.directory.mender import Mender, only
from p2pkv.directory.paths import ChannelPath, ControlPath
from p2pkv.directory.ring import Ring, moved
from p2pkv.directory.routes import Beside, Route, Routes
from p2pkv.directory.view import View
from p2pkv.metrics import Metrics
from p2pkv.page import ANY_GENERATION, LOCATION, Keys, Locations, as_bytes
from p2pkv.pool import Pieces, Pool


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
    n_changed: int
    """Not stored, because they changed while they were packed."""
    may_be_gone: bool
    """Whether some of them may have left the pool while the directory was told of them."""


class DirectoryClient:
    """Thread-safe. Calls block at most until their deadline, a time of the clock's ``monotonic()``."""

    def __init__(
        self,
        *,
        own_key: int,
        shard: _native.Shard,
        client: ControlPath,
        channels: ChannelPath,
        replicas: int,
        metrics: Metrics,
        clock: Clock | None = None,
        others: _native.OtherHolders | None = None,
        few: int = FEW,
    ) -> None:
        """``others`` takes what other holders of a page look-ups name beside the first; None: one is asked for.

        ``few`` members are asked at once where pages lie; if more are to be asked, who has the first page is.
        """
        self._own_key = own_key
        self._others = others
        self._few = few
        self._shard = shard
        self._channels = channels
        self._metrics = metrics
        self._look_ups = metrics.timings.look_ups.native
        self._clock: Clock = clock or SystemClock()
        self._owners = Owners(client, channels, metrics, self._clock)
        self._sequences = _native.Sequences()
        self.on_missed: Callable[[str, Keys], None] = lambda _, __: None
        """Called with the id of an owner that did not take a put or a drop, and what it missed: it is told again."""
        shard.watch(own_key)
        self._routes = Routes(own_key, shard, replicas, self._clock)
        self.mender = Mender(self._owners, shard, self._routes)

    def set_view(self, view: View) -> None:
        """Route by ``view`` from now on; entries of owners outside it stop counting."""
        self._channels.set_view(view)
        self._routes.follow(view)

    def confirm_view(self) -> None:
        """Say that the view of the last :meth:`set_view` still is up to date; without it no entry is swept out.

        Called regularly, from the thread that calls :meth:`set_view`: newcomers settle by it.
        """
        self._routes.confirm()

    @property
    def ring(self) -> Ring:
        """The ring that requests go by now."""
        return self._routes.now.ring

    def beside(self, told_by: int) -> Beside:
        """Return the ring as the member with this key goes by it now; the same object until the ring changes."""
        return self._routes.beside(told_by)

    def get(
        self, keys: Keys, deadline: float, *, anew: bool = False, leading: bool = False
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Look up where pages lie.

        Returns ``(n,)`` 1 for those found at an owner that is in the view, and ``(n, 64)`` raw locations, undefined
        where not found. ``anew``: what was said before was no good, so that other nodes' entries in this node's own
        shard count only where those know nothing. ``leading``: what comes after the first page that nobody has need not
        be found.
        """
        found, locations = self._shard.get(keys, self._others)
        foreign = self._foreign(keys, found) if anew and found.any() else None
        said = None if foreign is None else locations[foreign]
        if foreign is not None:
            found[foreign] = 0
        n_own = int(np.count_nonzero(found))
        self._metrics.count(self._metrics.looked_up_pages, "own_shard", n_own)
        if n_own < len(keys):
            self._metrics.count(self._metrics.looked_up_pages, "peers", len(keys) - n_own)
            began = self._clock.monotonic()
            route = self._routes.now
            before = None if route.before is None else self._routes.before(route)
            look_up = LookUp(
                owners=self._owners,
                metrics=self._metrics,
                clock=self._clock,
                keys=keys,
                found=found,
                locations=locations,
                others=self._others,
                deadline=deadline,
                few=self._few,
            )
            if anew or not look_up.ask_holders(route, before, leading=leading):
                look_up.ask_owners(route, before)
            if foreign is not None and said is not None:
                is_unknown = found[foreign] == 0
                locations[foreign[is_unknown]] = said[is_unknown]
                found[foreign[is_unknown]] = 1
            found = self._shard.keep_present(keys, locations, found, self._others)
            self._metrics.found_pages.inc(max(0, int(np.count_nonzero(found)) - n_own))
            self._look_ups.add(0, len(keys) - n_own, self._clock.monotonic() - began)
        return found, locations

    def _foreign(self, keys: Keys, found: NDArray[np.uint8]) -> NDArray[np.intp]:
        """Return the rows that this node's shard has found and other nodes answer for.

        Whoever put such an entry here took its owners for dead, and others told these: it names one holder of several.
        """
        route = self._routes.now
        is_own = (route.ring.owners(keys) == route.own_index).any(axis=1) & (route.own_index >= 0)
        return np.flatnonzero(found.astype(bool) & ~is_own)

    def asked(self) -> tuple[float, float]:
        """Return how many pages peers were asked for so far, and how many of them were found."""
        return self._metrics.looked_up_pages.labels("peers").value, self._metrics.found_pages.value

    def promote(
        self, keys: Keys, locations: NDArray[np.uint8], deadline: float, *, answer_s: float, lease: Lease
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Ask the owners of pages that lie on disk to bring them into their pools.

        ``locations`` is ``(n, 64)`` raw. They answer within ``answer_s`` seconds (0: at once, and load meanwhile) and
        keep what is there for the lease. Returns, as :meth:`get` does, what can be read now and where.
        """
        route = self._routes.now
        found = np.zeros(len(keys), np.uint8)
        where = np.zeros((len(keys), LOCATION.itemsize), np.uint8)
        ask = _native.AskBatch.of_page_owners(locations, route.member_keys, route.table)
        entries = _native.promote_entries(keys, int(answer_s * 1000), int(lease.seconds * 1000), lease.number)
        self._owners.ask(route, Question(Kind.PROMOTE, ask, entries, found, where), deadline)
        return found, where

    def release(self, lease: Lease, locations: NDArray[np.uint8]) -> None:
        """Tell the owners that were asked to promote the pages at ``locations`` that they were read, or won't be.

        Waits for nothing. An owner without a free channel is told by the next one, or keeps them until the lease's end.
        """
        route = self._routes.now
        ask = _native.AskBatch.of_page_owners(locations, route.member_keys, route.table)
        for owner in ask.owners():
            self._channels.release(route.ring.members[owner], lease.number, lease.seconds)

    def touch(self, owner: int, boot: int, keys: Keys) -> int:
        """Tell the node that had this key and boot that its pages were read, those that are to stay longest first.

        Waits for nothing, and returns of how many it was told.
        """
        route = self._routes.now
        index = np.flatnonzero(route.member_keys == owner)
        if not len(index) or route.ring.members[index[0]].boot_epoch != boot:
            return 0
        return self._channels.touch(route.ring.members[index[0]], keys)

    def put(
        self,
        keys: Keys,
        locations: Locations,
        deadline: float,
        *,
        meanwhile: Callable[[], None] = do_nothing,
        sequence: int | None = None,
    ) -> NDArray[np.uint8]:
        """Store where pages lie. Returns ``(n,)`` 1 for those that at least one owner has acknowledged.

        ``sequence``, if given, was drawn before the pages were looked up: what was said of them since counts more.

        ``meanwhile`` is called once, when the owners have been asked and are not waited for yet: what it takes is
        hidden by their answers' way.
        """
        sequence = self._sequences.next() if sequence is None else sequence
        entries = _native.put_entries(keys, as_bytes(locations), sequence)
        route = self._routes.now
        ask = _native.AskBatch(keys, None, route.table)
        ask.put_own(self._shard, entries)
        self._owners.ask(route, Question(Kind.PUT, ask, entries), deadline, meanwhile)
        self._note_missed(route, keys, ask)
        return ask.answered()

    def put_beside(
        self,
        told_by: int,
        is_told: NDArray[np.uint8],
        keys: Keys,
        locations: Locations,
        deadline: float,
        *,
        sequence: int,
    ) -> NDArray[np.uint8]:
        """Do as :meth:`put` what is left of it: the member with this key has taken the entries that ``is_told``.

        Only if that is those that it owns by this view as well; else all owners are told, it included.
        """
        beside = self.beside(told_by)
        route = beside.of
        ask = _native.AskBatch(keys, None, beside.table)
        if not np.array_equal(ask.answered(), is_told):
            return self.put(keys, locations, deadline, sequence=sequence)
        if not ask.is_settled():
            question = Question(Kind.PUT, ask, _native.put_entries(keys, as_bytes(locations), sequence))
            self._owners.ask(route, question, deadline)
            self._note_missed(route, keys, ask)
        return ask.answered()

    def publish(
        self, pool: Pool, keys: Keys, pieces: Pieces, deadline: float, *, tier: _native.Tier | None = None
    ) -> Told:
        """Copy pages into the pool, as :meth:`Pool.publish` does, and put where they lie, as :meth:`put` does.

        ``tier``, if there is one, is told of them while their owners answer.
        """
        route = self._routes.now
        lines = self._owners.borrow(route, route.table.peers_of(keys))
        publishing = _native.Publishing(route.table, lines.owners, lines.channels)
        is_usable = None
        try:
            n_readable, nbytes, n_late, n_changed, is_usable = publishing.run(
                pool.native,
                keys,
                pieces,
                self._shard,
                self._sequences,
                tier,
                deadline - self._clock.monotonic(),
                None if lines.others else lines.patience,
            )
            ask = publishing.ask
            if lines.others:  # who no channel leads to is asked over the control socket
                question = Question(Kind.PUT, ask, publishing.entries())
                is_usable = self._owners.take_answers(route, question, publishing, lines, deadline)
        finally:
            self._owners.give_back(lines, is_usable)
        self._owners.account(ask)
        self._note_missed(route, keys, ask)
        is_told = ask.answered()
        if self._routes.now is not route:
            # The owners may be others now, and what was put again because it moved was not these pages: they were not
            # in the pool yet.
            is_told |= self._put_resident(pool, keys, deadline)
        may_be_gone = publishing.has_lost(pool.native)
        return Told(is_told, n_readable, nbytes, n_late, n_changed, may_be_gone)

    def _put_resident(self, pool: Pool, keys: Keys, deadline: float) -> NDArray[np.uint8]:
        """Put where those of the pages lie that are in the pool; 1 for those an owner acknowledged."""
        found, locations = pool.lookup(keys)
        there = np.flatnonzero(found)
        if len(there):
            found[there] = self.put(keys[there], locations[there], deadline)
        return found

    def _note_missed(self, route: Route, keys: Keys, ask: _native.AskBatch) -> None:
        """Have those who did not take a put given it again."""
        if missed := {*ask.silent(), *ask.passed_over()}:
            owners = route.ring.owners(keys)
            for index in missed:
                self.on_missed(route.ring.members[index].node_id, keys[(owners == index).any(axis=1)])

    def drop(self, keys: Keys, locations: Locations, deadline: float, *, by_owner: bool) -> None:
        """Delete the entries that still are the ones named; ``by_owner`` if this node published them.

        If another node did, it is told too: it knows whether the pages are gone, and if not, has them found again.
        An owner of entries that misses what their publisher says is told later.
        """
        sequence = self._sequences.next() if by_owner else 0
        entries = _native.drop_entries(keys, as_bytes(locations), sequence)
        self._shard.drop(entries)
        route = self._routes.now
        ask = _native.AskBatch(keys, None, route.table)
        if not by_owner:
            ask.add_page_owners(as_bytes(locations), route.member_keys)
        self._owners.ask(route, Question(Kind.DROP, ask, entries), deadline)
        if by_owner:
            self._note_missed(route, keys, ask)
        self._drop_at_earlier_owners(route, keys, entries, deadline, by_owner=by_owner)

    def _drop_at_earlier_owners(
        self, route: Route, keys: Keys, entries: NDArray[np.uint8], deadline: float, *, by_owner: bool
    ) -> None:
        """Have those who owned entries before the newcomers drop them too: they are asked as long as these are new."""
        before = self._routes.before(route)
        if before is None:
            return
        is_done = (~moved(before.ring, route.ring, keys)).astype(np.uint8)
        if not is_done.all():
            ask = _native.AskBatch(keys, is_done, before.table)
            self._owners.ask(before, Question(Kind.DROP, ask, entries), deadline)
            if by_owner:
                self._note_missed(before, keys, ask)  # they may own them again when others leave

    def drop_gone(self, keys: Keys, deadline: float, *, sequence: int, node_id: str | None = None) -> bool:
        """Delete this node's entries of pages that it has nowhere, wherever they say that these lie.

        ``sequence`` was drawn before the pages were looked for: what was put since stays. Tells the shards that own
        the entries, or the one of this id only, and returns whether all of them have answered.
        """
        route = self._routes.now
        if route.own_index < 0:
            return True  # who is not in the view has no entries that count
        locations = np.zeros(len(keys), LOCATION)
        locations["owner"] = self._own_key
        locations["boot"] = route.ring.members[route.own_index].boot_epoch
        locations["generation"] = ANY_GENERATION
        entries = _native.drop_entries(keys, as_bytes(locations), sequence)
        if node_id is None:
            self._shard.drop(entries)
            ask = _native.AskBatch(keys, None, route.table)
        else:
            owners = only(route, route.ring.owners(keys), node_id).max(axis=1)
            ask = _native.AskBatch.of_members(np.ascontiguousarray(owners, np.int32), route.table)
        self._owners.ask(route, Question(Kind.DROP, ask, entries), deadline)
        if node_id is None:
            self._note_missed(route, keys, ask)
            self._drop_at_earlier_owners(route, keys, entries, deadline, by_owner=True)
        return not ask.silent() and not ask.passed_over()

    @property
    def sequences(self) -> _native.Sequences:
        """What numbers this node's entries: also those of what native code stores for engines of this host."""
        return self._sequences

    def next_sequence(self) -> int:
        """Number what is looked at from now on: what is said of it under a later number counts more."""
        return self._sequences.next()

    def call_spare_holders(self, limit: int, deadline: float) -> int:
        """Have holders put their entries again for which this node's shard had no place, and has one now.

        At most ``limit`` entries; returns how many there were. A holder that is not reached finds out by itself, when
        it checks its entries.
        """
        keys, owners = self._shard.take_called(limit)
        if not len(keys):
            return 0
        route = self._routes.now
        locations = np.zeros(len(keys), LOCATION)
        # of no boot: nothing is dropped, but its owner looks whether the page is there
        locations["owner"] = owners
        entries = _native.drop_entries(keys, as_bytes(locations), 0)
        self._shard.drop(entries)
        ask = _native.AskBatch.of_page_owners(as_bytes(locations), route.member_keys, route.table)
        self._owners.ask(route, Question(Kind.DROP, ask, entries), deadline)
        return len(keys)

    def take_doubted(self, limit: int) -> Keys:
        """Take the keys of this node's pages that others have found stale, at most ``limit``."""
        return self._shard.take_doubted(limit)
