"""What became of the pages of a prefetch, as its caller sees it while they are brought."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from p2pkv.lifetime import Origin
from p2pkv.page import Keys

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TIMEOUT_S = 3600.0


class PrefetchOutcome(IntEnum):
    """What became of one page of a prefetch."""

    PENDING = 0
    """It is not its turn yet."""
    PRESENT = 1
    """It was in this node's pool already."""
    BROUGHT = 2
    """It is in this node's pool now."""
    NOT_FOUND = 3
    """No live node has it."""
    NOT_OWNED = 4
    """Who was said to have it has it no more, or holds it as a guest himself."""
    NOT_READ = 5
    """It could not be read: it was evicted meanwhile, its owner is lost or too old, or the disk did not bring it."""
    NO_ROOM = 6
    """The pool has no room, or this prefetch has had its share of it."""
    TAKEN_BACK = 7
    """It was taken back, or the namespace was bumped, while it was read."""
    TIMED_OUT = 8
    """The time of the prefetch was over before its turn."""
    CANCELED = 9
    """The prefetch or the node was closed before its turn."""
    REFUSED = 10
    """Too many pages wait to be brought already, or there is no thread to bring them with."""


Settled = Callable[[PrefetchOutcome, int], None]
"""Counts so many pages of an outcome."""
Stored = Callable[[int], None]
"""Counts so many bytes of pages that were brought."""


@dataclass(frozen=True, slots=True)
class Counting:
    """What counts the pages of a prefetch."""

    settled: Settled
    stored: Stored


class Prefetch:
    """Pages on their way into a node's pool, front first. Thread-safe.

    Usable in a ``with`` statement, whose end closes it.
    """

    def __init__(
        self,
        ids: Keys,
        epoch: int,
        deadline: float,
        room: int,
        counting: Counting,
        located: NDArray[np.uint8] | None = None,
        is_asked_for: bool = True,
    ) -> None:
        self.ids, self.epoch, self.deadline = ids, epoch, deadline
        self.room = room
        """Bytes of blocks that it may still fill; counted by the thread that brings the pages."""
        self.located = located
        """``(n, 64)``: where the pages are said to lie; None: the directory is asked."""
        self.is_asked_for = is_asked_for
        """Whether somebody asked for the pages, and did not only read them often."""
        self.sources = np.zeros(len(ids), np.uint64)
        """Whose guests the pages are that were brought, by node key; written by the thread that brings them."""
        self._counting = counting
        self._origin = Origin()
        # Guards what follows; reentrant, since a signal's handler may close it wherever a thread is.
        self._lock = threading.RLock()
        self._outcomes = np.zeros(len(ids), np.uint8)
        self._next = 0
        self._n_pending = len(ids)
        self._is_done = threading.Event()

    @property
    def outcomes(self) -> NDArray[np.uint8]:
        """``(n,)`` uint8 of :class:`PrefetchOutcome`, one a page, as they are by now."""
        with self._lock:
            outcomes: NDArray[np.uint8] = self._outcomes.copy()
        return outcomes

    def done(self) -> bool:
        """Whether every page has its outcome."""
        return self._is_done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until every page has its outcome, for ``timeout`` seconds at most; return whether that is so."""
        # what is longer, as math.inf, is an OverflowError to a lock
        return self._is_done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """Bring no more pages. Does not wait for those that are being read, and takes none back. Idempotent.

        In a forked child it does nothing: there it is the parent's.
        """
        if self._origin.is_here:
            self.settle_rest(PrefetchOutcome.CANCELED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- for the thread that brings them

    @property
    def is_refused(self) -> bool:
        """Whether too many pages waited already, so that none of these is brought."""
        return bool((self.outcomes == PrefetchOutcome.REFUSED).any())

    @property
    def is_taken(self) -> bool:
        """Whether no rows are left to take."""
        with self._lock:
            return self._next == len(self.ids)

    def take(self, n: int) -> NDArray[np.int64]:
        """Return the next rows, ``n`` at most; none when there are none left."""
        with self._lock:
            first, self._next = self._next, min(self._next + n, len(self.ids))
            return np.arange(first, self._next)

    def settle(self, rows: NDArray[np.int64], outcome: PrefetchOutcome) -> None:
        """Say what became of pages that were taken, as far as nothing was said of them yet."""
        with self._lock:
            is_open = self._outcomes[rows] == PrefetchOutcome.PENDING
            self._outcomes[rows[is_open]] = outcome
            n = int(np.count_nonzero(is_open))
            self._n_pending -= n
            is_done = self._n_pending == 0
        self._counting.settled(outcome, n)
        if is_done:
            self._is_done.set()

    def note_stored(self, rows: NDArray[np.int64], sources: NDArray[np.uint64], nbytes: int) -> None:
        """Take note of pages that are in the pool now, as guests of these nodes; they are settled afterwards."""
        self.sources[rows] = sources
        self._counting.stored(nbytes)

    def settle_rest(self, outcome: PrefetchOutcome) -> None:
        """Say what becomes of all pages that were not taken."""
        self.settle(self.take(len(self.ids)), outcome)
