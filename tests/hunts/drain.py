"""What a node leaves to others when it drains is right, goes with what is taken back, and stays when it has let go.

As in the hunt `guests` nodes publish, fetch, prefetch, retract and clear the same keys all the time, each in a thread
of its own, the drainers too. Meanwhile nodes drain, one or two at a time, some with too little time; the namespace is
bumped, and the drainer or those who take over are closed in the middle. What is published to a node that drains is
garbage, which nobody may ever find. In the end a node drains that nothing is done to: what was used last there is found
with the others, whatever its next run takes back.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from hunts.frame import Hunt, Stop, Tally
from hunts.guests import Worker, World, names
from hunts.guests_history import N_KEYS
from hunts.schedules import drawn, scratch, turns
from p2pkv import ClosedError

LATE_S = 2.0
"""How much longer than its time a drain may take on a busy machine, where threads of all nodes share an interpreter."""
N_KEPT = 16


class Drainer(Worker):
    """A node that drains now and then, and its thread."""

    may_have_engine = False

    is_told_to = False  # from before it begins
    is_draining = False  # from then on nothing is stored

    def close(self) -> None:
        if self.node is not None and (counted := self.node.counters()):
            for effect, name in _EFFECTS.items():
                self.world.tally[effect] += int(counted.get(name, 0.0))
        super().close()
        self.is_told_to = self.is_draining = False

    def publish(self) -> None:
        if not self.is_draining:
            super().publish()
            return
        assert self.node is not None
        keys = self.some()
        memory = self.memory[: len(keys)]
        memory[:] = 0xEE
        if self.node.publish(names(keys), memory).any():
            raise self.world.broken(f"{self.node_id} has stored a page though it drains")
        self.world.tally["pages refused"] += len(keys)

    def take_back(self, keys: list[int] | None) -> None:
        try:
            super().take_back(keys)
        except ClosedError:
            if not self.is_told_to:
                raise
            self.world.tally["retractions refused"] += 1


class Drains(World):
    """One schedule."""

    def __init__(self, chance: random.Random, tally: Tally, folder: Path) -> None:
        super().__init__(chance, tally, folder, Drainer)

    def drain(self) -> None:
        """One or two nodes drain, while something else happens, and are started again."""
        n = 2 if len(self.workers) > 2 and self.chance.random() < 0.3 else 1
        drainers = self.chance.sample(self.workers, n)
        untils = [self.begin(worker, self.chance.choice([0.05, 0.5, 5.0])) for worker in drainers]
        self.chance.choices([self.wait, self.bump, self.close_other], [3, 1, 1])[0]()
        is_cut_off = self.chance.random() < 0.2
        for worker, until in zip(drainers, untils, strict=True):
            if not is_cut_off:
                self.await_drained(worker, until)
        if self.chance.random() < 0.5:
            self.let_them_work()  # it is a member that is read from, and stores nothing
        self.tally["drains cut off" if is_cut_off else "drains"] += n
        for worker in drainers:
            self.replace(worker)

    def begin(self, worker: Worker, seconds: float) -> float:
        assert isinstance(worker, Drainer)
        assert worker.node is not None
        self.note(f"{worker.node_id} drains for {seconds} s")
        worker.is_told_to = True
        worker.node.begin_drain(seconds)
        worker.is_draining = True
        return time.monotonic() + seconds + LATE_S

    def await_drained(self, worker: Worker, until: float) -> None:
        assert worker.node is not None
        while (drained := worker.node.drained) is None:
            if time.monotonic() > until:
                raise self.broken(f"{worker.node_id} has not drained in time")
            time.sleep(0.005)  # looked at again; nobody says so
        self.note(f"{worker.node_id} has drained: {drained}")
        if "failed" in drained.reason:
            raise self.broken(f"{worker.node_id} could not drain: {drained.reason}")
        self.adopted(worker)

    def adopted(self, leaver: Worker) -> None:
        """Note whose own its pages may be now: theirs who have a page of that key. A disk may have any."""
        for other in self.workers:
            if other is leaver or other.node is None:
                continue
            caching = other.node._parts.caching
            assert caching is not None
            there, _ = caching.pool.lookup(caching.cache.hash(names(list(range(N_KEYS))))[1])
            for key in range(N_KEYS) if other.disk else np.flatnonzero(there).tolist():
                self.history.adopt(key, leaver.node_id, [other.node_id])

    def wait(self) -> None:
        self.let_them_work()

    def close_other(self) -> None:
        """One that may be taking pages over is closed and started again."""
        candidates = [worker for worker in self.workers if not getattr(worker, "is_draining", False)]
        if candidates:
            self.replace(self.chance.choice(candidates))

    def replace(self, worker: Worker) -> None:
        self.note(f"{worker.node_id} is closed")
        worker.stop()
        self.n_closing += 1
        worker.close()
        self.adopted(worker)  # it may have let go just before
        self.wait_met()
        self.n_closing += 1
        worker.start()
        self.note(f"{worker.node_id} is there again")
        self.wait_met()
        worker.work()

    def end(self) -> None:
        for worker in self.workers:
            worker.stop()
        if self.failure is not None:
            raise self.failure
        for worker in self.workers:
            for pin in worker.pins:
                pin.release()
        self.leave_quietly(self.chance.choice(self.workers))

    def leave_quietly(self, worker: Worker) -> None:
        """Nothing is lost of what was used last, nor when the next run takes back all that it has."""
        assert worker.node is not None
        for i in range(0, 96, 8):  # the pool is full of what others need less
            self.publish_new(worker, f"old {i}", 8)
        keys = [key for i in range(0, N_KEPT, 8) for key in self.publish_new(worker, f"kept {i}", 8)]
        drained = worker.node.drain(20.0)
        self.note(f"{worker.node_id} has drained quietly: {drained}")
        worker.close()
        self.wait_met()
        # Room in one piece may cost others of the pages that have come: few, and none of those used last.
        gave_way = max(0, drained.n_handed_over - drained.n_adopted)  # guests from before are adopted as well
        if gave_way > 0.2 * drained.n_handed_over:
            raise self.broken(
                f"of {drained.n_handed_over} pages {gave_way} were gone before they were adopted"
            )
        self.find_all(keys, "after it had left")
        worker.start()
        self.wait_met()
        assert worker.node is not None
        worker.node.clear()
        self.find_all(keys, "after its next run had taken back all that it had")
        self.tally["quiet drains"] += 1

    def find_all(self, keys: list[str], when: str) -> None:
        until = time.monotonic() + 10
        for other in self.workers:
            if other.node is None:
                continue
            memory = other.memory[: len(keys)]
            while not (hits := other.node.fetch(keys, memory)).all():
                if time.monotonic() > until:
                    lost = [key for key, hit in zip(keys, hits, strict=True) if not hit]
                    raise self.broken(f"{other.node_id} does not find {lost} of a node that drained, {when}")
                time.sleep(0.01)  # a directory that is being told; nobody says when it was


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    with scratch() as folder:
        world = Drains(chance, tally, folder)
        try:
            world.start()
            for _ in turns(chance.randint(2, 6), stop):
                world.let_them_work()
                drawn(chance, [(world.drain, 5.0), (world.bump, 1.0), (world.restart, 0.5)])()
            world.end()
        finally:
            for worker in world.workers:
                worker.close()


_EFFECTS = {
    "pages taken over": 'p2pkv_drained_pages_total{outcome="handed_over"}',
    "pages adopted": "p2pkv_adopted_pages_total",
}

HUNT = Hunt(
    "drain",
    "What a node leaves to others when it drains is right, is taken back until it lets go, and stays",
    run,
    effects=(
        *("hits", "retractions", "bumps", "drains", "drains cut off", "quiet drains"),
        *("pages refused", "retractions refused", *_EFFECTS),
    ),
    enough=20,
)
