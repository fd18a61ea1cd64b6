"""Pages that an engine has told of by a ring which its host's node may not have gone by any more.

An engine hears of members up to a look later than its node. What it publishes in between it tells the owners of before,
while the node has gone through its pages already and put again what moved: these were not among them. So what was
published is remembered until the node was seen to have the engine's view afterwards, and when the engine takes another
view the node is named what is left, and asks the owners by its own ring.

Nobody says whether the node has heard of what it was named. So it is named everything twice, at two looks, and nothing
is forgotten while there is no node to name it to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from p2pkv.page import Keys

MOST_KEYS = 1 << 16
"""So many are remembered, and then the oldest go: the node's shard takes no more of them to see to, either."""
_TELL_S = 0.05
"""So long naming pages to the node may take, whose native thread answers at once."""
_TIMES = 2
"""So often the node is named each page."""


class Node(Protocol):
    """Sees to pages that are named to it: ``_native.Attachment``."""

    def tell_missed(self, keys: Keys, timeout: float) -> None: ...


class Unsettled:
    """Batches of keys in the order in which they were published. Thread-safe."""

    def __init__(self) -> None:
        self.node: Callable[[], Node | None] = lambda: None
        """Returns the host's node; None while it is away."""
        self._lock = threading.Lock()  # guards what follows
        self._batches: deque[Keys] = deque()
        self._n_before = 0  # batches that are settled, due or dropped
        self._asked = 0
        self._due: deque[tuple[Keys, int]] = deque()  # and how often the node is to be named each
        self._n_keys = 0  # of all of these

    def add(self, keys: Keys) -> None:
        """Remember pages that some owner was just told of."""
        if not len(keys):
            return
        keys = keys[-MOST_KEYS:]
        with self._lock:
            self._batches.append(keys)
            self._n_keys += len(keys)
            while self._n_keys > MOST_KEYS:
                if self._due:
                    self._n_keys -= len(self._due.popleft()[0])
                else:
                    self._forget_first()

    def ask(self) -> int:
        """Return a mark for :meth:`settle`, before the node is asked which view it has.

        It is behind what was there when that was asked for the time before: the node says which view it has a moment
        before or after it goes by it.
        """
        with self._lock:
            mark, self._asked = self._asked, self._n_before + len(self._batches)
            return mark

    def settle(self, mark: int) -> None:
        """Forget what was published before the mark, but for what is due: the node has the engine's view."""
        with self._lock:
            while self._n_before < mark:
                self._forget_first()

    def call_due(self) -> None:
        """Have the node named all that is left: the engine goes by another view."""
        with self._lock:
            self._due.extend((keys, _TIMES) for keys in self._batches)
            self._n_before += len(self._batches)
            self._batches.clear()

    def tell_due(self, seconds: float = _TELL_S) -> None:
        """Name the node what is due, if it is there and there is time; else the next look does, which calls this."""
        node, seconds = self.node(), min(_TELL_S, seconds)
        if node is not None and seconds > 0 and (keys := self.take_due()) is not None:
            node.tell_missed(keys, seconds)

    def take_due(self) -> Keys | None:
        """Return what the node is to be named now, each key once; None if that is nothing.

        To be called only where there is a node to name it to. What it was named often enough is forgotten.
        """
        with self._lock:
            due = [keys for keys, _ in self._due]
            self._due = deque((keys, times - 1) for keys, times in self._due if times > 1)
            self._n_keys = sum(map(len, self._batches)) + sum(len(keys) for keys, _ in self._due)
        return np.unique(np.concatenate(due), axis=0) if due else None

    def _forget_first(self) -> None:  # with the lock
        self._n_keys -= len(self._batches.popleft())
        self._n_before += 1
