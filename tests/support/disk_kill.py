"""Kill writers of a disk store and see what is left; run as a program of one thread, so that it may fork.

The oracle is here, outside the killed process: the child says through a pipe which pages it has flushed, and
writes pages in the order of their numbers. After each kill a new store on the same folder must start, hold
every page that was flushed (but for the oldest, evicted for room), and serve no wrong byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from disk_pages import PAGE, hits, occupied, open_store, wait_recovered, write
from p2pkv import _native
from p2pkv.disk.store import DiskStore

CAPACITY = 8 << 20
SEGMENT = 1 << 20
MOST_IN_SEGMENT = {"off": SEGMENT // PAGE, "zstd": SEGMENT // (PAGE // 2)}
"""Pages."""
STEP = 24
"""Pages a write."""

Kind = tuple[str, str]
"""Layout and compression."""


def write_until_killed(store: DiskStore, first: int, said: int, lie: int) -> None:
    """Write pages from ``first`` on; say through ``said`` up to which they are flushed, and ``lie`` more."""
    for start in range(first, 1 << 40, STEP):
        write(store, range(start, start + STEP), flush=start % (3 * STEP) == 0, small=True)
        if start % (3 * STEP) == 0:
            os.write(said, (start + STEP + lie).to_bytes(8, "little"))


def open_here(path: Path, kind: Kind, faults: _native.FaultyFiles | None = None) -> DiskStore:
    layout, compression = kind
    return open_store(
        path,
        layout=layout,
        compression=compression,
        capacity=CAPACITY,
        bucket_size=SEGMENT,
        faults=faults,
        fsync="never",
    )


def child(path: Path, kind: Kind, first: int, said: int, plan: dict[str, int]) -> None:
    """Be the process that dies: at a call of the file system, or whenever the parent feels like it."""
    faults = None
    if plan["at_call"] >= 0:
        faults = _native.FaultyFiles()
        faults.kill_at(plan["at_call"], bool(plan["half"]))
    store = open_here(path, kind, faults)
    os.write(said, b"\0" * 8)
    write_until_killed(store, first, said, plan["lie"])


def run_one(path: Path, kind: Kind, first: int, plan: dict[str, int]) -> int:
    """Fork, let it write, kill it; return up to which page it had flushed."""
    heard, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        try:
            child(path, kind, first, said, plan)
        finally:
            os._exit(3)
    os.close(said)
    if plan["at_call"] < 0:
        os.read(heard, 8)  # it is open
        time.sleep(plan["after_us"] * 1e-6)  # the random moment is the test
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the writer ended by itself: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL, f"the writer crashed: {status}"
    said_so = b""
    while piece := os.read(heard, 1 << 16):
        said_so += piece
    os.close(heard)
    return max([first, *np.frombuffer(said_so, np.int64).tolist()])


def check(path: Path, kind: Kind, flushed: list[int], newest: int) -> list[int]:
    """Open what is left; return which of the flushed pages are there."""
    assert occupied(path) <= CAPACITY
    store = open_here(path, kind)
    wait_recovered(store)
    first = flushed[0] if flushed else 0
    present = set(hits(store, range(first, newest), small=True))
    assert store.stats()["bad_records"] == 0 or kind[0] != "bucket"
    kept = [number for number in flushed if number in present]
    # What is missing was evicted for room, oldest first. But a segment that was evicted while the scanner held it
    # is deleted later than the next one: the kill may come in between, and then it is back.
    youngest_missing = max((number for number in flushed if number not in present), default=-1)
    n_back = sum(number < youngest_missing for number in kept)
    assert n_back <= (MOST_IN_SEGMENT[kind[1]] if kind[0] == "bucket" else 0), (
        f"flushed pages are missing: {youngest_missing}, though {n_back} older ones are there"
    )
    if len(kept) < len(flushed):
        assert len(present) * PAGE > CAPACITY // 4, (
            f"flushed pages are missing: only {len(present)} are there"
        )
    assert store.close()
    assert occupied(path) <= CAPACITY
    return kept


def main(path: Path, kind: Kind, rounds: int, seed: int, lie: int = 0) -> dict[str, int]:
    """Kill ``rounds`` writers, one after the other on one folder."""
    chance = random.Random(seed)
    flushed: list[int] = []
    first, n_checked = 0, 0
    for number in range(rounds):
        by_call = number % 2 == 0
        plan = {
            "at_call": chance.randrange(0, 120 if kind[0] == "bucket" else 400) if by_call else -1,
            "lie": lie,
            "half": chance.randrange(2),
            "after_us": chance.randrange(0, 60_000),
        }
        try:
            end = run_one(path, kind, first, plan)
            newest = end + 6 * STEP
            flushed = check(path, kind, flushed + list(range(first, end)), newest)
        except BaseException:
            print(f"round {number}, plan {plan}, seed {seed}", file=sys.stderr)
            raise
        assert threading.active_count() == 1
        n_checked += len(flushed)
        first = newest
    return {"rounds": rounds, "pages_checked": n_checked}


if __name__ == "__main__":
    folder, layout, compression, *numbers = sys.argv[1:]
    print(json.dumps(main(Path(folder), (layout, compression), *map(int, numbers))))
