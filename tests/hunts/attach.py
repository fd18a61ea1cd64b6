"""What an engine withdraws is never served with other bytes, and what it published outlives it.

The hunter is an engine itself. Its publishes have deadlines of any length, its node is stopped at any moment, and as
soon as a call has returned the memory that was published from is overwritten, whatever the call said. A page is one
64-bit number over and over, so that a mixed one is seen. A second engine publishes until it is killed, and the node is
killed and started anew: keys of before stand for other numbers then.

The node and the engine that is killed are this file run as a program.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config, Node, SharedRegion
from p2pkv.testing.lateness import Lateness
from p2pkv.testing.processes import ChildProcess, say
from patience import PATIENCE

_TESTS = Path(__file__).resolve().parents[1]
_MOST_PAGES = 32
_LARGEST = 64 * 1024
_POISON = 0xDEAD_0000_0000_0001
"""What is written over published memory; no page is made of it."""
_AGAIN_S = 10.0
"""A node that is back is attached to within a second; starting it takes the rest."""


def child(role: str, path: str) -> ChildProcess:
    where = os.pathsep.join(map(str, (_TESTS, _TESTS / "support")))
    process = ChildProcess(
        [sys.executable, "-m", "hunts.attach", role, path],
        name=role,
        environ=os.environ | {"PYTHONPATH": where},
    )
    try:
        process.read(60.0 * PATIENCE)
    except BaseException:
        process.close()
        raise
    return process


def live(role: str, path: str) -> None:
    """Be the node until stdin ends, or the engine that publishes until it is killed."""
    if role == "host":
        with Node.start(Config(node_id="host", attach_listen=path, pool_size="256MiB")):
            say("ready")
            sys.stdin.read()
        return
    with Node.start(Config(node_id="victim", attach=path)) as node:
        region = SharedRegion.create(_LARGEST * _MOST_PAGES)
        node.register_address(region.address, region.nbytes, region)
        say("ready")
        for number in range(1 << 30):
            rows = rows_of(region.array, 8, 16384)
            values = [number * 8 + i + 1 for i in range(8)]
            rows[:] = np.array(values, np.uint64)[:, None]
            outcomes = node.publish([f"victim-{value}" for value in values], rows.view(np.uint8))
            say([value for value, outcome in zip(values, outcomes, strict=True) if outcome])


def rows_of(memory: NDArray[np.uint8], n: int, nbytes: int) -> NDArray[np.uint64]:
    return memory[: n * nbytes].view(np.uint64).reshape(n, -1)


class Hunter:
    """An engine that checks every byte."""

    def __init__(self, path: str, chance: random.Random, tally: Tally) -> None:
        self.path, self.chance, self.tally = path, chance, tally
        self.host = child("host", path)
        self.node = Node.start(Config(node_id="hunter", attach=path))
        self.region = SharedRegion.create(_LARGEST * _MOST_PAGES)
        self.node.register_address(self.region.address, self.region.nbytes, self.region)
        self.unshared = np.zeros(_LARGEST * _MOST_PAGES, np.uint8)
        self.node.register_memory(self.unshared)
        self.to = np.zeros(_LARGEST * _MOST_PAGES, np.uint8)
        self.node.register_memory(self.to)
        self.n = 0

    def publish(self) -> None:
        """Publish, overwrite, and look at what is served."""
        chance = self.chance
        n, nbytes = chance.randint(1, _MOST_PAGES), chance.choice([4096, 16384, _LARGEST])
        memory = self.region.array if chance.random() < 0.8 else self.unshared
        first = self.n + 1
        self.n += n
        keys = [f"page-{first + i}" for i in range(n)]
        rows = rows_of(memory, n, nbytes)
        rows[:] = np.arange(first, first + n, dtype=np.uint64)[:, None]
        timeout = 10 ** chance.uniform(-4.5, -1.5) if chance.random() < 0.8 else 5.0
        stopping = self._stop_soon() if chance.random() < 0.3 else None
        with Lateness() as late:
            outcomes = self.node.publish(keys, rows.view(np.uint8), timeout=timeout)
        rows[:] = _POISON
        if late.seconds - late.worst > timeout + 0.1 * PATIENCE:
            raise Broken(f"a publish with {timeout:.4f} s took {late.seconds:.3f} s, {late.worst:.3f} s late")
        if stopping is not None:
            stopping.join()
            self.host.resume()
        self.tally["late"] += int(n - outcomes.sum())
        self.check(keys, range(first, first + n), nbytes)

    def _stop_soon(self) -> threading.Thread:
        delay = self.chance.uniform(0, 0.002)

        def stop() -> None:
            time.sleep(delay)  # the random moment is the test
            self.host.stop()

        thread = threading.Thread(target=stop)
        thread.start()
        self.tally["stops"] += 1
        return thread

    def check(self, keys: list[str], values: range | list[int], nbytes: int) -> int:
        """Fetch pages, of which each must be all of one number; return how many there are."""
        rows = rows_of(self.to, len(keys), nbytes)
        rows[:] = 0
        outcomes = self.node.fetch(keys, rows.view(np.uint8), timeout=5.0)
        for row, value, outcome in zip(rows, values, outcomes, strict=True):
            if outcome and (row != np.uint64(value)).any():
                found = [hex(int(number)) for number in np.unique(row)[:4]]
                raise Broken(f"the page of {value:#x} is served with {found}")
        n_hits = int(outcomes.sum())
        self.tally["hits"] += n_hits
        return n_hits

    def kill_an_engine(self) -> None:
        """Have another engine publish and die: what it was told is published is there."""
        victim = child("victim", self.path)
        try:
            said = [victim.read(30.0 * PATIENCE) for _ in range(self.chance.randint(1, 30))]
        finally:
            victim.kill()
            victim.close()
        values = [int(value) for line in said for value in line.strip(b"[]\n").split(b",") if value.strip()]
        values = values[-_MOST_PAGES:]
        if not values:
            return
        keys = [f"victim-{value}" for value in values]
        until = time.monotonic() + 5.0 * PATIENCE
        while (n_hits := self.check(keys, values, 16384)) < len(values):
            if time.monotonic() > until:
                raise Broken(f"{n_hits} of {len(values)} pages of an engine that was killed are there")
        self.tally["killed"] += 1

    def kill_the_node(self) -> None:
        """Have the node die and come back: it is attached to again, and nothing of before is believed."""
        keys = [f"life-{i}" for i in range(8)]
        self._publish_surely(keys, range(1, 9))
        self.check(keys, range(1, 9), 4096)
        self.host.kill()
        self.host.close()
        self.host = child("host", self.path)
        values = range(10**9, 10**9 + 8)
        self._publish_surely(keys, values)
        self.check(keys, values, 4096)
        self.tally["returns"] += 1

    def _publish_surely(self, keys: list[str], values: range) -> None:
        rows = rows_of(self.region.array, len(keys), 4096)
        rows[:] = np.array(values, np.uint64)[:, None]
        until = time.monotonic() + _AGAIN_S * PATIENCE
        while not self.node.publish(keys, rows.view(np.uint8), timeout=1.0).all():
            if time.monotonic() > until:
                raise Broken(f"nothing can be published {_AGAIN_S:g} s after the node was there")

    def close(self) -> None:
        self.node.close()
        self.host.close(10.0)


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    folder = tempfile.mkdtemp(prefix="p2pkv-hunt-")
    try:
        hunter = Hunter(f"unix:{folder}/s", chance, tally)
        try:
            for _ in range(3):
                for _ in range(60):
                    if stop():
                        return
                    hunter.publish()
                if chance.random() < 0.5:
                    hunter.kill_an_engine()
            hunter.kill_the_node()
        finally:
            hunter.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


HUNT = Hunt(
    "attach",
    "what an engine withdraws is never served with other bytes, and what it published outlives it",
    run,
    effects=("hits", "late", "killed", "returns"),
)

if __name__ == "__main__":
    live(sys.argv[1], sys.argv[2])
