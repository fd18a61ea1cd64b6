"""What its publishers took back, or a bump ended, is found nowhere, wherever it was brought; pins bound and end.

Some nodes, with disks or without, publish, fetch, prefetch, pin, hand over, retract and clear the same keys all the
time, each in a thread of its own, in pools that hold less than all, and bring what they have fetched a few times, as
hot guests. Some have an engine attached, which fetches too, and finds in its node's pool what that brings for it.
Meanwhile the namespace is bumped, and nodes are closed and started again. Every page says of which key and version it
is, and when that was made. In the end pins are held against a flood of new pages, and must end.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hunts.frame import Broken, Hunt, Stop, Tally
from hunts.guests_history import N_KEYS, PAGE, Bumped, History
from hunts.hot_guests import HotEngine, hot_guests_of
from hunts.schedules import drawn, scratch, turns
from p2pkv import Config, Node, Pin, Prefetch, PrefetchOutcome
from p2pkv.cache.hot_guests import HotGuests

POOL = 96 * PAGE
BATCH = 8
DEADLINE = 4.0
PIN_SHARE = 0.25
HOT_ROOM = 16 * PAGE
GUESTS_OF_ENGINES = "guests found by engines"
_EFFECTS = {
    "pages brought": 'p2pkv_prefetched_pages_total{outcome="brought"}',
    "bytes brought from elsewhere": "p2pkv_prefetched_bytes_total",
    "hot pages brought": 'p2pkv_hot_pages_total{outcome="brought"}',
    GUESTS_OF_ENGINES: GUESTS_OF_ENGINES,
    "guests taken back": "p2pkv_taken_back_guests_total",
    "pages handed over": 'p2pkv_handed_over_pages_total{outcome="accepted"}',
    "pages pinned": 'p2pkv_pinned_pages_total{outcome="pinned"}',
    "evicted pages": "p2pkv_evicted_pages_total",
}
"""What nodes feel of what is done to them, and the counters that tell it."""


class Worker:
    """A node, and the thread that uses it while it is there."""

    may_have_engine = True

    def __init__(self, world: World, node_id: str, disk: Path | None) -> None:
        self.world = world
        self.node_id = node_id
        self.chance = random.Random(world.chance.getrandbits(32))
        self.memory = np.zeros((N_KEYS, PAGE), np.uint8)
        self.disk = {} if disk is None else {"disk_size": 8 << 20, "disk_path": str(disk)}
        self.started = 0.0
        self.node: Node | None = None
        self.hot: HotGuests | None = None
        self.has_engine = self.may_have_engine and self.chance.random() < 0.5
        self.engine: HotEngine | None = None
        self.thread: threading.Thread | None = None
        self.is_over = threading.Event()
        self.pins: list[Pin] = []
        self.prefetches: list[Prefetch] = []

    def start(self) -> None:
        """Start the node; its thread is started when all have met."""
        self.started = time.monotonic()
        others = [other.node.address for other in self.world.workers if other.node is not None]
        self.node = Node.start(
            Config(
                node_id=self.node_id,
                pool_size=POOL,
                buffer_size=0,
                deadline=DEADLINE,
                pin_share=PIN_SHARE,
                transports=self.world.transports,
                join=others,
                **self.disk,
                **(HotEngine.host_settings(self.world.folder, self.node_id) if self.has_engine else {}),
            )
        )
        self.node.register_memory(self.memory)
        self.hot = hot_guests_of(self.node, HOT_ROOM)
        if self.has_engine:
            self.engine = HotEngine(self.node, self.world.transports, (N_KEYS, PAGE))

    def work(self) -> None:
        self.is_over.clear()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def stop(self) -> None:
        self.is_over.set()
        if self.thread is not None:
            self.thread.join()
        self.thread = None

    def close(self) -> None:
        self.stop()
        if self.node is None:
            return
        counted = self.node.counters()
        if self.engine is not None:
            counted = counted | {GUESTS_OF_ENGINES: float(self.engine.n_guests_found)}
            self.engine.node.close()
            self.engine = None
        for effect, name in _EFFECTS.items():
            self.world.tally[effect] += int(counted.get(name, 0.0))
        prefetches, self.prefetches, self.pins = self.prefetches, [], []
        if self.hot is not None:
            self.hot.close()
            self.hot = None
        self.node.close()
        self.node = None
        for prefetch in prefetches:
            if not prefetch.done():
                raise self.world.broken(f"{self.node_id} is closed, and a prefetch of it goes on")

    def run(self) -> None:
        steps: list[tuple[Callable[[], None], float]] = [
            (self.publish, 5),
            (self.fetch, 6),
            (self.fetch_attached, 6 * self.has_engine),
            (self.prefetch, 5),
            (self.hand_over, 1),
            (self.bring_hot, 5),
            (self.retract, 4),
            (self.clear, 0.2),
            (self.pin, 1.5),
            (self.release, 1),
        ]
        what, weights = zip(*steps, strict=True)
        try:
            while not self.is_over.is_set():
                self.chance.choices(what, weights)[0]()
                self.world.turned()
        except BaseException as error:  # noqa: BLE001  # told to the thread that waits
            self.world.failed(error)

    def some(self) -> list[int]:
        # more often of a few, so that several nodes have to do with the same
        first = self.chance.randrange(N_KEYS) if self.chance.random() < 0.4 else self.chance.randrange(16)
        return [(first + i) % N_KEYS for i in range(self.chance.randint(1, BATCH))]

    def publish(self) -> None:
        assert self.node is not None
        keys, epoch = self.some(), self.node.epoch
        memory = self.memory[: len(keys)]
        memory[:] = self.world.history.publish(keys, self.node_id)
        self.node.publish(names(keys), memory, epoch=epoch)

    def fetch(self) -> None:
        assert self.node is not None
        self.check(self.some(), self.node, self.memory)

    def fetch_attached(self) -> None:
        """Have this node's engine fetch, to which all holds that holds for its node."""
        assert self.engine is not None
        self.check(self.some(), self.engine.node, self.engine.memory)

    def check(self, keys: list[int], node: Node, memory: np.ndarray) -> None:
        """Fetch, and judge what is found."""
        memory = memory[: len(keys)]
        began = time.monotonic()
        hits = node.fetch(names(keys), memory)
        for key, page, is_hit in zip(keys, memory, hits, strict=True):
            flaw = self.world.history.flaw(key, page, began, self.node_id, self.started) if is_hit else None
            if flaw is not None:
                raise self.world.broken(f"{self.node_id} found k{key}: {flaw}")
        self.world.tally["hits"] += int(hits.sum())

    def prefetch(self) -> None:
        assert self.node is not None
        prefetch = self.node.prefetch(names(self.some()), timeout=self.chance.choice([0.05, 5.0, 30.0]))
        how = self.chance.random()
        if how < 0.1:
            prefetch.close()
        elif how < 0.7:
            self.await_done(prefetch)
        self.prefetches = [one for one in self.prefetches if not one.done()] + [prefetch]

    def bring_hot(self) -> None:
        assert self.hot is not None
        if self.engine is not None:
            self.engine.tell()
        self.hot.turn()
        if (nbytes := self.hot.readings()["p2pkv_hot_guest_bytes"]) > HOT_ROOM:
            raise self.world.broken(
                f"{self.node_id} has {nbytes:.0f} bytes of hot guests, and room for {HOT_ROOM}"
            )

    def await_done(self, prefetch: Prefetch) -> None:
        if not prefetch.wait(60.0):
            raise self.world.broken(f"{self.node_id} has not ended a prefetch within 60 s")
        if (prefetch.outcomes == PrefetchOutcome.PENDING).any():
            raise self.world.broken(f"{self.node_id} says that a prefetch is over whose pages are pending")

    def hand_over(self) -> None:
        assert self.node is not None
        other = self.chance.choice(self.world.workers)
        if other is not self:
            self.node.hand_over(names(self.some()), other.node_id)

    def retract(self) -> None:
        self.take_back(self.some())

    def clear(self) -> None:
        self.take_back(None)

    def take_back(self, keys: list[int] | None) -> None:
        assert self.node is not None
        before, n_closing = self.unheard(), self.world.n_closing
        if keys is None:
            self.node.clear()
        else:
            self.node.retract(names(keys))
        # of a node that is just leaving some may know already, and not tell it, while others still read from it
        is_leaving = n_closing % 2 or n_closing != self.world.n_closing
        is_doubtful = is_leaving or self.unheard() != before
        self.world.history.take_back(keys, self.node_id, is_doubtful=bool(is_doubtful))
        self.world.tally["retractions that somebody did not hear" if is_doubtful else "retractions"] += 1

    def unheard(self) -> float:
        assert self.node is not None
        return self.node.counters().get("p2pkv_unheard_take_backs_total", 0.0)

    def pin(self) -> None:
        assert self.node is not None
        self.pins.append(self.node.pin(names(self.some()), self.chance.choice([0.02, 0.2, 3.0])))
        self.check_pins()

    def release(self) -> None:
        if self.pins:
            self.pins.pop(self.chance.randrange(len(self.pins))).release()

    def check_pins(self) -> None:
        assert self.node is not None
        counted = self.node.counters()
        if counted["p2pkv_pins_bytes"] > PIN_SHARE * POOL:
            raise self.world.broken(
                f"{self.node_id} has pinned {counted['p2pkv_pins_bytes']:.0f} bytes of {POOL}"
            )
        if counted.get('p2pkv_unpublished_pages_total{reason="no_room"}', 0):
            raise self.world.broken(f"{self.node_id} had no room for what was published")


