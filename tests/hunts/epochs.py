"""After a bump nothing that was published before it is found, in memory or on disk, whoever reads.

Some nodes, with disks or without, publish and fetch the same keys all the time, each in a thread of its own; pages are
computed, wait, and are published later. Meanwhile their namespace is bumped, by one node or by two at once, and nodes
are closed and started again, with bumps while they are away. Every page says when it was computed.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.schedules import drawn, scratch, turns
from p2pkv import Bump, Config, Node

PAGE = 4096
N_KEYS = 60
POOL = 48 * PAGE
"""Less than there are keys: what is evicted is on disk, where there is one."""
BATCH = 12
DEADLINE = 2.0
_EFFECTS = {
    "pages read from disk": 'p2pkv_fetched_pages_total{source="disk"}',
    "pages too late for their epoch": 'p2pkv_unpublished_pages_total{reason="epoch"}',
}
"""What nodes feel of bumps and restarts, and the counters that tell it."""
_TURNS = 12
"""Of the nodes' threads together, between two steps."""


@dataclass(frozen=True)
class Bumped:
    """A bump that has returned: nothing of before ``began`` is found from then on by those who have ``heard``."""

    began: float
    returned: float
    heard: frozenset[str]


class Worker:
    """A node, and the thread that publishes and fetches with it while it is there."""

    def __init__(self, world: World, node_id: str, disk: Path | None) -> None:
        self.world = world
        self.node_id = node_id
        self.chance = random.Random(world.chance.getrandbits(32))
        self.memory = np.zeros((N_KEYS, PAGE), np.uint8)
        self.disk = {} if disk is None else {"disk_size": 8 << 20, "disk_path": str(disk)}
        self.started = 0.0
        self.node: Node | None = None
        self.thread: threading.Thread | None = None
        self.is_over = threading.Event()
        # computed, and not published yet
        self.waiting: tuple[list[int], np.ndarray, int] | None = None

    def start(self) -> None:
        self.started = time.monotonic()
        others = [other.node.address for other in self.world.workers if other.node is not None]
        self.node = Node.start(
            Config(
                node_id=self.node_id,
                pool_size=POOL,
                buffer_size=0,
                deadline=DEADLINE,
                transports=self.world.transports,
                join=others,
                **self.disk,
            )
        )
        self.node.register_memory(self.memory)
        self.is_over.clear()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def stop(self) -> None:
        if self.thread is not None:
            self.is_over.set()
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        self.stop()
        if self.node is not None:
            counted = self.node.counters()
            for effect, name in _EFFECTS.items():
                self.world.tally[effect] += int(counted.get(name, 0.0))
            self.node.close()
            self.node = None

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self.chance.choice([self.publish, self.compute, self.fetch, self.fetch])()
                self.world.turned()
        except BaseException as error:  # noqa: BLE001  # told to the thread that waits
            self.world.failed(error)

    def some(self) -> list[int]:
        first = self.chance.randrange(N_KEYS)
        return [(first + i) % N_KEYS for i in range(self.chance.randint(1, BATCH))]

    def compute(self) -> None:
        assert self.node is not None
        epoch, keys = self.node.epoch, self.some()
        self.waiting = (keys, self.world.pages(keys), epoch)

    def publish(self) -> None:
        assert self.node is not None
        if self.waiting is None:
            self.compute()
        assert self.waiting is not None
        (keys, pages, epoch), self.waiting = self.waiting, None
        memory = self.memory[: len(keys)]
        memory[:] = pages
        self.node.publish(names(keys), memory, epoch=epoch)

    def fetch(self) -> None:
        self.check(self.some())

    def check(self, keys: list[int]) -> int:
        """Fetch, and judge what is found; return how much that is."""
        assert self.node is not None
        memory = self.memory[: len(keys)]
        began = time.monotonic()
        hits = self.node.fetch(names(keys), memory)
        for key, page, is_hit in zip(keys, memory, hits, strict=True):
            if is_hit:
                self.world.judge(self, key, page, began)
        return int(hits.sum())


