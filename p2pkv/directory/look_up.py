"""One look-up in the directory: who is asked where pages lie, and who is asked after these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pkv import _native
from p2pkv.control.wire import Kind
from p2pkv.directory.asking import Owners, Question
from p2pkv.directory.ring import moved
from p2pkv.directory.routes import Route
from p2pkv.metrics import Metrics
from p2pkv.page import Keys


@dataclass(slots=True)  # not frozen: that triples the time it takes to make one
class LookUp:
    """What one call wants to know and has been told so far; answers fill ``found`` and ``locations``."""

    owners: Owners
    metrics: Metrics
    keys: Keys
    found: NDArray[np.uint8]
    """``(n,)``: 1 for those that an owner knows."""
    locations: NDArray[np.uint8]
    """``(n, 64)``: raw, where they are found."""
    others: _native.OtherHolders | None
    """What takes the holders that are named beside the first; None: one is asked for."""
    deadline: float

    def ask_in_turn(self, route: Route, is_done: NDArray[np.uint8]) -> None:
        """Ask the owners of what is not done yet, one after the other.

        Those who are suspected are asked where no other owner answers: one that stood still a moment ago may be one of
        them, and the only one that knows.
        """
        ask: _native.AskBatch | None = _native.AskBatch(self.keys, is_done, route.table, in_turn=True)
        while ask is not None:
            question = Question(Kind.GET, ask, self.keys, self.found, self.locations, self.others)
            self.owners.ask(route, question, self.deadline)
            ask = ask.of_doubted(self.keys)

    def ask_earlier_owners(self, route: Route, before: Route | None) -> None:
        """Look up what was not found and has a newcomer for an owner where it lay before; None: there are none now."""
        if before is None or self.found.all():
            return
        is_moved = moved(before.ring, route.ring, self.keys)
        is_done = (self.found.astype(bool) | ~is_moved).astype(np.uint8)
        if is_done.all():
            return
        n_asked = len(self.keys) - int(is_done.sum())
        self.metrics.count(self.metrics.looked_up_pages, "earlier_owners", n_asked)
        self.ask_in_turn(before, is_done)
