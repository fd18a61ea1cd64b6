"""One node that reads the same pages of another over and over."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pkv.node import Node
from p2pkv_bench.errors import BenchError
from p2pkv_bench.working_set import checksums

_SOURCES = 'p2pkv_fetched_bytes_total{source="'


class Reads:
    """Pages that are brought batch by batch, in order, to memory of their own."""

    def __init__(self, node: Node, keys: list[str], pages: NDArray[np.uint8]) -> None:
        """``pages`` are what must come."""
        self._node = node
        self._keys = keys
        self._rows = np.ones_like(pages)
        self._memory = node.register_memory(self._rows)
        self._sums = checksums(pages)
        self._next = 0

    def run(self, seconds: float, batch: int, *, may_miss: bool = False) -> dict[str, Any]:
        """Read for so long; return the bytes, those from others, whom they are from, and the seconds of each call.

        And how many pages were missed, which is an error but where ``may_miss``.
        """
        before, by_peer = self._from_others(), self._by_peer()
        calls, n_pages = [], 0
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            part = slice(self._next, self._next + batch)
            n_pages += int(self._node.fetch(self._keys[part], self._rows[part]).sum())
            calls.append(time.perf_counter() - began)
            self._next = part.stop if part.stop < len(self._keys) else 0
        n_missed = len(calls) * batch - n_pages
        if n_missed and not may_miss:
            raise BenchError(f"{n_missed} pages that are there were not fetched")
        n_seen = min(len(self._keys), len(calls) * batch)
        is_right = checksums(self._rows) == self._sums
        if np.count_nonzero(is_right) < n_seen:
            raise BenchError("a page has other bytes than were published")
        nbytes = n_pages * self._rows.shape[1]
        return {
            "nbytes": nbytes,
            "from_others": self._from_others() - before,
            "by_peer": dict(self._by_peer() - by_peer),
            "calls": calls,
            "n_missed": n_missed,
        }

    def _by_peer(self) -> Counter[str]:
        read: Counter[str] = Counter()
        for peer in self._node.peers():
            read[peer.node_id] += peer.nbytes
        return read

    def _from_others(self) -> float:
        counted = self._node.counters()
        own = (f'{_SOURCES}own_pool"}}', f'{_SOURCES}disk"}}')
        return sum(value for name, value in counted.items() if name.startswith(_SOURCES) and name not in own)
