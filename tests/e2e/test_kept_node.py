"""``p2pkv node`` is killed, and its successor goes on with its pages, which a ``p2pkv keeper`` has: the real commands.

An engine that is attached reads in a loop, whoever is there. What it finds is always right, and found again when the
successor listens, in the memory where it lay.
"""

from __future__ import annotations

import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster import eventually
from p2pkv import Config, Node, SharedRegion
from p2pkv.testing.nursery import nursery
from p2pkv.testing.processes import ChildProcess
from patience import PATIENCE

_CLI = "p2pkv.cli"
_MEMORY = re.compile(r"^\S+ (\S+) \S+ \S+ (\d+) +/memfd:p2pkv-pool", re.MULTILINE)


def numbers(first: int, n: int) -> list[int]:
    """Return the names of ``n`` pages; each is its number over and over."""
    return list(range(first, first + n))


def keys_of(names: list[int]) -> list[str]:
    return [f"page-{name}" for name in names]


def rows_of(memory: NDArray[np.uint8], n: int, nbytes: int) -> NDArray[np.uint64]:
    return memory[: n * nbytes].view(np.uint64).reshape(n, -1)


class Command(ChildProcess):
    """One of p2pkv's commands, which says when it listens."""

    def __init__(self, *arguments: str) -> None:
        words = [sys.executable, "-m", _CLI, *arguments]
        super().__init__(words, name=f"p2pkv {arguments[0]}", popen=nursery(_CLI).popen)

    def wait_until_it_listens(self) -> None:
        assert b"listens" in self.read(60.0 * PATIENCE)

    @property
    def memories(self) -> set[str]:
        """The shared memories that it can write to, by their inodes."""
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return {inode for rights, inode in _MEMORY.findall(maps) if rights.startswith("rw")}


class Host:
    """A keeper, and the lives of a node, of which each is another process; all lie in a folder."""

    def __init__(self, folder: Path, pool_size: str, join: str) -> None:
        folder.mkdir(mode=0o700)
        self.engines = f"unix:{folder}/s"
        keeper = f"unix:{folder}/k"
        settings = {
            "node_id": "host",
            "join": join,
            "pool_size": pool_size,
            "attach_listen": self.engines,
            "keeper": keeper,
            "deadline": "20",
            "replicas": "2",
        }
        self._arguments = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        self._processes = [Command("keeper", keeper)]
        self._processes[0].wait_until_it_listens()

    @property
    def node(self) -> Command:
        """The life that was begun last."""
        return self._processes[-1]

    def begin_a_life(self) -> None:
        """Start the node, which need not wait until the one of before has ended; it listens when this returns."""
        self._processes.append(Command("node", *self._arguments))
        self.node.wait_until_it_listens()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.close()


