"""What was read from each peer, in a number of series that does not grow with the cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

_MOST_PEERS = 32
_PEERS_REMEMBERED = 4096
"""Beyond it who was gone longest is taken for new if it comes back with what it had; a guess, never met."""


class Traffic(Protocol):
    """What was read from one peer over one transport."""

    node_id: str
    transport: str
    n_pages: int
    nbytes: int


class BoundedPeers:
    """Gives the first peers a series of their own for good, and the others one together. Thread-safe.

    Its counters never shrink, though a peer that comes back begins at nothing.
    """

    def __init__(self, traffic: Callable[[], Iterable[Traffic]]) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()  # guards all below
        self._named: set[str] = set()
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        self._pages: dict[tuple[str, ...], float] = {}
        self._bytes: dict[tuple[str, ...], float] = {}

    def read(self) -> Mapping[str, Mapping[tuple[str, ...], float]]:
        """Return what was read from peers so far, those who are gone included."""
        with self._lock:
            for peer in self._traffic():
                self._add(peer)
            while len(self._last) > _PEERS_REMEMBERED:
                del self._last[next(iter(self._last))]
            return {
                "p2pkv_peer_read_pages_total": dict(self._pages),
                "p2pkv_peer_read_bytes_total": dict(self._bytes),
            }

    def _add(self, peer: Traffic) -> None:
        if len(self._named) < _MOST_PEERS:
            self._named.add(peer.node_id)
        before = self._last.pop((peer.node_id, peer.transport), (0, 0))
        if peer.n_pages < before[0]:
            before = (0, 0)
        self._last[peer.node_id, peer.transport] = (peer.n_pages, peer.nbytes)
        labels = (peer.node_id if peer.node_id in self._named else "others", peer.transport)
        self._pages[labels] = self._pages.get(labels, 0) + peer.n_pages - before[0]
        self._bytes[labels] = self._bytes.get(labels, 0) + peer.nbytes - before[1]