class World:
    """One schedule: the nodes, and which bumps have returned."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        self.chance, self.tally = chance, tally
        self.transports = chance.choice(["tcp", "shm"])
        self.changed = threading.Condition()
        self.n_turns = 0
        self.failure: BaseException | None = None
        self.bumps: list[Bumped] = []
        self.story: list[str] = []
        self.workers: list[Worker] = []
        for i in range(chance.randint(2, 4)):
            disk = folder / f"disk{i}" if chance.random() < 0.6 else None
            self.workers.append(Worker(self, f"n{i}", disk))

    def note(self, text: str) -> None:
        self.story.append(f"{time.monotonic():.4f} {text}")

    # --- what the workers' threads call

    def pages(self, keys: list[int]) -> np.ndarray:
        """Compute pages: each has its key and the time, over and over."""
        pages = np.empty((len(keys), PAGE // 8), np.float64)
        pages[:, 0::2] = np.array(keys)[:, None]
        pages[:, 1::2] = time.monotonic()
        return pages.view(np.uint8)

    def judge(self, worker: Worker, key: int, page: np.ndarray, began: float) -> None:
        values = page.view(np.float64)
        if not (values[0::2] == key).all() or not (values[1::2] == values[1]).all():
            raise self.broken(f"{worker.node_id} was given wrong bytes as k{key}")
        computed = float(values[1])
        with self.changed:
            bumps = list(self.bumps)
        for bumped in bumps:
            knows = worker.node_id in bumped.heard or worker.started > bumped.returned
            if bumped.returned < began and knows and computed < bumped.began:
                raise self.broken(
                    f"{worker.node_id} found k{key} at {began:.4f}, computed at {computed:.4f}, before a bump that "
                    f"began at {bumped.began:.4f} and had returned at {bumped.returned:.4f}"
                )
        self.tally["hits"] += 1

    def turned(self) -> None:
        with self.changed:
            self.n_turns += 1
            self.changed.notify_all()

    def failed(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def broken(self, what: str) -> Broken:
        return Broken("\n".join([what, *self.story[-40:]]))

    # --- steps

    def let_them_work(self) -> None:
        with self.changed:
            until = self.n_turns + self.chance.randint(1, _TURNS)
            self.changed.wait_for(lambda: self.n_turns >= until or self.failure is not None, 60.0)
            if self.failure is not None:
                raise self.failure
            if self.n_turns < until:
                raise self.broken("the nodes' threads stand still")

    def present(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.node is not None]

    def bump(self) -> None:
        worker = self.chance.choice(self.present())
        assert worker.node is not None
        began = time.monotonic()
        bump = worker.node.bump()
        self.bumped(worker, began, bump)

    def bumped(self, worker: Worker, began: float, bump: Bump) -> None:
        returned = time.monotonic()
        present = {other.node_id for other in self.present()}
        if not present <= {worker.node_id, *bump.heard}:
            raise self.broken(f"a bump by {worker.node_id} has reached {bump.heard} of {present}: {bump}")
        self.note(f"{worker.node_id} has bumped since {began:.4f}: {bump}")
        with self.changed:
            self.bumps.append(Bumped(began, returned, frozenset({worker.node_id, *bump.heard})))
        self.tally["bumps"] += 1

    def bump_twice(self) -> None:
        """Two nodes bump at once; neither may take the other's pages for newer than its own."""
        failures: list[BaseException] = []

        def one(worker: Worker) -> None:
            try:
                assert worker.node is not None
                began = time.monotonic()
                self.bumped(worker, began, worker.node.bump())
            except BaseException as error:  # noqa: BLE001  # told to the thread that waits
                failures.append(error)

        threads = [
            threading.Thread(target=one, args=(worker,))
            for worker in self.chance.choices(self.present(), k=2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def restart(self) -> None:
        """A node is away, maybe while there is a bump; what it has on disk it has from before."""
        worker = self.chance.choice(self.present())
        self.note(f"{worker.node_id} is closed")
        worker.close()
        if self.present() and self.chance.random() < 0.7:
            self.bump()
        worker.start()
        self.note(f"{worker.node_id} is there again")
        self.wait_met()
        self.tally["restarts"] += 1

    def flush(self) -> None:
        for worker in self.present():
            caching = worker.node._parts.caching
            if caching is not None and caching.tier is not None:
                caching.tier.flush(1.0)

    def wait_met(self) -> None:
        """Until every node knows every other, so that a bump that misses one is at fault."""
        until = time.monotonic() + 60
        n_present = len(self.present())
        while any(len(worker.node.members()) != n_present for worker in self.present()):
            if time.monotonic() > until:
                raise self.broken("the nodes have not met within 60 s")
            time.sleep(0.005)  # looked at again; nobody says so

    def end(self) -> None:
        """Nothing is published any more: after one more bump nobody finds anything."""
        for worker in self.present():
            worker.stop()
        if self.failure is not None:
            raise self.failure
        self.flush()
        self.bump()
        for worker in self.present():
            if n_hits := worker.check(list(range(N_KEYS))):
                raise self.broken(f"{worker.node_id} finds {n_hits} pages after the last bump")


def names(keys: list[int]) -> list[str]:
    return [f"k{key}" for key in keys]


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    with scratch() as folder:
        world = World(chance, tally, folder)
        steps = [(world.bump, 6.0), (world.bump_twice, 2.0), (world.restart, 1.5), (world.flush, 1.0)]
        try:
            for worker in world.workers:
                worker.start()
            world.wait_met()
            for _ in turns(chance.randint(6, 20), stop):
                world.let_them_work()
                drawn(chance, steps)()
            world.end()
        finally:
            for worker in world.workers:
                worker.close()


HUNT = Hunt(
    "epochs",
    "After a bump nothing that was published before it is found",
    run,
    effects=("hits", "bumps", "restarts", *_EFFECTS),
    enough=20,
)
