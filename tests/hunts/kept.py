"""A node that is killed, or told to end, goes on with its pages: none that was published is lost, none is another's.

The hunter is an engine that publishes through its host's node, whose memory a keeper has. The node is killed in the
middle of a publish, or ends as it should, and the next one goes on where it was; so does the keeper now and then, while
the node lives. Pages of every life are read by the engine and from another host, before, while and after the node is
away: each is one 64-bit number over and over. A bump takes back all that there is, in whatever life. Some nodes have a
disk as well, which finds again what it had, and must bring nothing back. While the
node is away the engine goes on with what lies in its pool: each page that was published is a hit, and none that a bump
has taken back meanwhile, which the node is not there to hear of.
"""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np

from hunts.attach_processes import VICTIM_NBYTES, VICTIM_PAGES, child, rows_of
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node, SharedRegion
from p2pkv.directory.view import node_key
from p2pkv.keeper.process import ProcessKeeper
from p2pkv.testing.processes import ChildProcess
from patience import PATIENCE

_LIVES = 4
_BATCH = VICTIM_PAGES
_NBYTES = VICTIM_NBYTES
_BACK_S = 30.0
"""From the start of a node to when others find all that it has: it is attached to within a second, and its pages are
announced; starting it takes the rest."""
_MOST_CHECKED = 64
"""Pages that are looked for after each life, those published last and some of all others."""


