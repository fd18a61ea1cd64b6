"""One look-up in the directory: who is asked where pages lie, and who is asked after these.

The keys of a prompt's pages are hashes, so that their entries lie all over the ring: in a large cluster everybody would
be asked for two keys. But whoever computed a prompt has most of its pages. So the owners are asked for the first page
alone, and the nodes that have it are asked for all: two nodes instead of 63 where one has (:meth:`LookUp.ask_holders`).
What these have not, and everything in a small cluster, is asked of the owners (:meth:`LookUp.ask_owners`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.wire import Kind
from p2pkv.directory import asking
from p2pkv.directory.asking import Owners, Question
from p2pkv.directory.membership.timing import Clock
from p2pkv.directory.ring import moved
from p2pkv.directory.routes import Route
from p2pkv.metrics import Metrics
from p2pkv.page import LOCATION, RESIDENT, Keys, as_locations

FEW = 8
"""So many members are asked at once without more ado, and for no more pages than that no holder is looked for."""
_MOST_TURNS = 3
"""So often holders are asked for what is left: behind what many have comes a conversation, and its later turns may be
another node's."""

_SHARE = 0.25
"""What of the time left is waited for one member."""


@dataclass(slots=True)  # not frozen: that triples the time it takes to make one
class LookUp:
    """What one call wants to know and has been told so far; answers fill ``found`` and ``locations``."""

    owners: Owners
    metrics: Metrics
    clock: Clock
    keys: Keys
    found: NDArray[np.uint8]
    """``(n,)``: 1 for those that an owner knows, or a holder has."""
    locations: NDArray[np.uint8]
    """``(n, 64)``: raw, where they are found."""
    others: _native.OtherHolders | None
    """What takes the holders that are named beside the first; None: one is asked for."""
    deadline: float
    few: int = FEW

    def ask_holders(self, route: Route, before: Route | None, *, leading: bool) -> bool:
        """Ask the owners for the first page that is not found, and who has it for all after it, and so on.

        Returns whether that is all that is worth asking: with ``leading`` it is, once nobody has the page that comes
        next. Who does not answer soon costs ``SILENT_OWNER_S``, or a quarter of a short call, and proves nothing. Does
        nothing in a small cluster, and stops where pages lie scattered, as those of ranks that are nodes of their own.
        """
        if len(route.ring.seated) <= self.few:
            return False
        asked: set[int] = set()
        for _ in range(_MOST_TURNS):
            rows = np.flatnonzero(self.found == 0)
            if len(rows) <= self.few:
                return False
            is_known = self._ask_for_one(route, before, rows[0])
            if not self.found[rows[0]]:
                return leading and is_known
            holders = self._holders(route, rows[0])
            if asked.issuperset(holders) or not self._ask_all_holders(route, holders, rows):
                return False
            asked.update(holders)
        return False

    def ask_owners(self, route: Route, before: Route | None) -> None:
        """Ask the owners of what is not found yet, and where newcomers are among them, who owned it before."""
        is_done = self.found.copy()
        self._ask_in_turn(route, is_done, self.deadline)
        self._ask_earlier_owners(route, before, is_done, self.deadline)

    def _ask_for_one(self, route: Route, before: Route | None, row: np.intp) -> bool:
        """Ask the owners of one page; whether all that were asked have answered."""
        is_done = np.ones(len(self.keys), np.uint8)
        is_done[row] = 0
        until = self._soon()
        is_heard = self._ask_in_turn(route, is_done, until)
        return self._ask_earlier_owners(route, before, is_done, until) and is_heard

    def _soon(self) -> float:
        """Return until when one member is waited for: most of a short call is left for all the others."""
        now = self.clock.monotonic()
        return now + min(asking.SILENT_OWNER_S, (self.deadline - now) * _SHARE)

    def _holders(self, route: Route, row: np.intp) -> dict[int, bool]:
        """Return the numbers of the members that have the page as its owners named them, and whether in memory."""
        named = self.locations[row : row + 1]
        if self.others is not None:
            named = np.concatenate([named, self.others.of(self.keys[row : row + 1])])
        said = as_locations(named)
        of_owners = said["owner"][:, None] == route.member_keys
        is_member = of_owners.any(axis=1) & (of_owners.argmax(axis=1) != route.own_index)
        in_memory = said["flags"] & RESIDENT != 0
        return {int(of_owners[each].argmax()): bool(in_memory[each]) for each in np.flatnonzero(is_member)}

    def _ask_all_holders(self, route: Route, holders: dict[int, bool], rows: NDArray[np.intp]) -> bool:
        """Ask members at once which of these pages they have; whether that is those up to some page, and none after it.

        The first page is one that they were named for. Where several were, and one has it in memory as another node's
        guest, it says nothing of such pages, which are read often: then nothing that they said counts, and the owners,
        who name all holders, are to be asked.
        """
        n_holders, n_rows = len(holders), len(rows)
        keys = np.tile(self.keys[rows], (n_holders, 1))
        found = np.zeros(len(keys), np.uint8)
        where = np.zeros((len(keys), LOCATION.itemsize), np.uint8)
        ask = _native.AskBatch.of_members(np.repeat(np.array(list(holders), np.int32), n_rows), route.table)
        n_asked = sum(n for _, n in ask.asks())  # of who is suspected nothing is asked
        self.metrics.count(self.metrics.looked_up_pages, "holders", n_asked)
        self.owners.ask(route, Question(Kind.HELD, ask, keys, found, where), self._soon())
        # Each speaks for itself alone, as the view knows it: where others' pages lie, and its own of another boot, the
        # directory says.
        members = [route.ring.members[each] for each in holders]
        said = as_locations(where).reshape(n_holders, n_rows)
        is_own = said["owner"] == np.array([each.key for each in members], np.uint64)[:, None]
        is_own &= said["boot"] == np.array([each.boot_epoch for each in members], np.uint64)[:, None]
        has = found.reshape(n_holders, n_rows).astype(bool) & is_own
        is_heard = ask.answered().reshape(n_holders, n_rows).astype(bool)
        if n_holders > 1 and (is_heard & ~has)[list(holders.values()), 0].any():
            return False
        self._take(rows[1:], has[:, 1:], where.reshape(n_holders, n_rows, -1)[:, 1:])
        is_there = has.any(axis=0)[1:]
        n_leading = len(is_there) if is_there.all() else int(np.argmin(is_there))
        return n_leading > 0 and not is_there[n_leading:].any()

    def _take(self, rows: NDArray[np.intp], has: NDArray[np.bool], where: NDArray[np.uint8]) -> None:
        """Take in which of the pages each holder ``has``, ``(k, n)``, and where, ``(k, n, 64)``.

        That is the first one that has it in memory, or else on disk, and beside it all others that have it in memory.
        """
        in_memory = has & (as_locations(where)["flags"].reshape(has.shape) & RESIDENT != 0)
        is_there, first = has.any(axis=0), (has.astype(np.uint8) + in_memory).argmax(axis=0)
        there = np.flatnonzero(is_there)
        self.found[rows[there]] = 1
        self.locations[rows[there]] = where[first[there], there]
        if self.others is not None:
            beside = in_memory.T[there].copy()
            beside[np.arange(len(there)), first[there]] = False
            of_others = where.transpose(1, 0, 2)[there][beside]
            self.others.put(self.keys[rows[there]], of_others, beside.sum(axis=1, dtype=np.uint8))

    def _ask_in_turn(self, route: Route, is_done: NDArray[np.uint8], deadline: float) -> bool:
        """Ask the owners of what is not done yet, one after the other; whether all that were asked have answered.

        Those who are suspected are asked where no other owner answers: one that stood still a moment ago may be one of
        them, and the only one that knows.
        """
        ask: _native.AskBatch | None = _native.AskBatch(self.keys, is_done, route.table, in_turn=True)
        is_answered, is_anybody_silent = is_done.astype(bool), False
        while ask is not None:
            question = Question(Kind.GET, ask, self.keys, self.found, self.locations, self.others)
            self.owners.ask(route, question, deadline)
            is_answered |= ask.answered().astype(bool)
            is_anybody_silent |= bool(ask.silent())
            ask = ask.of_doubted(self.keys)
        return bool(is_answered.all()) and not is_anybody_silent

    def _ask_earlier_owners(
        self, route: Route, before: Route | None, is_done: NDArray[np.uint8], deadline: float
    ) -> bool:
        """Ask for what is not done, was not found and has a newcomer for an owner where it lay before.

        ``before`` is the route of then; None: there are no newcomers now. Returns whether there was nobody to ask, or
        all have answered. With no time left nobody is asked, who would count as silent.
        """
        if before is None or self.found.all():
            return True
        is_moved = moved(before.ring, route.ring, self.keys)
        is_done = (is_done.astype(bool) | self.found.astype(bool) | ~is_moved).astype(np.uint8)
        if is_done.all():
            return True
        if self.clock.monotonic() >= deadline:
            return False
        n_asked = len(self.keys) - int(is_done.sum())
        self.metrics.count(self.metrics.looked_up_pages, "earlier_owners", n_asked)
        return self._ask_in_turn(before, is_done, deadline)
