"""A page that a live node holds is found, whatever becomes of the others that hold it too; and no byte is wrong.

Nodes in processes of their own publish the same keys, some of them later than the reader has looked; one of them is
stopped, killed, stopped again and again for moments, takes pages back or is flooded, and the reader fetches at once.
Each fetch ends by its deadline. What at least one node holds that was not touched is a hit: the directory knows it.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import pages
from cluster import NodeProcess
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.schedules import turns
from hunts.timing import check_time
from p2pkv import Config, Node
from p2pkv.testing.lateness import Lateness

N_HOLDERS = 4
PAGE = 16 * 1024
POOL = 8 << 20
DEADLINE = 2.0
FAIR_S = DEADLINE / 8
"""A machine that stood still for longer during a fetch proves nothing about what the fetch should have found."""
MEET_S = 60.0
_EFFECTS = {
    "late reads left": 'p2pkv_hedged_reads_total{reason="late"}',
    "failed reads made up for": 'p2pkv_hedged_reads_total{reason="failed"}',
    "slow holders avoided": 'p2pkv_hedged_reads_total{reason="slow"}',
    "late pages looked up again": 'p2pkv_hedged_reads_total{reason="unknown"}',
}


class World:
    """One schedule: a reader, the holders, and who holds what."""

    def __init__(self, chance: random.Random, tally: Tally) -> None:
        self.chance, self.tally = chance, tally
        self.story: list[str] = []
        self.n_keys = 0
        self.held: defaultdict[str, set[str]] = defaultdict(set)  # key -> nodes that must have it
        self.memory = np.zeros((64, PAGE), np.uint8)
        self.reader = Node.start(
            Config(node_id="reader", pool_size=POOL, buffer_size=0, transports=("tcp",), deadline=DEADLINE)
        )
        self.reader.register_memory(self.memory)
        self.holders: dict[str, NodeProcess] = {}

    def start(self) -> None:
        fresh = [f"h{i}" for i in range(N_HOLDERS) if f"h{i}" not in self.holders]
        for node_id in fresh:
            config = {
                "node_id": node_id,
                "pool_size": POOL,
                "buffer_size": 0,
                "deadline": DEADLINE,
                "transports": ["tcp"],
                "join": [self.reader.address],
            }
            self.holders[node_id] = NodeProcess(config=config, memory=64 * PAGE)
            self.holders[node_id].send("start", **self.holders[node_id].settings)
        for node_id in fresh:
            self.holders[node_id].answer(MEET_S)
        everybody = {"reader", *self.holders}
        self.wait("all have met", lambda: everybody <= self.known_to_reader())
        self.wait_met()
        self.held.clear()  # entries move when members come: what is published from now on is where it will stay
        for node_id in self.holders:
            self.publish(node_id, [f"probe {node_id} {self.n_keys}"])
            self.wait_read(node_id)

    def wait_met(self) -> None:
        """Wait until the holders take nobody for dead or a suspect, nor the reader anybody for dead.

        A node that stood still for two seconds may be dead to some of the others by then, and to some not. Until these
        have heard of it again, each tells where its pages lie to those who answer for them as *it* sees it: a look-up
        is answered by one who heard of one holder, and not of the next.
        """
        everybody = {"reader", *self.holders}
        asked = [holder_members(holder) for holder in self.holders.values()]

        def have_met() -> bool:
            is_on_ring = {member.node_id for member in self.reader.members()}
            return everybody <= is_on_ring and all(everybody <= members() for members in asked)

        self.wait("all know all", have_met)

    def known_to_reader(self) -> set[str]:
        return {member.node_id for member in self.reader.members() if member.state.name == "ALIVE"}

    def close(self) -> None:
        counted = self.reader.counters()
        for effect, name in _EFFECTS.items():
            self.tally[effect] += int(counted.get(name, 0.0))
        for holder in self.holders.values():
            holder.signal(signal.SIGCONT)
            holder.close()
        self.reader.close()

    def note(self, what: str) -> None:
        self.story.append(what)

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story[-30:], str(self.reader.counters())]))

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + MEET_S
        while not condition():
            if time.monotonic() > until:
                raise self.broken(f"not within {MEET_S:g} s: {what}")
            time.sleep(0.005)  # looked at again; nobody says so

    def wait_read(self, node_id: str) -> None:
        """Wait until the reader reads from this node: one that made a call time out is left alone for a second."""
        probes = [key for key, nodes in self.held.items() if key.startswith("probe") and node_id in nodes]
        memory = self.memory[: len(probes[-1:])]
        self.wait(
            f"{node_id} is read from",
            lambda: bool(self.reader.fetch(probes[-1:], memory, timeout=DEADLINE).all()),
        )

    # --- what is there

    def publish(self, node_id: str, keys: list[str]) -> None:
        outcomes = self.holders[node_id].call("publish", keys=keys, nbytes=PAGE, timeout=10.0)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome:
                self.held[key].add(node_id)

    def new_pages(self) -> tuple[list[str], str]:
        """Publish some, each at one to three nodes; some of these come when the reader has looked already.

        Returns their keys, and a node that is the first to hold one which others hold too.
        """
        keys = [f"k{self.n_keys + i}" for i in range(self.chance.randint(2, 8))]
        self.n_keys += len(keys)
        nodes = {key: self.chance.sample(sorted(self.holders), self.chance.randint(1, 3)) for key in keys}
        is_looked_at = self.chance.random() < 0.5
        for first in (True, False):
            for node_id in self.holders:
                of_node = [key for key in keys if node_id in (nodes[key][:1] if first else nodes[key][1:])]
                if of_node:
                    self.publish(node_id, of_node)
            if first and is_looked_at:
                self.fetch(keys, "before the others publish")
        self.note(f"{nodes}, {'looked at' if is_looked_at else 'new'}")
        if self.chance.random() < 0.5:
            self.fetch(keys, "at first")
        shared = [of_key[0] for of_key in nodes.values() if len(of_key) > 1]
        return keys, self.chance.choice(shared or sorted(self.holders))

    def fetch(self, keys: list[str], when: str, hurt: tuple[str, ...] = ()) -> None:
        """Fetch, and ask the oracle; what the nodes of ``hurt`` hold may be missed."""
        memory = self.memory[: len(keys)]
        memory[:] = 0
        with Lateness() as late:
            hits = self.reader.fetch(keys, memory)
        check_time(f"a fetch {when}", DEADLINE + 0.1, late)
        late_s, found = late.worst, hits.astype(bool)
        memory_now = memory.copy()
        if wrong := pages.wrong(memory, keys, hits):
            raise self.broken(f"wrong bytes of {wrong} {when}")
        self.tally["hits"] += int(found.sum())
        if late_s > FAIR_S:
            self.tally["not judged"] += 1
            return
        self.tally["judged"] += 1
        lost = [key for key, hit in zip(keys, found, strict=True) if not hit and self.held[key] - set(hurt)]
        if lost:
            where = {key: sorted(self.held[key]) for key in lost}
            told = [str(self.reader.explain(key)) for key in lost]
            raise self.broken("\n".join([f"not found {when}: {where}", *told]))
        if (memory != memory_now).any():
            raise self.broken(f"memory was written to after a fetch {when}")

    # --- what befalls one of them

    @contextmanager
    def stopped(self, node_id: str) -> Iterator[None]:
        self.holders[node_id].stop()
        try:
            yield
        finally:
            self.holders[node_id].resume()

    def stop_one(self, keys: list[str], node_id: str, other: str) -> None:
        """One stands still; sometimes another has taken back what the reader believes to be there."""
        if self.chance.random() < 0.5:
            self.take_back(keys, other)
        self.note(f"{node_id} is stopped")
        with self.stopped(node_id):
            for _ in range(self.chance.randint(1, 3)):
                self.fetch(keys, f"while {node_id} is stopped", (node_id,))
                if self.chance.random() < 0.5:
                    break
        self.wait_met()
        self.wait_read(node_id)

    def take_back(self, keys: list[str], node_id: str) -> None:
        """The reader's location cache does not hear of it."""
        chosen = self.chance.sample(keys, self.chance.randint(1, len(keys)))
        self.note(f"{node_id} takes back {chosen}")
        self.holders[node_id].call("retract", keys=chosen)
        for key in chosen:
            self.held[key].discard(node_id)

    def take_back_one(self, keys: list[str], node_id: str, other: str) -> None:
        self.take_back(keys, node_id)
        self.fetch(keys, f"after {node_id} has taken some back")

    def flood_one(self, keys: list[str], node_id: str, other: str) -> None:
        """One evicts what it has."""
        self.note(f"{node_id} is flooded")
        for nodes in self.held.values():
            nodes.discard(node_id)
        holder = self.holders[node_id]
        for _ in range(POOL // (60 * PAGE) + 2):
            flood = [f"flood {self.n_keys + i}" for i in range(60)]
            self.n_keys += 60
            holder.send("publish", keys=flood, nbytes=PAGE, timeout=10.0)
            self.fetch(keys, f"while {node_id} is flooded", (node_id,))
            holder.answer(MEET_S)
        self.publish(node_id, [f"probe {node_id} {self.n_keys}"])
        self.wait_read(node_id)

    def slow_one(self, keys: list[str], node_id: str, other: str) -> None:
        """One is stopped for moments again and again."""
        self.note(f"{node_id} is slow")
        is_over = threading.Event()
        seconds = self.chance.choice([0.002, 0.02, 0.1])

        def stutter() -> None:
            while not is_over.wait(seconds / 4):
                self.holders[node_id].signal(signal.SIGSTOP)
                is_over.wait(seconds)
                self.holders[node_id].signal(signal.SIGCONT)

        thread = threading.Thread(target=stutter)
        thread.start()
        try:
            for _ in range(8):
                self.fetch(keys, f"while {node_id} is slow", (node_id,))
        finally:
            is_over.set()
            thread.join()
        self.wait_met()
        self.wait_read(node_id)

    def kill_one(self, keys: list[str], node_id: str, other: str) -> None:
        self.note(f"{node_id} is killed")
        self.holders[node_id].kill()
        self.fetch(keys, f"after {node_id} was killed", (node_id,))
        self.holders.pop(node_id).close()
        self.start()


def holder_members(holder: NodeProcess) -> Callable[[], set[str]]:
    """Return what asks a holder for the nodes that it knows alive."""
    return lambda: {member["node_id"] for member in holder.call("members") if member["state"] == "ALIVE"}


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    world = World(chance, tally)
    steps: list[tuple[Callable[[list[str], str, str], None], float]] = [
        (world.stop_one, 6),
        (world.take_back_one, 3),
        (world.slow_one, 2),
        (world.flood_one, 1),
        (world.kill_one, 0.5),
    ]
    what, weights = zip(*steps, strict=True)
    try:
        world.start()
        for _ in turns(chance.randint(8, 20), stop):
            keys, node_id = world.new_pages()
            if chance.random() < 0.2:
                node_id = chance.choice(sorted(world.holders))
            other = chance.choice(sorted(world.holders.keys() - {node_id}))
            chance.choices(what, weights)[0](keys, node_id, other)
    finally:
        world.close()
        del world, steps, what
        gc.collect()  # what a node has open goes with the object


HUNT = Hunt(
    "holders",
    "A page that a live node holds is a hit in time, whatever befalls the others that hold it, and never wrong",
    run,
    effects=("hits", "judged", *_EFFECTS),
    enough=6,
)
