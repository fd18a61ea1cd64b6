"""A node that is closed, forgotten or forked while it is in use."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import pages
from cluster import Cluster, eventually
from p2pkv import ClosedError, Config, Node
from p2pkv.directory import announcer
from p2pkv.testing.lateness import Lateness, returns_within
from p2pkv.transports.base import Transport
from p2pkv.transports.faulty import Faults, FaultyTransport
from p2pkv.transports.native import TcpTransport
from pair import NBYTES, N, Pair, run_all
from patience import PATIENCE

BUFFER = 4 << 30
"""A receive buffer of which nothing is touched, so that it takes addresses and no memory; bytes."""
SOON = 2.0
"""Seconds a close may take with calls under way; a membership round and a good-bye nobody answers take 1."""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_node_closes_under_the_calls_of_many_threads(tmp_path: Path, transport: str) -> None:
    for _ in range(5):
        pair = Pair(tmp_path, transports=[transport])
        published = pair.publish()
        running = threading.Semaphore(0)
        took: list[float] = []

        def use(
            pair: Pair = pair, published: list[str] = published, running: threading.Semaphore = running
        ) -> None:
            memory = np.zeros((N, NBYTES), np.uint8)
            keys = [f"{threading.get_ident()}-{i}" for i in range(N)]
            pair.reader.register_memory(memory)
            running.release()
            try:
                while True:
                    pages.fill(memory, keys)
                    pair.reader.publish(keys, memory)
                    pair.reader.exists(keys)
                    outcomes = pair.reader.fetch(published, memory)
                    assert pages.wrong(memory, published, outcomes) == []
                    pair.reader.counters()
                    pair.reader.members()
                    pair.reader.retract(keys)
            except ClosedError:
                return

        def close(
            pair: Pair = pair, running: threading.Semaphore = running, took: list[float] = took
        ) -> None:
            for _ in range(6):
                running.acquire()
            with Lateness() as late:
                pair.reader.close()
                pair.reader.close()
            took.append(late.seconds - late.worst)

        run_all([use, use, use, use, use, use, close])
        assert took[0] < SOON
        pair.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_that_closes_costs_its_readers_misses_only(tmp_path: Path, transport: str) -> None:
    pair = Pair(tmp_path, transports=[transport])
    keys = pair.publish()
    assert pair.fetch_is_right(keys)
    closed = threading.Event()
    fetched = threading.Semaphore(0)

    def fetch() -> None:
        memory = np.zeros((N, NBYTES), np.uint8)
        with pair.reader.register_memory(memory):
            while not closed.is_set():
                with returns_within(0.5 + 0.1):
                    outcomes = pair.reader.fetch(keys, memory, timeout=0.5)
                assert pages.wrong(memory, keys, outcomes) == []
                fetched.release()

    def close() -> None:
        for _ in range(50):
            fetched.acquire()
        try:
            with returns_within(SOON):
                pair.owner.close()
        finally:
            closed.set()

    run_all([fetch, fetch, fetch, fetch, close])
    assert not pair.reader.fetch(keys, pair.destination).any()
    pair.close()


def close_under(node: Node, call: Callable[[], object]) -> None:
    """Close ``node`` while ``call``, which by itself would hang for a minute, waits inside."""
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(call())
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(0.3)  # the more surely it waits by now; nothing depends on it
    assert thread.is_alive()
    with returns_within(SOON):
        node.close()
    thread.join(SOON * PATIENCE)
    assert len(ended) == 1
    assert isinstance(ended[0], ClosedError) or not np.any(ended[0])


def test_closing_does_not_wait_for_evictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        announcer, "_IDLE_S", 3600.0
    )  # a close that waits out the thread's sleep hangs this test
    Pair(tmp_path, transports=["tcp"]).close()


def test_closing_does_not_wait_for_a_read_that_hangs(tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda: [FaultyTransport(TcpTransport(), Faults(drop=True))])
    keys = pair.publish()
    close_under(pair.reader, lambda: pair.reader.fetch(keys, pair.destination, timeout=60.0))
    pair.close()


@pytest.mark.parametrize("extra", [list, lambda: [FaultyTransport(TcpTransport())]], ids=["native", "python"])
def test_a_closed_node_is_collected(tmp_path: Path, extra: Callable[[], list[Transport]]) -> None:
    pair = Pair(tmp_path, extra, transports=["tcp"])
    assert pair.fetch_is_right(pair.publish())
    parts = weakref.ref(pair.reader._parts)
    pair.close()
    del pair
    gc.collect()
    assert parts() is None


def test_closing_does_not_wait_for_a_directory_that_hangs(cluster: Cluster) -> None:
    peer = cluster.start("peer")
    config = {"join": [cluster.join], "node_id": "reader", "pool_size": "1MiB", "replicas": 1}
    with Node.start(Config.load(config, environ={})) as node:
        keys = [f"key-{i}" for i in range(64)]  # about half of them are the peer's to know
        assert not node.exists(keys).any()
        peer.stop()
        close_under(node, lambda: node.exists(keys, timeout=60.0))


def shared_memory() -> list[str]:
    """Mappings of pools in this process, and descriptors that keep their memory."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:p2pkv" in line]
    opened = [str(fd) for fd in Path("/proc/self/fd").iterdir() if "memfd:p2pkv" in os.path.realpath(fd)]
    return mapped + opened


