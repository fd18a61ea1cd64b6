"""What an engine does with pages: publish, look, fetch and compare every byte, take back, flush; two threads a node.

A node's own pages are numbers 0 to ``N_PAGES`` under its own name. Whatever was taken back is published again in
the next version, so that a byte of an older one is seen. What is ``hot`` is published by several nodes, always in
version 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from p2pkv import Node, Outcome

from .contents import NO_VERSION, Guarded, fill, rows_of, version_of
from .journal import Journal, Record
from .stopwatch import Stopwatch
from .threads import Threads

N_PAGES = 96
N_HOT = 16
BATCH = 16
DEADLINE_S = 0.5
BUMP_S = 4.0
"""Of a bump: a member that is stopped is given up after a second and a half."""
_PAUSE_S = 0.09
"""Between the calls of a thread: light enough that a shared machine shows p2pkv's lateness, not its own."""
HOT = "hot"

Members = Sequence[str]


def key(owner: str, number: int) -> str:
    """Return the key of a page."""
    return f"{owner}:{number}"


class PageLoad(Threads):
    """Calls of one node. ``calm`` stops taking pages back, so that what is published stays so."""

    def __init__(
        self, node: Node, names: Members, journal: Journal, *, past: Sequence[Record], seed: str
    ) -> None:
        run = (self._write_and_read, self._read)
        super().__init__(node.node_id, journal, run, seed=seed, pause_s=_PAUSE_S)
        self._node = node
        self._names = names
        self._versions, self._is_hot_owner = _resume(past), not node.config.disk_nbytes
        self._published: set[int] = set()
        self._hot: set[int] = set()
        self.calm = threading.Event()

    def _write_and_read(self, rng: Random) -> None:
        rows = rows_of(BATCH)
        memory = self._node.register_memory(rows)
        into = Guarded(BATCH)
        reading = self._node.register_memory(into.rows)
        go_on = True
        while go_on:
            go_on = self._guarded(lambda: self._step(rng, rows, into))
        memory.close()
        reading.close()

    def _step(self, rng: Random, rows: np.ndarray, into: Guarded) -> None:
        missing = sorted(set(range(N_PAGES)) - self._published)
        choice = rng.random()
        if missing and (self.calm.is_set() or choice < 0.4):
            self._publish(rng.sample(missing, min(BATCH, len(missing))), rows)
        elif choice < 0.5 and self._is_hot_owner and len(self._hot) < N_HOT:
            self._publish_hot(rng.sample(sorted(set(range(N_HOT)) - self._hot), 1), rows)
        elif choice < 0.6 and not self.calm.is_set():
            self._take_back(rng)
        else:
            self._fetch(rng, into)

    def _read(self, rng: Random) -> None:
        into = Guarded(BATCH)
        memory = self._node.register_memory(into.rows)
        go_on = True
        while go_on:
            what = self._exists if rng.random() < 0.2 else self._fetch
            go_on = self._guarded(lambda what=what: what(rng, into))  # type: ignore[misc]
        memory.close()

    def _publish(self, numbers: list[int], rows: np.ndarray) -> None:
        versions = [self._versions[number] for number in numbers]
        keys = [key(self._me, number) for number in numbers]
        rows = rows[: len(numbers)]
        fill(rows, keys, versions)
        self._journal.write("publish>", t=time.monotonic(), j=numbers, v=versions)
        with Stopwatch() as watch:
            outcomes = self._node.publish(keys, rows, timeout=DEADLINE_S)
        hits = [int(outcome) for outcome in outcomes]
        self._journal.write("publish", **watch.span, j=numbers, h=hits)
        self._published |= {number for number, hit in zip(numbers, hits, strict=True) if hit}

    def _publish_hot(self, numbers: list[int], rows: np.ndarray) -> None:
        keys = [key(HOT, number) for number in numbers]
        fill(rows[: len(keys)], keys, [0] * len(keys))
        outcomes = self._timed(
            "publish", lambda: self._node.publish(keys, rows[: len(keys)], timeout=DEADLINE_S)
        )
        there = [number for number, hit in zip(numbers, outcomes, strict=True) if hit]
        self._hot |= set(there)
        self._journal.write("hot", add=there)

    def _take_back(self, rng: Random) -> None:
        if rng.random() < 0.08:
            self._taken(None, self._node.clear)
        elif rng.random() < 0.3 and self._hot:
            number = rng.choice(sorted(self._hot))
            self._hot.discard(number)
            self._journal.write("hot", drop=[number])
            self._timed("retract", lambda: self._node.retract([key(HOT, number)], timeout=DEADLINE_S))
        elif self._published:
            numbers = rng.sample(sorted(self._published), min(4, len(self._published)))
            keys = [key(self._me, number) for number in numbers]
            self._taken(numbers, lambda: self._node.retract(keys, timeout=DEADLINE_S))

    def _taken(self, numbers: list[int] | None, call: Callable[[], object]) -> None:
        """Take pages back (None: all), and let their next version be another one."""
        gone = list(range(N_PAGES)) if numbers is None else numbers
        if numbers is None:
            self._journal.write("hot", drop=sorted(self._hot))
            self._hot.clear()
        self._published -= set(gone)
        self._journal.write("take>", t=time.monotonic(), j=numbers)
        for number in gone:
            self._versions[number] += 1
        with Stopwatch() as watch:
            call()
        self._journal.write("take", **watch.span, j=numbers)

    def _exists(self, rng: Random, into: Guarded | None) -> None:
        owner, numbers = self._some(rng)
        keys = [key(owner, number) for number in numbers]
        self._timed("exists", lambda: self._node.exists(keys, timeout=DEADLINE_S))

    def _timed(self, what: str, call: Callable[[], np.ndarray]) -> np.ndarray:
        with Stopwatch() as watch:
            outcomes = call()
        self._journal.write("call", **watch.span, what=what, n=len(outcomes), h=int(outcomes.sum()))
        return outcomes

    def _fetch(self, rng: Random, into: Guarded) -> None:
        if not into.is_untouched():
            self._journal.write(
                "broken", what=f"{self._me}: memory was written to after the call had returned"
            )
        self.fetch(*self._some(rng), into)

    def _some(self, rng: Random) -> tuple[str, list[int]]:
        owner = rng.choice([*self._names, HOT])
        n_pages = N_HOT if owner == HOT else N_PAGES
        return owner, rng.sample(range(n_pages), rng.randint(1, BATCH))

    def fetch(self, owner: str, numbers: Sequence[int], into: Guarded) -> list[int]:
        """Fetch pages and look at every byte; return the numbers of those that came."""
        keys = [key(owner, number) for number in numbers]
        rows = into.rows[: len(keys)]
        with Stopwatch() as watch:
            outcomes = self._node.fetch(keys, rows, timeout=DEADLINE_S)
        versions = [
            version_of(row, name) if outcome == Outcome.HIT else None
            for row, name, outcome in zip(rows, keys, outcomes, strict=True)
        ]
        wrong = [name for name, version in zip(keys, versions, strict=True) if version == NO_VERSION]
        if wrong:
            self._journal.write("broken", what=f"{self._me}: WRONG BYTES in hits of {wrong}")
        self._journal.write("fetch", **watch.span, o=owner, j=list(numbers), v=versions)
        into.seal()
        return [number for number, outcome in zip(numbers, outcomes, strict=True) if outcome == Outcome.HIT]


def _resume(past: Sequence[Record]) -> list[int]:
    """Return the version that each page is to be published in, by what earlier processes of this node wrote down."""
    versions = [0] * N_PAGES
    for record in past:
        if record["k"] == "publish>":
            for number, version in zip(record["j"], record["v"], strict=True):
                versions[number] = version
        elif record["k"] == "take>":
            for number in range(N_PAGES) if record["j"] is None else record["j"]:
                versions[number] += 1
    return versions
