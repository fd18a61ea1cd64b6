"""What SGLang's own metrics show of a storage backend: pages and bandwidth of every call since it last asked."""

from __future__ import annotations

import functools
import threading
from collections import deque
from dataclasses import dataclass, field

from p2pkv.integrations.sglang.installed import find
from p2pkv.page import Outcomes

_KEPT = 1024
"""Calls, should nobody ask."""


class TrafficLog:
    """The calls of one direction; remembers nothing unless it ``is_measured``. Thread-safe."""

    def __init__(self, *, is_measured: bool) -> None:
        self._is_measured = is_measured
        self._lock = threading.Lock()  # guards _calls
        self._calls: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def add(self, outcomes: Outcomes, page_nbytes: int, seconds: float) -> None:
        """Remember a call by its hits."""
        n_pages = int(outcomes.sum())
        if self._is_measured and n_pages:
            with self._lock:
                self._calls.append((n_pages, n_pages * page_nbytes / max(seconds, 1e-9) / 1e9))

    def take(self) -> list[tuple[int, float]]:
        """Return pages and GB/s of each call, and forget them."""
        with self._lock:
            calls = list(self._calls)
            self._calls.clear()
        return calls


@dataclass
class Stats:
    """As SGLang's ``StorageMetrics``, in whose place it is where SGLang isn't installed."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


@functools.cache
def _kind() -> type[Stats]:
    """Return SGLang's own class: its scheduler asserts that it is given no other, and ends over one."""
    return find("sglang.srt.observability.metrics_collector", "StorageMetrics") or Stats


def take_stats(reads: TrafficLog, writes: TrafficLog) -> Stats:
    """Take what both have remembered."""
    read, written = reads.take(), writes.take()
    return _kind()(
        prefetch_pgs=[pages for pages, _ in read],
        backup_pgs=[pages for pages, _ in written],
        prefetch_bandwidth=[speed for _, speed in read],
        backup_bandwidth=[speed for _, speed in written],
    )
