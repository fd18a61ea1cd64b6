"""What explain says of pages is so: a model of what was done to them judges it.

Some nodes with small pools, with disks or without, publish, take back, clear, bump, and are closed and started again; a
publish into a full pool evicts. Between the steps a node is asked about pages, also about those that nobody has. What
it says may be one of what the model allows: of each node that had the page, why it has it no more. Who has a page is
looked up in its pool itself.
"""

from __future__ import annotations

import gc
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node
from p2pkv.explain.explanation import Explanation, Verdict

PAGE = 8192
POOL = 10 * PAGE
N_KEYS = 24
BATCH = 6
TIMEOUT = 5.0


@dataclass
class Known:
    """What the model has of one node: of each key what was done last, of what it has published."""

    node_id: str
    disk: Path | None
    memory: np.ndarray
    node: Node | None = None
    done: dict[str, Verdict] = field(default_factory=dict)
    """IN_POOL: published and not taken back; the pool may have evicted it."""

    def holds(self, key: str) -> bool:
        """Look whether it has the page, in pool or disk, without asking what is hunted."""
        assert self.node is not None
        caching = self.node._parts.caching
        assert caching is not None
        _, ids = caching.cache.hash([key])
        if caching.pool.lookup(ids)[0][0]:
            return True
        return caching.tier is not None and bool(caching.tier.contains(ids)[0])


