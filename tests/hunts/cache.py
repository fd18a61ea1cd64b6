"""A hit is what was published under its key and not taken back since, whatever happens to pool and disk meanwhile.

One node with a small pool and a disk, sometimes with a second one that reads: keys are published again and again
with new bytes, retracted, cleared, evicted and promoted, by one thread and by several at once, while the disk is full,
broken, slow to open or hangs; and the node is closed and started again.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from hunts.cache_history import PAGE, History
from hunts.frame import Hunt, Stop, Tally
from hunts.schedules import Step, drawn, scratch, turns
from p2pkv import Config, Node
from p2pkv._native import FaultyFiles, FileCall, zstd_missing
from p2pkv.directory.membership.timing import SystemClock
from p2pkv.disk.store import LAYOUTS
from p2pkv.disk.tier import DiskTier
from p2pkv.errors import ConfigError
from p2pkv.testing.lateness import Lateness

N_KEYS = 160
"""Twice what the pool holds."""
POOL = 80 * PAGE
DISK = 24 << 20
DEADLINE = 2.0
_EFFECTS = {
    "suspensions": ["p2pkv_disk_suspensions_total", "p2pkv_disk_failed_opens_total"],
    "pages that the disk lost": ["p2pkv_disk_lost_pages_total"],
    "recovered pages": ["p2pkv_disk_recovered_pages_total"],
    "promoted pages": ["p2pkv_promoted_pages_total"],
    "evicted pages": ["p2pkv_evicted_pages_total"],
    "packed pages": ["p2pkv_packed_pages_total"],
}
"""What is felt of what is done to the node, and the counters that tell it."""


class WrongClock(SystemClock):
    """A clock of somebody who was told another time of day."""

    offset_ns = 0

    def wall_ns(self) -> int:
        return super().wall_ns() + self.offset_ns


class BreakableNode(Node):
    """A node whose clock may be wrong, and whose disk goes through ``_disk_faults`` if it is started with them."""

    _clock = WrongClock()


class Cache:
    """One schedule: the node, what was done to it, and what may be found."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        self.chance, self.tally = chance, tally
        self.history = History(tally)
        self.layout = chance.choice(LAYOUTS)
        has_zstd = not zstd_missing()
        settings = {
            "disk_path": str(folder),
            "disk_layout": self.layout,
            "disk_compression": "zstd" if has_zstd and chance.random() < 0.3 else "off",
            "compression": chance.choice(["off", "lossless", "auto"]),
            "disk_write": "on_evict" if chance.random() < 0.2 else "write_through",
            "disk_fsync": chance.choice(["never", "seal", "batch"]),
        }
        self.history.note(str(settings))
        self.config = Config(
            node_id="n", pool_size=POOL, buffer_size=0, disk_size=DISK, deadline=DEADLINE, **settings
        )
        self.memory = np.zeros((N_KEYS, PAGE), np.uint8)
        self.reader_memory = np.zeros((N_KEYS, PAGE), np.uint8)
        self.reader: Node | None = None
        self.faults = FaultyFiles()
        self.node = self.start()

    def start(self) -> Node:
        BreakableNode._disk_faults = self.faults
        try:
            # a reader that is there is met again, which knows pages of the boot before
            join = self.reader.address if self.reader is not None else ()
            node = BreakableNode.start(replace(self.config, join=join))
        finally:
            BreakableNode._disk_faults = None
        node.register_memory(self.memory)
        self.node = node
        self.meet()
        return node

    def meet(self) -> None:
        """Wait until the reader knows the node as it is now; before, it finds nothing there."""
        if self.reader is None:
            return
        until = time.monotonic() + 60
        boot = {member.node_id: member.boot_epoch for member in self.node.members()}["n"]
        while ("n", boot) not in {(member.node_id, member.boot_epoch) for member in self.reader.members()}:
            if time.monotonic() > until:
                raise self.history.broken("the reader has not met the node within 60 s")
            time.sleep(0.002)  # looked at again; nobody says so
            boot = {member.node_id: member.boot_epoch for member in self.node.members()}["n"]

    def close(self) -> None:
        self.faults.heal()
        if self.reader is not None:
            self.reader.close()
        self.close_node()

    def close_node(self) -> None:
        counted = self.node.counters()
        for effect, names in _EFFECTS.items():
            self.tally[effect] += int(sum(counted.get(name, 0.0) for name in names))
        self.node.close()

    def add_reader(self) -> None:
        if self.reader is not None:
            return
        self.history.note("a reader joins")
        self.reader = Node.start(
            Config(node_id="r", pool_size=POOL, buffer_size=0, deadline=DEADLINE, join=self.node.address)
        )
        self.reader.register_memory(self.reader_memory)
        self.meet()

    # --- steps

    def some(self, at_most: int = 24) -> list[int]:
        first = self.chance.randrange(N_KEYS)
        return [(first + i) % N_KEYS for i in range(self.chance.randint(1, at_most))]

    @contextmanager
    def in_time(self, what: str) -> Iterator[None]:
        with Lateness() as late:
            yield
        self.tally["calls in time"] += 1
        if late.seconds > DEADLINE + 0.1 + late.worst:
            raise self.history.broken(
                f"{what} took {late.seconds:.3f} s of {DEADLINE} s; the machine was {late}"
            )

    def publish(self) -> None:
        keys = self.some()
        with self.history.publishing(keys) as memory:
            self.memory[: len(keys)] = memory
            with self.in_time("publish"):
                self.node.publish(names(keys), self.memory[: len(keys)])

    def fetch(self) -> None:
        self.look(self.node, self.memory, self.some(48), "fetch")

    def fetch_all(self) -> None:
        for first in range(0, N_KEYS, 40):
            self.look(self.node, self.memory, list(range(first, first + 40)), "fetch")

    def fetch_remotely(self) -> None:
        if self.reader is not None:
            self.tally["hits of a peer"] += self.look(
                self.reader, self.reader_memory, self.some(48), "a peer's fetch"
            )

    def look(self, node: Node, memory: np.ndarray, keys: list[int], where: str) -> int:
        """Fetch, and ask the oracle; return how many were hits."""
        pages = memory[: len(keys)]
        pages[:] = 0
        began = time.monotonic()
        with self.in_time(where):
            hits = node.fetch(names(keys), pages)
        self.history.check(keys, pages, hits, began, where)
        return int(hits.sum())

    def exists(self) -> None:
        with self.in_time("exists"):
            (self.reader or self.node).exists(names(self.some(48)))

    def retract(self) -> None:
        keys = self.some()
        with self.history.taking_back(keys), self.in_time("retract"):
            self.node.retract(names(keys))

    def clear(self) -> None:
        with self.history.taking_back(None), self.in_time("clear"):
            self.node.clear()

    def flush(self) -> None:
        self.tier.flush(1.0)

    def break_disk(self) -> None:
        call = self.chance.choice(
            [FileCall.WRITE, FileCall.WRITE, FileCall.ALLOCATE, FileCall.SYNC, FileCall.READ]
        )
        error = self.chance.choice([errno.ENOSPC, errno.EIO])
        n = self.chance.choice([1, 3, 1 << 40])
        self.history.note(f"{call} fails with {errno.errorcode[error]}, {n} times")
        self.faults.fail(call, error, n)

    def hang_disk(self) -> None:
        call = self.chance.choice([FileCall.WRITE, FileCall.READ])
        self.history.note(f"{call} hangs")
        self.faults.hang(call)

    def heal(self) -> None:
        self.history.note("the disk is healed")
        self.faults.heal()

    def wait_recovered(self) -> None:
        self.heal()  # what is to be read may hang, or fail
        until = time.monotonic() + 60
        while self.tier._store is None or not self.tier._store.is_recovered:
            if time.monotonic() > until:
                raise self.history.broken("the disk was not recovered within 60 s")
            time.sleep(0.002)  # looked at again; nobody says so

    def restart(self) -> None:
        how = self.chance.choice(["", "", "broken", "slow", "refused"])
        self.history.note(f"restart {how}")
        if how == "broken" and self.tier._store is not None and self.tier._store.is_recovered:
            self.faults.heal()
            self.faults.fail(FileCall.WRITE, errno.ENOSPC)
        else:
            self.faults.heal()
        self.close_node()
        self.faults.heal()
        self.tally["restarts"] += 1
        if self.chance.random() < 0.3:
            hours = self.chance.choice([-24 * 365, -1, 0, 1])
            self.history.note(f"the clock is {hours} h off")
            BreakableNode._clock.offset_ns = hours * 3_600_000_000_000
        if how == "refused":
            self.refuse_other_layout()
        if how == "slow":
            self.faults.hang(FileCall.OPEN)
            healer = threading.Timer(self.chance.uniform(0.0, 0.3) + 2.0, self.faults.heal)
            healer.start()
        self.node = self.start()
        if how == "slow":
            for _ in range(self.chance.randint(0, 4)):
                self.chance.choice([self.publish, self.fetch, self.retract, self.clear])()
            healer.join()
        if self.chance.random() < 0.5:
            self.wait_recovered()
            self.fetch_all()

    def refuse_other_layout(self) -> None:
        other = self.chance.choice([layout for layout in LAYOUTS if layout != self.layout])
        config = Config(
            node_id="n",
            pool_size=POOL,
            buffer_size=0,
            disk_size=DISK,
            disk_path=self.config.disk_path,
            disk_layout=other,
        )
        try:
            Node.start(config).close()
        except ConfigError:
            self.tally["refused layouts"] += 1
        else:
            raise self.history.broken(f"a folder of layout {self.layout} was taken as one of {other}")

    @property
    def tier(self) -> DiskTier:
        assert self.node._parts.caching.tier is not None
        return self.node._parts.caching.tier

    def race(self) -> None:
        """Several threads publish, take back and look at the same few keys."""
        first = self.chance.randrange(N_KEYS - 8)
        keys = list(range(first, first + 8))
        # rarely: it takes all the other keys' pages too, and an empty cache proves nothing to those who look
        clears = self.chance.random() < 0.2
        self.history.note(f"race for {keys}")
        failures: list[BaseException] = []
        threads = [
            threading.Thread(
                target=self.run_racer, args=(keys, clears, self.chance.getrandbits(32), failures)
            )
            for _ in range(3)
        ]
        is_over = threading.Event()
        threads.append(threading.Thread(target=self.tell_disk, args=(keys, is_over)))
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join()
        is_over.set()
        threads[-1].join()
        self.history.note("the race is over")
        if failures:
            raise failures[0]
        self.look(self.node, self.memory, keys, "fetch")
        # without the pool's: what the disk has
        self.tier.flush(2.0)
        self.read_disk(keys)

    def tell_disk(self, keys: list[int], is_over: threading.Event) -> None:
        """Offer the pages to the disk all the time, as many publishers of the same pages do."""
        _, ids = self.node._cache.hash(names(keys))
        while not is_over.is_set():
            self.tier.note_published(ids)

    def read_disk(self, keys: list[int]) -> None:
        """Look at the disk itself, though the pool may have the pages."""
        store = self.tier._store
        if store is None:
            return
        pages = np.zeros((len(keys), PAGE), np.uint8)
        spans = np.stack([pages.ctypes.data + np.arange(len(keys)) * PAGE, np.full(len(keys), PAGE)], 1)
        _, ids = self.node._cache.hash(names(keys))
        began = time.monotonic()
        statuses = store.read(ids, spans.astype(np.int64), 2.0)
        self.history.check(keys, pages, (statuses == 1).astype(np.uint8), began, "the disk")
        self.tally["pages read from disk"] += len(keys)

    def run_racer(self, keys: list[int], clears: bool, seed: int, failures: list[BaseException]) -> None:
        chance = random.Random(seed)
        memory = np.zeros((len(keys), PAGE), np.uint8)
        try:
            with self.node.register_memory(memory):
                for _ in range(chance.randint(20, 60)):
                    self.race_once(keys, chance.random(), clears, memory)
        except BaseException as error:  # noqa: BLE001  # told to the thread that waits
            failures.append(error)

    def race_once(self, keys: list[int], what: float, clears: bool, memory: np.ndarray) -> None:
        if what < 0.5:
            with self.history.publishing(keys) as pages:
                memory[:] = pages
                self.node.publish(names(keys), memory)
        elif what < 0.75:
            with self.history.taking_back(keys):
                self.node.retract(names(keys))
        elif what < 0.8 and clears:
            with self.history.taking_back(None):
                self.node.clear()
        else:
            memory[:] = 0
            began = time.monotonic()
            hits = self.node.fetch(names(keys), memory)
            self.history.check(keys, memory, hits, began, "a racer's fetch")


