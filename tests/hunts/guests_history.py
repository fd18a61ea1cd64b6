"""What was published, taken back and bumped in a schedule of the hunt `guests`, and what may be found after that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

PAGE = 4096
N_KEYS = 120


@dataclass
class Version:
    """One content of a key: who has published it and not taken it back yet, and since when nobody has."""

    number: int
    made: float
    publishers: set[str] = field(default_factory=set)
    taken_back: float = float("inf")
    is_doubtful: bool = False  # somebody did not hear of a retraction in time


@dataclass(frozen=True)
class Bumped:
    """A bump that has returned."""

    began: float
    returned: float
    heard: frozenset[str]


class History:
    """What was published, taken back and bumped. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.versions: dict[int, list[Version]] = {key: [] for key in range(N_KEYS)}
        self.bumps: list[Bumped] = []
        self.last_bump = 0.0  # when it began: what is made from then on may be published after it

    def publish(self, keys: list[int], node_id: str) -> np.ndarray:
        """Return pages of the version that counts, or of a new one where that is over; the node is one of its own."""
        pages = np.empty((len(keys), PAGE // 8), np.float64)
        with self.lock:
            for row, key in enumerate(keys):
                versions = self.versions[key]
                if not versions or not versions[-1].publishers or versions[-1].made < self.last_bump:
                    versions.append(Version(len(versions), time.monotonic()))
                versions[-1].publishers.add(node_id)
                pages[row, 0::4], pages[row, 1::4] = key, versions[-1].number
                pages[row, 2::4], pages[row, 3::4] = versions[-1].made, -key
        return pages.view(np.uint8)

    def take_back(self, keys: list[int] | None, node_id: str, *, is_doubtful: bool) -> None:
        """Note that a retraction, or a clear, has returned."""
        with self.lock:
            for key in range(N_KEYS) if keys is None else keys:
                for version in self.versions[key]:
                    if node_id not in version.publishers:
                        continue
                    version.is_doubtful |= is_doubtful
                    version.publishers.discard(node_id)
                    if not version.publishers:
                        version.taken_back = time.monotonic()

    def adopt(self, key: int, leaver: str, node_ids: Iterable[str]) -> None:
        """Note that pages of a node that has let go of them may be others' own: they go when these take them back."""
        with self.lock:
            for version in self.versions[key]:
                if leaver in version.publishers:
                    version.publishers.update(node_ids)

    def flaw(self, key: int, page: np.ndarray, began: float, node_id: str, started: float) -> str | None:
        """Say what is wrong with a page that was found by a call that began then, if something is."""
        values = page.view(np.float64)
        fits = [bool((values[i::4] == values[i]).all()) for i in range(4)]
        if not all(fits) or values[0] != key or values[3] != -key:
            return "wrong bytes"
        number, made = int(values[1]), float(values[2])
        with self.lock:
            version = self.versions[key][number]
            bumps = list(self.bumps)
            taken_back = float("inf") if version.is_doubtful else version.taken_back
        if taken_back < began:
            return f"version {number}, which everybody had taken back at {taken_back:.4f}, at {began:.4f}"
        for bumped in bumps:
            knows = node_id in bumped.heard or started > bumped.returned
            if bumped.returned < began and knows and made < bumped.began:
                return f"version {number} of {made:.4f}, from before a bump at {bumped.began:.4f}"
        return None