class Hunter:
    """Publishes, reads, and knows what has to be there."""

    def __init__(self, folder: str, chance: random.Random, tally: Tally) -> None:
        self.chance, self.tally = chance, tally
        self.path = f"unix:{folder}/s"
        self.keeper_path = f"{folder}/k"
        self.disk = f"{folder}/disk" if chance.random() < 0.5 else ""
        tally["disks"] += bool(self.disk)
        self.keeper = self._start_keeper()
        self.other = child("other")
        self.join = str(self.other.answer(60.0 * PATIENCE))
        self.n_adopted = self._start_host()
        self.node = Node.start(Config(node_id="hunter", attach=self.path, replicas=1))
        self.region = SharedRegion.create(_BATCH * _NBYTES)
        self.node.register_address(self.region.address, self.region.nbytes, self.region)
        self.to = np.zeros(_MOST_CHECKED * _NBYTES, np.uint8)
        self.node.register_memory(self.to)
        self.n = 0
        self.published: list[int] = []
        """Numbers of pages that have to be found."""
        self.taken_back: list[int] = []

    def _start_keeper(self) -> ChildProcess:
        keeper = child("keeper", self.keeper_path)
        keeper.read(60.0 * PATIENCE)
        return keeper

    def _start_host(self) -> int:
        self.host = child("host", self.path, self.join, f"unix:{self.keeper_path}", self.disk)
        return int(self.host.read(60.0 * PATIENCE))

    def publish(self, timeout: float) -> None:
        values = list(range(self.n + 1, self.n + 1 + _BATCH))
        self.n += _BATCH
        rows = rows_of(self.region.array, _BATCH, _NBYTES)
        rows[:] = np.array(values, np.uint64)[:, None]
        outcomes = self.node.publish([_key(value) for value in values], rows.view(np.uint8), timeout=timeout)
        self.published += [value for value, outcome in zip(values, outcomes, strict=True) if outcome]

    def found(self, values: list[int]) -> set[int]:
        """Return which are found here; whatever is, is what it was."""
        if not values:
            return set()
        rows = rows_of(self.to, len(values), _NBYTES)
        rows[:] = 0
        outcomes = self.node.fetch([_key(value) for value in values], rows.view(np.uint8), timeout=5.0)
        for row, value, outcome in zip(rows, values, outcomes, strict=True):
            if outcome and (row != np.uint64(value)).any():
                raise Broken(f"page {value} is served with {np.unique(row)[:4].tolist()}")
        return {value for value, outcome in zip(values, outcomes, strict=True) if outcome}

    def found_elsewhere(self, values: list[int]) -> set[int]:
        """Return which another host finds."""
        found: set[int] = set()
        for first in range(0, len(values), _BATCH):
            self.other.send("fetch", keys=[_key(value) for value in values[first : first + _BATCH]])
            for key, numbers in self.other.answer(30.0 * PATIENCE).items():
                if numbers != [value := int(key.removeprefix("page-"))]:
                    raise Broken(f"page {value} is served with {numbers} on another host")
                found.add(value)
        return found

    def end_a_life(self) -> None:
        """Kill the node within a publish, or have it end; begin the next life, and look for everything."""
        if self.chance.random() < 0.3:
            self.keeper.kill()
            self.keeper.close()
            self.keeper = self._start_keeper()  # which the node gives the memory again
            self._wait_for_keeper()
        if self.chance.random() < 0.7:
            dying = threading.Thread(target=self._kill_soon)
            dying.start()
            while dying.is_alive():
                self.publish(5.0)
            dying.join()
            self.tally["killed"] += 1
        else:
            self.host.close(30.0 * PATIENCE)
            self.tally["ended"] += 1
        self.host.close()
        self.check_while_away()
        self.n_adopted = self._start_host()
        self.check()

    def _wait_for_keeper(self) -> None:
        """Wait until the node has handed its memory to a keeper that was restarted."""
        visitor = ProcessKeeper(self.keeper_path, f"{node_key('host'):016x}")
        until = time.monotonic() + _BACK_S * PATIENCE
        while (memory := visitor.take()) is None:
            if time.monotonic() > until:
                raise Broken("a keeper that was restarted is not given the memory again")
            time.sleep(0.01)
        memory.close()
        visitor.close()
        self.tally["keepers"] += 1

    def _kill_soon(self) -> None:
        time.sleep(self.chance.uniform(0, 0.03))  # the random moment is the test
        self.host.kill()

    def _some(self) -> list[int]:
        last, rest = self.published[-_MOST_CHECKED // 2 :], self.published[: -_MOST_CHECKED // 2]
        return last + self.chance.sample(rest, min(len(rest), _MOST_CHECKED // 2))

    def check_while_away(self) -> None:
        """Find all that a dead node's kept pool has, and nothing that a bump took back meanwhile."""
        until = time.monotonic() + _BACK_S * PATIENCE
        while self.node.counters()["p2pkv_attached"]:
            if time.monotonic() > until:
                raise Broken("an engine does not notice that its node has gone")
            time.sleep(0.01)  # looked at again; nobody says so
        self._find_all(self.found, "by an engine whose node is away, though its memory is kept")
        self.tally["away"] += 1
        if self.chance.random() < 0.3:
            self.other.send("bump")
            self.other.answer(30.0 * PATIENCE)
            if still := self.found(self._some()):
                raise Broken(f"{len(still)} pages are found that a bump took back while their node was away")
            self._taken_back()

    def _taken_back(self) -> None:
        self.taken_back += self.published
        self.published = []
        self.tally["bumps"] += 1

    def _find_all(self, find: Callable[[list[int]], set[int]], how: str) -> None:
        wanted = self._some()
        until = time.monotonic() + _BACK_S * PATIENCE
        while missing := set(wanted) - find(wanted):
            if time.monotonic() > until:
                raise Broken(f"{len(missing)} of {len(wanted)} pages are not found {how}")
        self.tally["found"] += len(wanted)

    def check(self) -> None:
        self._find_all(self.found, "by an engine of the node's successor")
        self._find_all(self.found_elsewhere, "by others of a node's successor")
        gone = self.chance.sample(self.taken_back, min(len(self.taken_back), _MOST_CHECKED))
        if gone and (still := self.found(gone) | self.found_elsewhere(gone)):
            raise Broken(f"{len(still)} pages are found that a bump took back in an earlier life")

    def bump(self) -> None:
        """Take everything back."""
        if self.node.bump(timeout=10.0 * PATIENCE).unreached:
            return
        self._taken_back()

    def close(self) -> None:
        self.node.close()
        del self.node, self.region
        gc.collect()  # a closed node is in cycles, and keeps what it was shown until they are looked for
        for one in (self.host, self.other):
            one.close(10.0)
        self.keeper.kill()
        self.keeper.close()


def _key(value: int) -> str:
    return f"page-{value}"


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="p2pkv-hunt-", ignore_cleanup_errors=True) as folder,
        closing(Hunter(folder, chance, tally)) as hunter,
    ):
        for _ in range(_LIVES):
            for _ in range(chance.randint(1, 12)):
                hunter.publish(5.0)
            if chance.random() < 0.3:
                hunter.bump()
                hunter.publish(5.0)
            hunter.end_a_life()
            if stop():
                return


HUNT = Hunt(
    "kept",
    "a node that is killed or ends goes on with its pages: none is lost, and none is another's",
    run,
    effects=("killed", "ended", "found", "away", "bumps", "keepers", "disks"),
)
