"""What was taken back, and said to be written, is not found after SIGKILL; what was flushed and not taken back is.

The process that dies is this file run as a program: it publishes all its keys with the next version, flushes, says so,
takes some or all back, waits until that is written, says so, and so on until it is killed.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from disk_pages import keys_of, spans_of
from hunts.frame import Broken, Hunt, Stop, Tally
from p2pkv import Config
from p2pkv.disk.store import LAYOUTS, DiskOptions, DiskStore
from p2pkv.disk.tier import DiskTier
from p2pkv.pool import Pool

_TESTS = Path(__file__).resolve().parents[1]
N_KEYS = 24
PAGE = 4096
CAPACITY = 8 << 20
KEYS = keys_of(range(N_KEYS))


def live(folder: str, layout: str, seed: int) -> None:
    """Be the process that is killed."""
    chance = random.Random(seed)
    config = Config(node_id="n1", namespace="ns", disk_path=folder, disk_size=CAPACITY, disk_layout=layout)
    pool = Pool(4 * N_KEYS * PAGE, granule=4096, owner=7, boot=9)
    tier = DiskTier(config, pool, own_key=7, boot=9)
    for version in range(1, 1 << 30):
        memory = np.full((N_KEYS, PAGE // 4), version, np.uint32).view(np.uint8)
        pool.publish(KEYS, spans_of(memory).reshape(-1, 1, 2))
        tier.note_published(KEYS)
        if not tier.flush(60.0):
            return
        print("flushed", version, flush=True)
        chosen = sorted(chance.sample(range(N_KEYS), chance.randint(1, N_KEYS)))
        is_all = chance.random() < 0.3
        for _ in range(2):  # as the cache does it
            if is_all:
                tier.clear()
                pool.purge()
            else:
                tier.forget(KEYS[chosen])
                pool.retract(KEYS[chosen])
        if not tier.wait_cleared(60.0):
            return
        print("took back", *(range(N_KEYS) if is_all else chosen), flush=True)


def kill(folder: str, layout: str, seed: int, n_said: int, delay: float) -> list[str]:
    """Let it live until it has said so much, and a little longer; return all it said."""
    child = subprocess.Popen(
        [sys.executable, "-m", "hunts.cache_killed", folder, layout, str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (_TESTS, _TESTS / "support")))},
    )
    assert child.stdout is not None
    said = [child.stdout.readline() for _ in range(n_said)]
    time.sleep(delay)  # the random moment is the test
    child.kill()
    said += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    return [line for line in said if line.endswith("\n")]


def expected(said: list[str]) -> tuple[int, list[int], list[bool]]:
    """Return the last version flushed; for each key the youngest that may be found no more, and whether one must be."""
    flushed, taken, must = 0, [0] * N_KEYS, [False] * N_KEYS
    for line in said:
        what, *numbers = line.replace("took back", "took").split()
        if what == "flushed":
            flushed = int(numbers[0])
            must = [True] * N_KEYS
        else:
            for key in map(int, numbers):
                taken[key], must[key] = flushed, False
    if said and said[-1].startswith("flushed"):
        must = [False] * N_KEYS  # the next retraction may have been under way
    return flushed, taken, must


def run(seed: int, tally: Tally, stop: Stop) -> None:
    chance = random.Random(seed)
    layout = chance.choice(LAYOUTS)
    folder = tempfile.mkdtemp(prefix="p2pkv-hunt-")
    try:
        said = kill(folder, layout, seed, chance.randint(1, 40), chance.uniform(0, 0.02))
        flushed, taken, must = expected(said)
        store = DiskStore(folder, DiskOptions(capacity=CAPACITY, layout=layout), node_id="n1", namespace="ns")
        try:
            while not store.is_recovered:
                time.sleep(0.001)  # looked at again; nobody says so
            pages = np.zeros((N_KEYS, PAGE), np.uint8)
            hits = store.read(KEYS, spans_of(pages), 60.0) == 1
        finally:
            store.close(60.0)
        for key in range(N_KEYS):
            version = int(pages[key, :4].view(np.uint32)[0])
            tally["keys"] += 1
            tally["hits"] += int(hits[key])
            if hits[key] and version <= taken[key]:
                raise Broken(f"{layout}: key {key} is a hit with version {version}, taken back; {said[-6:]}")
            if must[key] and not hits[key]:
                raise Broken(f"{layout}: key {key}, flushed by version {flushed}, is not there; {said[-6:]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


HUNT = Hunt(
    "cache-killed",
    "SIGKILL brings nothing back that was taken back, and loses nothing flushed",
    run,
    effects=("hits",),
)

if __name__ == "__main__":
    live(sys.argv[1], sys.argv[2], int(sys.argv[3]))
