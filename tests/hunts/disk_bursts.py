"""After a burst and some quiet time the disk has every page of the pool, and peers are told of what is there alone.

A node publishes more at once than the queue of its disk takes, while that is slow to write, and takes pages back,
publishes them again with other bytes, clears and bumps meanwhile. Then it is left alone for a moment, looked at, and
sometimes started again. Where the disk is small a reader joins, and asks for everything: what the pool has, what the
disk has, and what was evicted from both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from hunts.cache_history import PAGE, History
from hunts.frame import Hunt, Stop, Tally
from hunts.schedules import Step, drawn, scratch, turns
from p2pkv import Config, Node
from p2pkv._native import FaultyFiles, FileCall
from p2pkv.disk.store import LAYOUTS
from p2pkv.disk.tier import DiskTier
from p2pkv.testing.lateness import Lateness

N_KEYS = 240
POOL = 200 * PAGE
"""Its quarter, 50 pages, is what may wait for the disk."""
ROOMY, TIGHT = 256 << 20, 5 << 20
"""So large that nothing is ever evicted from it, and about as large as three times the pool."""
DEADLINE = 2.0
QUIET_S = 30.0
"""Within which the disk must have all; it takes milliseconds."""
_FELT = {
    "pages left out of the queue": "p2pkv_disk_skipped_pages_total",
    "pages caught up with": "p2pkv_disk_caught_up_pages_total",
    "pages evicted from disk": "p2pkv_disk_evicted_pages_total",
    "pages promoted": "p2pkv_promoted_pages_total",
}
"""The effects that a node's metrics count."""


class FaultyNode(Node):
    """A node whose disk goes through ``_disk_faults`` if it is started with them."""


