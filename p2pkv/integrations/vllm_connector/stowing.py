"""Where the blocks of a hand-off lie once decode has not taken them for a while: in the buddy pool.

Prefill has its blocks back then, however long decode takes: it may be slow, stopped, or dead. A decode rank that takes
parts of blocks gets them from the copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2pkv.errors import UsageError
from p2pkv.transfers import Stowed


class Copies:
    """Rows of blocks, and the copies of them; the room of these is free when this is gone. Not thread-safe."""

    def __init__(self) -> None:
        """Start without any."""
        self._stowed: list[Stowed] = []
        # by address, behind an empty one that lies before all others
        self._rows = np.zeros((1, 2), np.int64)
        self._places = np.zeros(1, np.int64)

    def add(self, rows: NDArray[np.int64], stowed: Stowed) -> None:
        """Take the copies of some rows; ``rows`` is ``(n, 2)``: address and bytes of each, which overlap no others."""
        self._stowed.append(stowed)
        is_copied = stowed.spans[:, 1] > 0
        all_rows = np.concatenate([self._rows, rows[is_copied]])
        places = np.concatenate([self._places, stowed.spans[is_copied, 0]])
        order = np.argsort(all_rows[:, 0])
        self._rows, self._places = all_rows[order], places[order]

    def of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the copies of ``rows`` lie, each of which is a part of one that was added.

        Raises UsageError for one that is not.
        """
        at = np.searchsorted(self._rows[:, 0], rows[:, 0], side="right") - 1
        skipped = rows[:, 0] - self._rows[at, 0]
        if (skipped + rows[:, 1] > self._rows[at, 1]).any():
            raise UsageError("somebody had taken some of its blocks before the others were copied")
        return np.stack([self._places[at] + skipped, rows[:, 1]], axis=1)