class Engine:
    """Attached to the host's node, in this process; a thread of it reads what was published, over and over."""

    def __init__(self, path: str, *, batch: int, nbytes: int) -> None:
        self.batch, self.nbytes = batch, nbytes
        self.node = Node.start(Config(node_id="engine", attach=path, deadline=20.0, replicas=2))
        self._from = SharedRegion.create(batch * nbytes)
        self.node.register_address(self._from.address, self._from.nbytes, self._from)
        self._to = np.zeros(batch * nbytes, np.uint8)
        self.node.register_memory(self._to)
        self.published: list[int] = []
        self.wrong: list[int] = []
        self.n_hits = 0
        self.n_misses = 0
        self.all_found_at = 0.0
        """When the last batch began of which every page was a hit."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def publish(self, names: list[int]) -> None:
        assert self.publishes(names)
        self.published += names

    def publishes(self, names: list[int]) -> bool:
        """Whether the node takes them; it does not while the engine is not attached to it again."""
        rows = rows_of(self._from.array, len(names), self.nbytes)
        rows[:] = np.array(names, np.uint64)[:, None]
        return bool(self.node.publish(keys_of(names), rows.view(np.uint8)).all())

    def fetch(self, names: list[int]) -> int:
        """Return how many are found, and note which are wrong."""
        rows = rows_of(self._to, len(names), self.nbytes)
        rows[:] = 0
        hits = self.node.fetch(keys_of(names), rows.view(np.uint8), timeout=2.0).astype(bool)
        is_right = (rows == np.array(names, np.uint64)[:, None]).all(axis=1)
        self.wrong += [
            name for name, hit, right in zip(names, hits, is_right, strict=True) if hit and not right
        ]
        return int(hits.sum())

    def start_reading(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        chance = random.Random(1)
        while not self._is_over.is_set():
            names = chance.sample(self.published, self.batch)
            began = time.monotonic()
            n_hits = self.fetch(names)
            self.n_hits += n_hits
            self.n_misses += len(names) - n_hits
            if n_hits == len(names):
                self.all_found_at = began

    def has_found_all_since(self, when: float) -> bool:
        assert self._thread.is_alive()
        return self.all_found_at > when

    def stop_reading(self) -> None:
        self._is_over.set()
        self._thread.join()

    def close(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.node.close()


@contextmanager
def host_and_engine(
    folder: Path, other: Node, *, pool_size: str, batch: int, nbytes: int
) -> Iterator[tuple[Host, Engine]]:
    host = Host(folder / "host", pool_size, other.address)
    try:
        host.begin_a_life()
        engine = Engine(host.engines, batch=batch, nbytes=nbytes)
        try:
            yield host, engine
        finally:
            engine.close()
    finally:
        host.close()


@pytest.fixture
def other() -> Iterator[Node]:
    """Stand for another host."""
    with Node.start(Config(node_id="other", pool_size="1MiB", deadline=20.0, replicas=2)) as node:
        yield node


def found_by(other: Node, names: list[int], nbytes: int) -> int:
    """Return how many of the pages another host finds; each is what it was."""
    memory = np.zeros(len(names) * nbytes, np.uint8)
    with other.register_memory(memory):
        rows = rows_of(memory, len(names), nbytes)
        hits = other.fetch(keys_of(names), rows.view(np.uint8), timeout=5.0).astype(bool)
    assert (rows[hits] == np.array(names, np.uint64)[hits, None]).all()
    return int(hits.sum())


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_ends_is_followed_by_one_that_has_its_pages(
    tmp_path: Path, other: Node, way: signal.Signals
) -> None:
    with host_and_engine(tmp_path, other, pool_size="16MiB", batch=32, nbytes=16384) as (host, engine):
        for first in range(1, 129, 32):
            engine.publish(numbers(first, 32))
        names = list(engine.published)
        engine.start_reading()
        eventually(lambda: engine.has_found_all_since(0.0), 5.0)
        before = host.node.memories
        host.node.signal(way)
        host.begin_a_life()
        listens = time.monotonic()
        assert len(before & host.node.memories) == 2  # pages and their records were not copied
        eventually(lambda: engine.has_found_all_since(listens), 5.0)
        eventually(lambda: found_by(other, names, engine.nbytes) == len(names), 5.0)
        engine.stop_reading()
        assert sum(engine.fetch(names[at : at + 32]) for at in range(0, len(names), 32)) == len(names)
        fresh = numbers(1001, 32)
        eventually(lambda: engine.publishes(fresh), 10.0)
        assert engine.fetch(fresh) == 32
        assert engine.wrong == []


@pytest.mark.slow
def test_a_million_pages_are_served_again_by_a_successor(tmp_path: Path, other: Node) -> None:
    batch, nbytes, n = 4096, 4096, 1_000_000
    with host_and_engine(tmp_path, other, pool_size="3968MiB", batch=batch, nbytes=nbytes) as (host, engine):
        for first in range(0, n, batch):
            engine.publish(numbers(first + 1, min(batch, n - first)))
        engine.start_reading()
        eventually(lambda: engine.has_found_all_since(0.0), 5.0)
        before = host.node.memories
        host.node.signal(signal.SIGKILL)
        killed = time.monotonic()
        host.begin_a_life()
        listens = time.monotonic()
        some = random.Random(1).sample(engine.published, 1024)
        eventually(lambda: found_by(other, some, nbytes) == len(some), 60.0)
        found_elsewhere = time.monotonic()
        assert len(before & host.node.memories) == 2
        eventually(lambda: engine.has_found_all_since(listens), 5.0)
        found = engine.all_found_at
        engine.stop_reading()
        names = engine.published
        n_found = sum(engine.fetch(names[at : at + batch]) for at in range(0, n, batch))
        assert n_found == n
        assert engine.wrong == []
        print(
            f"{n:,} pages: the successor listens after {listens - killed:.2f} s, its engine finds all after "
            f"{found - killed:.2f} s, another host after {found_elsewhere - killed:.2f} s; "
            f"{engine.n_hits:,} hits and {engine.n_misses:,} misses beside, wrong: {len(engine.wrong)}"
        )


def test_a_keeper_says_where_it_listens_in_one_line() -> None:
    # An address of a socket has room for 107 bytes, and the folder that TMPDIR names may be most of them.
    with tempfile.TemporaryDirectory(prefix="p2pkv-", dir="/tmp") as folder:
        address = f"unix:{folder}/{'k' * 80}"  # longer than a terminal is wide where there is none
        keeper = Command("keeper", address)
        try:
            assert keeper.read(60.0 * PATIENCE).decode() == f"keeper listens at {address}\n"
        finally:
            keeper.close()