class World:
    """One schedule: the nodes, and what is done to all of them."""

    def __init__(
        self, chance: random.Random, tally: Tally, folder: Path, worker: type[Worker] = Worker
    ) -> None:
        self.chance, self.tally, self.folder = chance, tally, folder
        self.transports = chance.choice(["tcp", "shm"])
        self.history = History()
        self.changed = threading.Condition()
        self.n_turns = 0
        self.n_closing = 0  # odd while a node is leaving
        self.failure: BaseException | None = None
        self.story: list[str] = []
        self.workers: list[Worker] = []
        for i in range(chance.randint(2, 4)):
            disk = folder / f"disk{i}" if chance.random() < 0.5 else None
            self.workers.append(worker(self, f"n{i}", disk))

    def note(self, text: str) -> None:
        self.story.append(f"{time.monotonic():.4f} {text}")

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

    def start(self) -> None:
        for worker in self.workers:
            worker.start()
        self.wait_met()
        for worker in self.workers:
            worker.work()

    def let_them_work(self) -> None:
        with self.changed:
            until = self.n_turns + self.chance.randint(10, 60)
            self.changed.wait_for(lambda: self.n_turns >= until or self.failure is not None, 120.0)
            if self.failure is not None:
                raise self.failure
            if self.n_turns < until:
                raise self.broken("the nodes' threads stand still")

    def bump(self) -> None:
        worker = self.chance.choice(self.workers)
        assert worker.node is not None
        with self.history.lock:
            began = self.history.last_bump = time.monotonic()
        bump = worker.node.bump()
        returned = time.monotonic()
        self.note(f"{worker.node_id} has bumped since {began:.4f}: {bump}")
        with self.history.lock:
            self.history.bumps.append(Bumped(began, returned, frozenset({worker.node_id, *bump.heard})))
        self.tally["bumps"] += 1

    def restart(self) -> None:
        """A node is away; others keep what they have of it, until it takes that back."""
        worker = self.chance.choice(self.workers)
        self.note(f"{worker.node_id} is closed")
        worker.stop()
        self.n_closing += 1
        worker.close()
        self.wait_met()
        self.n_closing += 1
        worker.start()
        self.note(f"{worker.node_id} is there again")
        self.wait_met()
        worker.work()
        self.tally["restarts"] += 1

    def wait_met(self) -> None:
        """Until every node knows every other as it is now: what is told to members is told to all then."""
        until = time.monotonic() + 60
        while not self.have_met():
            if time.monotonic() > until:
                raise self.broken("the nodes have not met within 60 s")
            time.sleep(0.005)  # looked at again; nobody says so

    def have_met(self) -> bool:
        nodes = [worker.node for worker in self.workers if worker.node is not None]
        views = {frozenset((m.node_id, m.boot_epoch) for m in node.members()) for node in nodes}
        return len(views) == 1 and len(views.pop()) == len(nodes)

    def end(self) -> None:
        for worker in self.workers:
            worker.stop()
        if self.failure is not None:
            raise self.failure
        for worker in self.workers:
            for prefetch in worker.prefetches:
                worker.await_done(prefetch)
            for pin in worker.pins:
                pin.release()
            worker.check_pins()
            self.flood(worker)

    def flood(self, worker: Worker) -> None:
        """What is pinned outlives a flood of new pages, which finds room, and goes with the next when it is over."""
        node = worker.node
        assert node is not None
        rows = self.publish_new(worker, "pinned", 8)
        ttl = self.chance.choice([0.3, 30.0])
        pin = node.pin(rows, ttl)
        n_pinned = int(pin.outcomes.sum())
        for i in range(20):
            self.publish_new(worker, f"flood {i}", 8)
        if ttl > 1 and (n_held := pin.release()) < n_pinned and pin.ends > time.monotonic():
            raise self.broken(f"{worker.node_id} kept {n_held} of {n_pinned} pages that were pinned")
        until = time.monotonic() + 10
        while node.counters()["p2pkv_pins_bytes"] or self.holds_any(worker, rows):
            if time.monotonic() > until:
                raise self.broken(f"{worker.node_id} keeps pages whose pin of {ttl} s is over")
            self.publish_new(worker, f"after {time.monotonic()}", 8)
        self.tally["floods"] += 1

    def publish_new(self, worker: Worker, name: str, n: int) -> list[str]:
        assert worker.node is not None
        keys = [f"{name} {i}" for i in range(n)]
        worker.node.publish(keys, worker.memory[:n])
        worker.check_pins()
        return keys

    def holds_any(self, worker: Worker, keys: list[str]) -> bool:
        assert worker.node is not None
        caching = worker.node._parts.caching
        assert caching is not None
        found, _ = caching.pool.lookup(caching.cache.hash(keys)[1])
        return bool(found.any())


def names(keys: list[int]) -> list[str]:
    return [f"k{key}" for key in keys]


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    with scratch() as folder:
        world = World(chance, tally, folder)
        try:
            world.start()
            for _ in turns(chance.randint(4, 12), stop):
                world.let_them_work()
                drawn(chance, [(world.bump, 2.0), (world.restart, 1.5)])()
            world.end()
        finally:
            for worker in world.workers:
                worker.close()


HUNT = Hunt(
    "guests",
    "What its publishers took back, or a bump ended, is found nowhere; pins bound and end",
    run,
    effects=("hits", "retractions", "bumps", "restarts", "floods", *_EFFECTS),
    enough=20,
)
