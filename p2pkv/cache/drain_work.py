"""The pages that a drain is still to hand over, in the order of their use, and who of several takes which."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from p2pkv.page import KEY_BYTES

USE = np.dtype([("key", "u1", KEY_BYTES), ("stamp", "<u8"), ("nbytes", "<u8")])
"""The pool lists this of a page, and a drain remembers no more of each than these 32 bytes; it counts their blocks."""
LISTED = 1024
"""Pages that the pool lists at a time."""
_BATCH = 64
"""Pages that a node is asked to take over at a time, and has under way: as many as it brings at once."""
_BATCH_NBYTES = 8 << 20
"""Likewise; more if a single page is longer."""
_MOST_PASSED = 1 << 16
"""So many pages that one node has no room for are passed over in search of some that it has; a guess."""


class Work:
    """The pages that are still to be handed over, those used last first. Thread-safe."""

    def __init__(self, uses: NDArray[np.void]) -> None:
        self._changed = threading.Condition()  # its lock guards all below
        self._left: deque[NDArray[np.void]] = deque([uses] if len(uses) else [])
        self._n_taken = 0  # how many batches were taken and are not settled

    @property
    def has_some(self) -> bool:
        """Whether there are pages that nobody has under way."""
        with self._changed:
            return bool(self._left)

    def take(self, room: int, longest: int, until: float) -> NDArray[np.void]:
        """Return the next few, of ``room`` bytes at most and each of at most ``longest``; none if there are none.

        What is longer stays for those who have room for it. While nothing is left and others have some under way it
        waits for what these give back. What it returns is to be settled.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._left or self._n_taken == 0, max(0.0, until - time.monotonic())
            )
            chosen = self._choose(room, min(room, longest))
            self._n_taken += len(chosen) > 0
            return chosen

    def _choose(self, room: int, longest: int) -> NDArray[np.void]:
        """Take them out, with the lock; those in front of them that are too long stay in front."""
        passed: list[NDArray[np.void]] = []
        chosen = np.zeros(0, USE)
        while self._left and not len(chosen) and sum(map(len, passed)) < _MOST_PASSED:
            uses = self._left.popleft()
            nbytes = uses["nbytes"][:LISTED]
            fit = np.flatnonzero(nbytes <= longest)[:_BATCH]
            has_room = np.cumsum(nbytes[fit]) <= min(room, _BATCH_NBYTES)
            has_room[:1] = True
            fit = fit[has_room]
            n = int(fit[-1]) + 1 if len(fit) else len(nbytes)
            chosen = uses[fit]
            passed.append(np.delete(uses[:n], fit))
            if n < len(uses):
                self._left.appendleft(uses[n:])
        if any(map(len, passed)):
            self._left.appendleft(np.concatenate(passed))
        return chosen

    def add(self, uses: NDArray[np.void]) -> None:
        """Have these handed over before the rest."""
        if len(uses):
            with self._changed:
                self._left.appendleft(uses)

    def settle(self, given_back: NDArray[np.void]) -> None:
        """Say that pages which were taken are done, but for those that others may have."""
        with self._changed:
            if len(given_back):
                self._left.appendleft(given_back)
            self._n_taken -= 1
            self._changed.notify_all()
