"""Flat pages: tensors anywhere in memory, one a page, that pass through a registered buffer on their way.

This is for SGLang's interface without ``interface_v1``; the other one reads and writes its host pool in place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from p2pkv import _native
from p2pkv.integrations.ranges import Range
from p2pkv.memory.registered import Memory
from p2pkv.node import Node
from p2pkv.page import Outcome, Outcomes, Pieces

_STAGED_BYTES = 8 << 20
"""Of pages at a time: enough to use the network well, little to hold for an interface that is on its way out."""


class Staging:
    """One batch at a time, so have one for each direction. The node closes the buffer's registration."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.Lock()  # guards the buffer and its content
        self._buffer = np.empty(0, np.uint8)
        self._memory: Memory | None = None

    def publish(self, keys: Sequence[str], values: Sequence[Range]) -> Outcomes:
        """Publish ``values[i]`` under ``keys[i]``."""

        def chunk(first: int, pieces: Pieces, timeout: float) -> Outcomes:
            buffer = pieces.array[:, 0]
            last = first + len(buffer)
            outside = np.array([value.address for value in values[first:last]], np.int64)
            _native.copy_pieces(np.column_stack([buffer[:, 0], outside, buffer[:, 1]]))
            return self._node.publish(keys[first:last], pieces, timeout=timeout)

        return self._in_chunks(values, chunk)

    def fetch(self, keys: Sequence[str], targets: Sequence[Range]) -> Outcomes:
        """Fetch ``keys[i]`` into ``targets[i]``, which is only touched by a hit."""

        def chunk(first: int, pieces: Pieces, timeout: float) -> Outcomes:
            buffer = pieces.array[:, 0]
            outcomes = self._node.fetch(keys[first : first + len(buffer)], pieces, timeout=timeout)
            hits = np.flatnonzero(outcomes == Outcome.HIT)
            outside = np.array([targets[first + i].address for i in hits.tolist()], np.int64)
            _native.copy_pieces(np.column_stack([outside, buffer[hits]]))
            return outcomes

        return self._in_chunks(targets, chunk)

    def _in_chunks(self, pages: Sequence[Range], work: Callable[[int, Pieces, float], Outcomes]) -> Outcomes:
        """Call ``work`` with as many pages at a time as fit; what is not reached by the deadline is a miss."""
        outcomes = np.zeros(len(pages), np.uint8)
        deadline = time.monotonic() + self._node.config.deadline
        row = max(page.nbytes for page in pages)
        n_rows = max(1, _STAGED_BYTES // max(row, 1))
        if not self._lock.acquire(timeout=self._node.config.deadline):
            return outcomes
        try:
            self._make_room(max(row, _STAGED_BYTES))
            for first in range(0, len(pages), n_rows):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                some = pages[first : first + n_rows]
                pieces = np.empty((len(some), 1, 2), np.int64)
                pieces[:, 0, 0] = self._buffer.ctypes.data + np.arange(len(some)) * row
                pieces[:, 0, 1] = [page.nbytes for page in some]
                outcomes[first : first + len(some)] = work(first, Pieces(pieces), left)
        finally:
            self._lock.release()
        return outcomes

    def _make_room(self, nbytes: int) -> None:
        if self._buffer.nbytes >= nbytes:
            return
        if self._memory is not None:
            self._memory.close()
        self._buffer = np.empty(nbytes, np.uint8)
        self._memory = self._node.register_memory(self._buffer)
