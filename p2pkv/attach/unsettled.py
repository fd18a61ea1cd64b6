"""Pages that an engine has told of by a ring which its host's node may not have gone by any more.

An engine hears of members up to a look later than its node. What it publishes in between it tells the owners of before,
while the node has gone through its pages already and put again what moved: these were not among them. So what was
published is remembered until the node was seen to have the engine's view afterwards, and when the engine takes another
view the node is named what is left, and asks the owners by its own ring.
"""

from __future__ import annotations

import threading

import numpy as np

from p2pkv.page import Keys


class Unsettled:
    """Batches of keys in the order in which they were published. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._batches: list[Keys] = []
        self._n_before = 0  # batches that are settled or taken
        self._asked = 0

    def add(self, keys: Keys) -> None:
        """Remember pages that some owner was just told of."""
        with self._lock:
            self._batches.append(keys)

    def ask(self) -> int:
        """Return a mark for :meth:`settle`, before the node is asked which view it has.

        It is behind what was there when that was asked for the time before: the node says which view it has a moment
        before or after it goes by it.
        """
        with self._lock:
            mark, self._asked = self._asked, self._n_before + len(self._batches)
            return mark

    def settle(self, mark: int) -> None:
        """Forget what was published before the mark: the node has the engine's view."""
        with self._lock:
            n = max(0, mark - self._n_before)
            del self._batches[:n]
            self._n_before += n

    def take(self) -> Keys | None:
        """Return what is left, each key once, and forget it; None if there is nothing."""
        with self._lock:
            batches, self._batches = self._batches, []
            self._n_before += len(batches)
        return np.unique(np.concatenate(batches), axis=0) if batches else None
