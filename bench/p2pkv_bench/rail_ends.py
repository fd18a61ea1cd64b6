"""Both ends of cables that are cut: a node with pages, and one that fetches them over and over."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from p2pkv.config import Config
from p2pkv.node import Node
from p2pkv.testing.processes import obey

N_PAGES, PAGE_NBYTES = 64, 64 << 10
KEYS = [f"page-{i}" for i in range(N_PAGES)]
DEADLINE = 5.0
_PAUSE_S = 0.002
"""Between two batches: an engine has something else to do as well, and a small machine's cores are not all taken."""
_MEETING_S = 20.0


class RailEnd:
    """Its methods are the commands."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self._expected = np.random.default_rng(1).integers(0, 256, (N_PAGES, PAGE_NBYTES), np.uint8)
        self._memory = np.zeros_like(self._expected)
        self._batches: list[tuple[float, float, int]] = []
        self._is_over = threading.Event()
        self._loop: threading.Thread | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    def start(self, config: dict[str, Any], n_members: int) -> None:
        """Start a node in place of the one before, and wait until it sees so many members."""
        if self._node is not None:
            self._node.close()
        self._node = Node.start(Config.load(config, environ={}))
        self._node.register_memory(self._memory)
        until = time.monotonic() + _MEETING_S
        while len(self._node.members()) < n_members and time.monotonic() < until:
            time.sleep(0.01)

    def publish(self) -> int:
        """Publish all pages; returns how many found room."""
        self._memory[:] = self._expected
        return int(self.node.publish(KEYS, self._memory).sum())

    def fetch_once(self) -> float:
        """Fetch all pages; returns how many were missed or wrong."""
        return self._fetch()[2]

    def _fetch(self) -> tuple[float, float, int]:
        self._memory[:] = 0
        began = time.monotonic()
        outcomes = self.node.fetch(KEYS, self._memory, timeout=DEADLINE)
        ended = time.monotonic()
        is_right = (self._memory == self._expected).all(axis=1)
        return began, ended, int(N_PAGES - (is_right & (outcomes == 1)).sum())

    def begin(self) -> None:
        """Fetch all pages over and over until :meth:`end`."""
        self._batches = []
        self._is_over.clear()

        def run() -> None:
            while not self._is_over.is_set():
                self._batches.append(self._fetch())
                time.sleep(_PAUSE_S)

        self._loop = threading.Thread(target=run, name="p2pkv-bench-rails")
        self._loop.start()

    def end(self) -> list[tuple[float, float, int]]:
        """Return when each batch since :meth:`begin` began and ended, of the monotonic clock, and what it missed."""
        self._is_over.set()
        if self._loop is not None:
            self._loop.join()
        return self._batches

    def rails(self) -> dict[str, float]:
        """Return the node's counters of rails, and of ways to peers that it gave up."""
        counters = self.node.counters()
        return {name: n for name, n in counters.items() if "_rail_" in name or "fallbacks" in name}

    def close(self) -> None:
        self.end()
        if self._node is not None:
            self._node.close()


def main() -> None:
    """Do what stdin says until it ends."""
    end = RailEnd()
    obey(end)
    end.close()


if __name__ == "__main__":
    main()