def names(keys: list[int]) -> list[str]:
    return [f"k{key}" for key in keys]


def steps_of(cache: Cache) -> list[tuple[Step, float]]:
    return [
        (cache.publish, 12),
        (cache.fetch, 6),
        (cache.fetch_remotely, 6),
        (cache.exists, 2),
        (cache.retract, 4),
        (cache.clear, 0.5),
        (cache.flush, 3),
        (cache.race, 4),
        (cache.break_disk, 1),
        (cache.hang_disk, 0.3),
        (cache.heal, 2),
        (cache.wait_recovered, 0.5),
        (cache.add_reader, 0.5),
        (cache.restart, 1.5),
    ]


def run(seed: int, tally: Tally, stop: Stop) -> None:
    with scratch() as folder:
        run_in(folder / "disk", random.Random(seed), tally, stop)


def run_in(folder: Path, chance: random.Random, tally: Tally, stop: Stop) -> None:
    BreakableNode._clock.offset_ns = 0
    cache = Cache(chance, tally, folder)
    try:
        if chance.random() < 0.4:
            cache.add_reader()
        steps = steps_of(cache)
        for _ in turns(chance.randint(10, 40), stop):
            drawn(chance, steps)()
        cache.heal()
        cache.restart()
        cache.heal()
        cache.wait_recovered()
        cache.fetch_all()
        assert cache.faults.n_calls() > 0, "the disk does not go through the faults"
    finally:
        cache.close()


HUNT = Hunt(
    "cache",
    "A hit is what was published and not taken back since; calls end in time",
    run,
    effects=("hits", "hits of a peer", "restarts", "pages read from disk", "refused layouts", *_EFFECTS),
    enough=30,
)