class Bursts:
    """One schedule."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        self.chance, self.tally = chance, tally
        self.history = History(tally)
        self.has_room = chance.random() < 0.6
        self.config = Config(
            node_id="n",
            pool_size=POOL,
            buffer_size=0,
            deadline=DEADLINE,
            disk_path=str(folder),
            disk_size=ROOMY if self.has_room else TIGHT,
            disk_layout=chance.choice(LAYOUTS),
            disk_fsync=chance.choice(["never", "seal"]),
        )
        self.history.note(f"{self.config.disk_layout}, {self.config.disk_size}")
        self.memory = np.zeros((N_KEYS, PAGE), np.uint8)
        self.faults = FaultyFiles()
        self.reader: Node | None = None
        self.node = self.start()
        if not self.has_room:
            address = next(member.address for member in self.node.members())
            self.reader = Node.start(
                Config(node_id="r", pool_size=POOL, buffer_size=0, deadline=DEADLINE, join=address)
            )
            # for the node that starts again: nobody finds it, so that it finds the reader
            join = next(member.address for member in self.reader.members() if member.node_id == "r")
            self.config = replace(self.config, join=join)

    def start(self) -> Node:
        FaultyNode._disk_faults = self.faults
        try:
            node = FaultyNode.start(self.config)
        finally:
            FaultyNode._disk_faults = None
        node.register_memory(self.memory)
        return node

    def close(self) -> None:
        self.faults.heal()
        self.count()
        if self.reader is not None:
            self.reader.close()
        self.node.close()

    def count(self) -> None:
        """Add up what the node has felt since it started."""
        readings = self.tier.readings()
        for effect, name in _FELT.items():
            self.tally[effect] += int(readings[name])

    @property
    def tier(self) -> DiskTier:
        assert self.node._parts.caching is not None
        assert self.node._parts.caching.tier is not None
        return self.node._parts.caching.tier

    def some(self, at_most: int) -> list[int]:
        first = self.chance.randrange(N_KEYS)
        return [(first + i) % N_KEYS for i in range(self.chance.randint(1, at_most))]

    # --- steps

    def burst(self) -> None:
        keys = self.some(N_KEYS)
        step = self.chance.choice([8, 32, 100])
        for first in range(0, len(keys), step):
            part = keys[first : first + step]
            with self.history.publishing(part) as memory:
                self.memory[: len(part)] = memory
                with Lateness() as late:
                    self.node.publish(names(part), self.memory[: len(part)])
            if late.seconds > DEADLINE + 0.1 + late.worst:
                raise self.history.broken(f"a publish took {late.seconds:.3f} s; the machine was {late}")
        self.tally["bursts"] += 1

    def slow_down(self) -> None:
        self.history.note("the disk hangs")
        self.faults.hang(FileCall.WRITE)

    def heal(self) -> None:
        self.history.note("the disk goes on")
        self.faults.heal()

    def retract(self) -> None:
        keys = self.some(40)
        with self.history.taking_back(keys):
            self.node.retract(names(keys))

    def clear(self) -> None:
        with self.history.taking_back(None):
            self.node.clear()

    def bump(self) -> None:
        with self.history.taking_back(None):
            self.node.bump()

    def quiet(self) -> None:
        """Let the disk catch up; then look at everything."""
        self.heal()
        self.wait(lambda: self.lacking() == "", self.lacking)
        self.fetch(list(range(N_KEYS)))
        if self.reader is not None:
            self.wait(lambda: self.told_wrongly() == "", self.told_wrongly)
        self.tally["quiet times"] += 1

    def wait(self, is_so: Callable[[], bool], what: Callable[[], str]) -> None:
        until = time.monotonic() + QUIET_S
        while not is_so():
            if time.monotonic() > until:
                raise self.history.broken(f"after {QUIET_S} s: {what()}")
            time.sleep(0.002)  # looked at again; nobody says so

    def in_pool(self) -> list[int]:
        _, ids = self.node._cache.hash(names(list(range(N_KEYS))))
        return np.flatnonzero(self.node._cache._pool.lookup(ids)[0]).tolist()

    def lacking(self) -> str:
        """Say which pages of the pool the disk lacks, if it has evicted none."""
        if self.tier.readings()["p2pkv_disk_behind_pages"]:
            return "pages still wait for the disk"
        keys = self.in_pool()
        if not self.has_room or not keys:
            return ""
        _, ids = self.node._cache.hash(names(keys))
        gone = np.flatnonzero(self.tier.contains(ids) == 0)
        return f"the disk lacks {[keys[row] for row in gone]} of the pool" if len(gone) else ""

    def told_wrongly(self) -> str:
        """Say which pages are nowhere and exist for a peer or for the node itself, or are there and do not."""
        assert self.reader is not None
        keys = list(range(N_KEYS))
        _, ids = self.node._cache.hash(names(keys))
        there = self.tier.locate(ids)[0].astype(bool)
        for node, who in ((self.node, "the node"), (self.reader, "a peer")):
            told = node.exists(names(keys)).astype(bool)
            if (told > there).any():
                return f"{who} is told of {np.flatnonzero(told > there)}, which are nowhere"
            if (told < there).any():
                return f"{who} is not told of {np.flatnonzero(told < there)}, which are there"
        self.tally["pages told of"] += int(there.sum())
        self.tally["cold pages told of"] += int(there.sum()) - len(self.in_pool())
        return ""

    def fetch(self, keys: list[int]) -> np.ndarray:
        pages = self.memory[: len(keys)]
        pages[:] = 0
        began = time.monotonic()
        hits = self.node.fetch(names(keys), pages)
        self.history.check(keys, pages, hits, began, "a fetch")
        return hits

    def restart(self) -> None:
        """What the pool had when it was quiet is there again, from the disk."""
        self.quiet()
        keys = self.in_pool()
        self.history.note("restart")
        self.count()
        self.node.close()
        self.node = self.start()
        store = self.tier._store
        self.wait(lambda: store is not None and store.is_recovered, lambda: "the disk is not recovered")
        self.tally["restarts"] += 1
        if not self.has_room or not keys:
            return
        hits = self.fetch(keys)
        if not hits.all():
            lost = [key for key, hit in zip(keys, hits, strict=True) if not hit]
            raise self.history.broken(f"{lost} were in the pool when it was quiet, and are not found again")
        self.tally["pages found again"] += len(keys)


def names(keys: list[int]) -> list[str]:
    return [f"k{key}" for key in keys]


def run(seed: int, tally: Tally, stop: Stop) -> None:
    with scratch() as folder:
        run_in(folder / "disk", random.Random(seed), tally, stop)


def run_in(folder: Path, chance: random.Random, tally: Tally, stop: Stop) -> None:
    bursts = Bursts(chance, tally, folder)
    steps: list[tuple[Step, float]] = [
        (bursts.burst, 8),
        (bursts.slow_down, 3),
        (bursts.heal, 1),
        (bursts.retract, 2),
        (bursts.clear, 0.3),
        (bursts.bump, 0.3),
        (bursts.quiet, 3),
        (bursts.restart, 0.7),
    ]
    try:
        for _ in turns(chance.randint(8, 24), stop):
            drawn(chance, steps)()
        bursts.burst()
        bursts.restart()
    finally:
        bursts.close()


HUNT = Hunt(
    "disk_bursts",
    "After a burst and some quiet the disk has what the pool has; peers are told of what is there alone",
    run,
    effects=("hits", "restarts", "pages found again", "cold pages told of", *_FELT),
)
