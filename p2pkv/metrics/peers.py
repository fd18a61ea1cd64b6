"""What was read from each peer, in a number of series that does not grow with the cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

_MOST_PEERS = 32
_PEERS_REMEMBERED = 4096
"""Beyond it who was gone longest is taken for new if it comes back with what it had; a guess, never met."""

_Amount = tuple[float, ...]
_NAMES = (
    "p2pkv_peer_read_pages_total",
    "p2pkv_peer_read_bytes_total",
    "p2pkv_peer_read_seconds_total",
    "p2pkv_peer_late_reads_total",
)
_NOTHING: _Amount = (0, 0, 0, 0)


class Traffic(Protocol):
    """What was read from one peer over one transport."""

    node_id: str
    transport: str
    n_pages: int
    nbytes: int
    seconds: float
    n_late: int


class BoundedPeers:
    """Gives the first peers a series of their own for good, and the others one together. Thread-safe.

    Its counters never shrink, though a peer that comes back begins at nothing.
    """

    def __init__(self, traffic: Callable[[], Iterable[Traffic]]) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()  # guards all below
        self._named: set[str] = set()
        self._last: dict[tuple[str, str], _Amount] = {}
        self._sums: dict[tuple[str, ...], _Amount] = {}

    def read(self) -> Mapping[str, Mapping[tuple[str, ...], float]]:
        """Return what was read from peers so far, those who are gone included."""
        with self._lock:
            for peer in self._traffic():
                self._add(peer)
            while len(self._last) > _PEERS_REMEMBERED:
                del self._last[next(iter(self._last))]
            return {
                name: {labels: amount[place] for labels, amount in self._sums.items()}
                for place, name in enumerate(_NAMES)
            }

    def _add(self, peer: Traffic) -> None:
        if len(self._named) < _MOST_PEERS:
            self._named.add(peer.node_id)
        now = (peer.n_pages, peer.nbytes, peer.seconds, peer.n_late)
        before = self._last.pop((peer.node_id, peer.transport), _NOTHING)
        if now[0] < before[0] or now[2] < before[2]:
            before = _NOTHING
        self._last[peer.node_id, peer.transport] = now
        labels = (peer.node_id if peer.node_id in self._named else "others", peer.transport)
        known = self._sums.get(labels, _NOTHING)
        self._sums[labels] = tuple(a + b - c for a, b, c in zip(known, now, before, strict=True))