class World:
    """One schedule: its nodes and what was done with them."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        self.chance, self.tally = chance, tally
        self.story: list[str] = []
        self.nodes = [
            Known(
                f"n{i}",
                folder / f"disk{i}" if chance.random() < 0.3 else None,
                np.zeros((N_KEYS, PAGE), np.uint8),
            )
            for i in range(chance.randint(2, 3))
        ]
        self.gone: set[str] = set()
        """Keys that a node has had that was closed since: the directory may lead there, or remember that it did."""
        self.old: set[str] = set()
        """Keys that were published before the last bump: who remembers that may be closed by now."""

    def start(self, known: Known) -> None:
        others = [other.node.address for other in self.nodes if other.node is not None]
        disk = {} if known.disk is None else {"disk_size": 8 << 20, "disk_path": str(known.disk)}
        known.node = Node.start(
            Config(
                node_id=known.node_id, pool_size=POOL, buffer_size=0, deadline=TIMEOUT, join=others, **disk
            )  # type: ignore[arg-type]
        )
        known.node.register_memory(known.memory)
        known.done = {}

    def present(self) -> list[Known]:
        return [known for known in self.nodes if known.node is not None]

    def wait_met(self) -> None:
        until = time.monotonic() + 60
        while any(len(known.node.members()) != len(self.present()) for known in self.present() if known.node):
            if time.monotonic() > until:
                raise self.broken("the nodes have not met within 60 s")
            time.sleep(0.005)  # looked at again; nobody says so

    def some(self) -> list[str]:
        first = self.chance.randrange(N_KEYS)
        return [f"k{(first + i) % N_KEYS}" for i in range(self.chance.randint(1, BATCH))]

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story[-40:]]))

    # --- steps

    def publish(self) -> None:
        known, keys = self.chance.choice(self.present()), self.some()
        assert known.node is not None
        self.story.append(f"{known.node_id} publishes {keys}")
        told = known.node.publish(keys, known.memory[: len(keys)])
        for key, is_told in zip(keys, told, strict=True):
            if is_told:
                known.done[key] = Verdict.IN_POOL

    def retract(self) -> None:
        known, keys = self.chance.choice(self.present()), self.some()
        assert known.node is not None
        self.story.append(f"{known.node_id} retracts {keys}")
        had = known.node.retract(keys)
        for key, is_had in zip(keys, had, strict=True):
            if is_had:
                known.done[key] = Verdict.RETRACTED

    def clear(self) -> None:
        known = self.chance.choice(self.present())
        assert known.node is not None
        had = [key for key, done in known.done.items() if done is Verdict.IN_POOL and known.holds(key)]
        self.story.append(f"{known.node_id} clears {had}")
        known.node.clear()
        known.done |= dict.fromkeys(had, Verdict.CLEARED)

    def bump(self) -> None:
        known = self.chance.choice(self.present())
        assert known.node is not None
        had = {
            other.node_id: [k for k, done in other.done.items() if done is Verdict.IN_POOL and other.holds(k)]
            for other in self.present()
        }
        self.story.append(f"{known.node_id} bumps: {had}")
        known.node.bump()
        for other in self.present():
            other.done |= dict.fromkeys(had[other.node_id], Verdict.BUMPED)
        self.tally["bumps"] += 1
        self.old |= self.gone.union(*(other.done for other in self.present()))
        self.gone = set()

    def restart(self) -> None:
        if len(self.present()) < 2:
            return
        known = self.chance.choice(self.present())
        assert known.node is not None
        self.gone |= known.done.keys()
        self.story.append(f"{known.node_id} is closed")
        known.node.close()
        known.node = None
        self.wait_met()
        for key in self.some():
            self.ask(key)
        if known.disk is not None:
            shutil.rmtree(known.disk, ignore_errors=True)
        self.start(known)
        self.wait_met()
        self.story.append(f"{known.node_id} is there again")
        self.tally["restarts"] += 1

    def look(self) -> None:
        for key in self.some():
            self.ask(key)

    # --- the oracle

    def ask(self, key: str) -> None:
        known = self.chance.choice(self.present())
        assert known.node is not None
        before = {other.node_id for other in self.present() if other.holds(key)}
        explained = known.node.explain(key, timeout=TIMEOUT)
        holders = {other.node_id for other in self.present() if other.holds(key)}
        if explained.silent or holders != before:  # a disk writes, and evicts, whenever it gets to it
            self.tally["not judged"] += 1
            return
        self.judge(key, holders, explained)
        self.tally[explained.verdict.value] += 1

    def judge(self, key: str, holders: set[str], explained: Explanation) -> None:
        said = {place.node_id for place in explained.places}
        if said != holders:
            raise self.broken(f"{key} is said to be at {said}, and is at {holders}: {explained}")
        if holders:
            return
        allowed: set[Verdict] = set()
        for other in self.present():
            done = other.done.get(key)
            # published and not there: only its own pool, or disk, can have evicted it
            allowed |= {Verdict.EVICTED} if done is Verdict.IN_POOL else set() if done is None else {done}
            if done is Verdict.CLEARED and other.disk is not None and key in self.old:
                allowed.add(Verdict.BUMPED)  # a moment before a bump, from a disk: which it was nobody knows
        is_remembered = bool(allowed)
        allowed |= {Verdict.OWNER_GONE} if key in self.gone else set()
        if not is_remembered:
            allowed |= {Verdict.UNKNOWN} | (
                {Verdict.BUMPED, Verdict.OWNER_GONE} if key in self.old else set()
            )
        if explained.verdict not in allowed:
            raise self.broken(
                f"{key} is said to be {explained.verdict}, and is one of {allowed}: {explained}"
            )


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="p2pkv-hunt-"))
    world = World(chance, tally, folder)
    steps: list[tuple[Callable[[], None], float]] = [
        (world.publish, 8),
        (world.look, 8),
        (world.retract, 3),
        (world.clear, 1),
        (world.bump, 0.7),
        (world.restart, 0.7),
    ]
    try:
        for known in world.nodes:
            world.start(known)
        world.wait_met()
        what, weights = zip(*steps, strict=True)
        for _ in range(chance.randint(10, 60)):
            if stop():
                break
            chance.choices(what, weights)[0]()
        world.look()
    finally:
        for known in world.nodes:
            if known.node is not None:
                known.node.close()
                known.node = None
        gc.collect()  # what a node has open goes with the object
        shutil.rmtree(folder, ignore_errors=True)


HUNT = Hunt(
    "explain",
    "What explain says of a page is so: who has it, and otherwise why nobody has",
    run,
    effects=("in_pool", "evicted", "retracted", "bumped", "owner_gone", "unknown", "restarts"),
    enough=30,
)
