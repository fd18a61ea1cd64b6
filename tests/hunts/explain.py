"""What explain says of pages is so: a model of what was done to them judges it.

Some nodes with small pools, with disks or without, publish, take back, clear, bump, and are closed and started again; a
publish into a full pool evicts. Between the steps a node is asked about pages, also about those that nobody has. What
it says may be one of what the model allows: of each node that had the page, why it has it no more. Who has a page is
looked up in its pool itself.
"""

from __future__ import annotations

import random
from pathlib import Path

from hunts.few_nodes import TIMEOUT, FewNodes, Known
from hunts.frame import Hunt, Stop, Tally
from hunts.schedules import Step, drawn, scratch, turns
from p2pkv.explain.explanation import Explanation, Verdict


class World(FewNodes):
    """One schedule: its nodes and what was done with them."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        super().__init__(chance, tally, folder, n_nodes=chance.randint(2, 3), share_of_disks=0.3)
        self.done: dict[str, dict[str, Verdict]] = {known.node_id: {} for known in self.nodes}
        """Of each node and key what was done last, of what the node has published since it started. IN_POOL:
        published and not taken back; the pool may have evicted it."""
        self.gone: set[str] = set()
        """Keys that a node has had that was closed since: the directory may lead there, or remember that it did."""
        self.old: set[str] = set()
        """Keys that were published before the last bump: who remembers that may be closed by now."""

    def start(self, known: Known, **settings: object) -> None:
        super().start(known, **settings)
        self.done[known.node_id] = {}

    def kept(self, known: Known) -> list[str]:
        """Return what a node has published, not taken back, and still has."""
        keys = [key for key, done in self.done[known.node_id].items() if done is Verdict.IN_POOL]
        return [key for key, place in zip(keys, known.places(keys), strict=True) if place] if keys else []

    # --- steps

    def publish(self) -> None:
        known, keys = self.one(), self.some()
        self.story.append(f"{known.node_id} publishes {keys}")
        told = known.there.publish(keys, known.memory[: len(keys)])
        for key, is_told in zip(keys, told, strict=True):
            if is_told:
                self.done[known.node_id][key] = Verdict.IN_POOL

    def retract(self) -> None:
        known, keys = self.one(), self.some()
        self.story.append(f"{known.node_id} retracts {keys}")
        had = known.there.retract(keys)
        for key, is_had in zip(keys, had, strict=True):
            if is_had:
                self.done[known.node_id][key] = Verdict.RETRACTED

    def clear(self) -> None:
        known = self.one()
        had = self.kept(known)
        self.story.append(f"{known.node_id} clears {had}")
        known.there.clear()
        self.done[known.node_id] |= dict.fromkeys(had, Verdict.CLEARED)

    def bump(self) -> None:
        known = self.one()
        had = {other.node_id: self.kept(other) for other in self.present()}
        self.story.append(f"{known.node_id} bumps: {had}")
        known.there.bump()
        for node_id, keys in had.items():
            self.done[node_id] |= dict.fromkeys(keys, Verdict.BUMPED)
        self.tally["bumps"] += 1
        self.old |= self.gone.union(*(self.done[node_id] for node_id in had))
        self.gone = set()

    def restart(self) -> None:
        if len(self.present()) < 2:
            return
        known = self.one()
        self.gone |= self.done[known.node_id].keys()
        self.story.append(f"{known.node_id} is closed")
        self.close(known)
        self.wait_met()
        for key in self.some():
            self.ask(key)
        self.lose_disk(known)
        self.start(known)
        self.wait_met()
        self.story.append(f"{known.node_id} is there again")
        self.tally["restarts"] += 1

    def look(self) -> None:
        for key in self.some():
            self.ask(key)

    # --- the oracle

    def holders(self, key: str) -> set[str]:
        return {known.node_id for known in self.present() if known.places([key])[0]}

    def ask(self, key: str) -> None:
        known = self.one()
        before = self.holders(key)
        explained = known.there.explain(key, timeout=TIMEOUT)
        holders = self.holders(key)
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
            done = self.done[other.node_id].get(key)
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
    with scratch() as folder:
        world = World(chance, tally, folder)
        steps: list[tuple[Step, float]] = [
            (world.publish, 8),
            (world.look, 8),
            (world.retract, 3),
            (world.clear, 1),
            (world.bump, 0.7),
            (world.restart, 0.7),
        ]
        try:
            world.start_all()
            for _ in turns(chance.randint(10, 60), stop):
                drawn(chance, steps)()
            world.look()
        finally:
            world.close_all()


HUNT = Hunt(
    "explain",
    "What explain says of a page is so: who has it, and otherwise why nobody has",
    run,
    effects=("in_pool", "evicted", "retracted", "bumped", "owner_gone", "unknown", "restarts"),
    enough=30,
)
