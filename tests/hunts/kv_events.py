"""What a subscriber to a node's events knows is what the node has, in memory and on disk, once all is quiet.

One node, with a disk or without, publishes, evicts, retracts, clears, bumps and is started again, in two threads. A
subscriber follows, and loses messages; another one connects late. Pool and disk are listed for the oracle.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from event_subscriber import Subscriber, residents
from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.schedules import Step, drawn, scratch, turns
from p2pkv import Config, Node

PAGE = 32 << 10
N_KEYS = 220
POOL = 24 * PAGE
"""Far less than there are keys, as is the disk: both evict."""
DISK = 5 << 20
BATCH = 16
_QUIET_S = 20.0


class World:
    """One schedule: a node, those who follow it, and what was done."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        self.chance, self.tally = chance, tally
        self.story: list[str] = []
        self.disk: dict[str, Any] = {}
        if chance.random() < 0.7:
            self.disk = {"disk_size": DISK, "disk_path": str(folder / "disk")}
        self.memory = np.zeros((N_KEYS, PAGE), np.uint8)
        self.node: Node | None = None
        self.endpoints = ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
        self.start()
        self.subscribers = [Subscriber(*self.endpoints)]

    def start(self) -> None:
        publish, replay = self.endpoints
        self.node = Node.start(
            Config(
                node_id="told",
                pool_size=POOL,
                buffer_size=0,
                deadline=5.0,
                kv_events=publish,
                kv_events_replay=replay,
                **self.disk,
            )
        )
        self.node.register_memory(self.memory)
        assert self.node.kv_events_endpoint is not None
        assert self.node.kv_events_replay_endpoint is not None
        self.endpoints = (self.node.kv_events_endpoint, self.node.kv_events_replay_endpoint)

    @property
    def there(self) -> Node:
        assert self.node is not None
        return self.node

    def some(self, chance: random.Random) -> list[str]:
        first = chance.randrange(N_KEYS)
        return [f"k{(first + i) % N_KEYS}" for i in range(chance.randint(1, BATCH))]

    def publish(self) -> None:
        """Two threads publish, retract and fetch at once, so that changes of one page meet."""
        chances = [random.Random(self.chance.getrandbits(32)) for _ in range(2)]
        threads = [threading.Thread(target=self._publish, args=(chance,)) for chance in chances]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.tally["publishes"] += 1

    def _publish(self, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 30)):
            keys = self.some(chance)
            what = chance.random()
            if what < 0.75:
                self.there.publish(keys, self.memory[: len(keys)])
            elif what < 0.9:
                self.there.retract(keys)
            else:
                self.there.fetch(keys, self.memory[-len(keys) :])

    def clear(self) -> None:
        self.there.clear()
        self.tally["clears"] += 1

    def bump(self) -> None:
        self.there.bump()
        self.tally["bumps"] += 1

    def flush(self) -> None:
        caching = self.there._parts.caching
        if caching is not None and caching.tier is not None:
            caching.tier.flush(5.0)

    def restart(self) -> None:
        self.there.close()
        self.node = None
        self.start()
        self.tally["restarts"] += 1

    def follow(self) -> None:
        self.subscribers[0].follow(0.02, lose=self.chance.choice([0, 0, 1, 5]))

    def join(self) -> None:
        """Somebody comes late, and knows nothing of what was told before."""
        if len(self.subscribers) < 4:
            self.subscribers.append(Subscriber(*self.endpoints))

    def quiet(self) -> None:
        """Nothing changes any more: every subscriber ends with what there is."""
        self.flush()
        deadline = time.monotonic() + _QUIET_S
        for number, subscriber in enumerate(self.subscribers):
            while not (subscriber.is_whole and subscriber.known == residents(self.there)):
                if time.monotonic() > deadline:
                    there = residents(self.there)
                    raise self.broken(
                        f"subscriber {number} (whole: {subscriber.is_whole}) knows of {len(subscriber.known)} pages, "
                        f"and {len(there)} are there; {len(subscriber.known - there)} are not there any more, and "
                        f"{len(there - subscriber.known)} were not told"
                    )
                if not subscriber.follow(0.02):
                    subscriber.replay()
            self.tally["agreed"] += 1
            self.tally["pages"] += len(subscriber.known)
            self.tally["gaps"] += subscriber.n_gaps

        counted = self.there.counters()
        self.tally["evictions"] += int(counted["p2pkv_evicted_pages_total"])
        self.tally["disk evictions"] += int(counted.get("p2pkv_disk_evicted_pages_total", 0))

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story[-40:]]))

    def close(self) -> None:
        for subscriber in self.subscribers:
            subscriber.close()
        if self.node is not None:
            self.node.close()


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    with scratch() as folder:
        world = World(chance, tally, folder)
        steps: list[tuple[Step, float]] = [
            (world.publish, 8),
            (world.follow, 4),
            (world.quiet, 2),
            (world.clear, 1),
            (world.bump, 1),
            (world.flush, 1),
            (world.restart, 0.7),
            (world.join, 0.7),
        ]
        try:
            for _ in turns(chance.randint(10, 40), stop):
                step = drawn(chance, steps)
                world.story.append(f"{time.monotonic():.4f} {step.__name__}")
                step()
            world.quiet()
        finally:
            world.close()


HUNT = Hunt(
    "kv_events",
    "Who follows a node's events knows what it has, once all is quiet",
    run,
    effects=("agreed", "gaps", "evictions", "disk evictions", "clears", "bumps", "restarts"),
)