def mapped_bytes() -> int:
    (size,) = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_closed_node_has_given_its_memory_back_whoever_still_holds_it(
    tmp_path: Path, transport: str
) -> None:
    gc.collect()
    others = shared_memory()  # what pytest keeps of a test that failed
    before = mapped_bytes()
    gc.disable()
    try:
        pair = Pair(tmp_path, transports=[transport], buffer_size=BUFFER)
        keys = pair.publish()
        eventually(lambda: pair.fetch_is_right(keys), 10.0)  # a silent owner of entries costs a miss
        assert len(shared_memory()) >= len(others) + 4  # a mapping and a descriptor for each of the two
        assert mapped_bytes() > before + 2 * BUFFER
        pair.reader.close()
        pair.owner.close()
        assert shared_memory() == others
        assert mapped_bytes() < before + BUFFER
    finally:
        gc.enable()
    pair.close()


# processes

PROGRAM = """
import logging, os, sys, threading
logging.disable()  # on a busy machine membership warns that it came late
import numpy as np
from p2pkv import ClosedError, Config, Node
def start(name):
    return Node.start(Config(node_id=name, join=[{join!r}], secret_file={secret!r}, pool_size="1MiB"))
a, b = start("a"), start("b")
memory, other = np.full((8, 4096), 7, np.uint8), np.zeros((8, 4096), np.uint8)
a.register_memory(memory)
b.register_memory(other)
keys = [str(i) for i in range(8)]
assert a.publish(keys, memory).all()
while not b.fetch(keys, other).all():  # on a busy machine an owner may answer too late
    pass
assert (other == 7).all()
def use():
    try:
        while True:
            b.fetch(keys, other)
    except ClosedError:
        pass
"""


def run_program(pair: Pair, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    config = pair.reader.config
    program = PROGRAM.format(join=config.join_addresses[0], secret=config.secret_file) + code
    return subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize(
    "code",
    [
        "",
        "sys.exit(0)",
        "del a, b",
        "a.keep = a",
        "a.close()",
        "threading.Thread(target=use, daemon=True).start()",
    ],
    ids=["end", "exit", "deleted", "cycle", "one closed", "calls under way"],
)
def test_an_interpreter_that_ends_without_close_ends_cleanly(tmp_path: Path, code: str) -> None:
    pair = Pair(tmp_path)
    ended = run_program(pair, code, "-X", "dev")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert pair.fetch_is_right(pair.publish())
    pair.close()


FORKS = """
import multiprocessing, warnings
warnings.simplefilter("ignore")  # of forking with threads: that it is done anyway is the point here
child = os.fork()
if not child:
    {in_child}
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert b.fetch(keys, other).all()
assert a.publish([f"after-{{key}}" for key in keys], memory).all()
a.close()
b.close()
"""


@pytest.mark.parametrize(
    "in_child",
    ["pass", "a.close(); b.close()", "del a, b, memory, other; import gc; gc.collect()"],
    ids=["exits", "closes", "deletes"],
)
def test_a_forked_child_ends_cleanly_and_leaves_the_node_alone(tmp_path: Path, in_child: str) -> None:
    pair = Pair(tmp_path)
    ended = run_program(pair, FORKS.format(in_child=in_child))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert pair.fetch_is_right(pair.publish())
    pair.close()
