"""A node with a million small pages on its disk serves the first one at once, and the others as it finds them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import pages
from cluster import eventually
from disk_pages import spans_of, wait_recovered
from p2pkv import Config, Node, _native
from p2pkv.disk.store import DiskOptions, DiskStore
from p2pkv.page import Namespace
from p2pkv.testing.ports import free_port

NBYTES = 64
STEP = 20_000
CAPACITY = 1 << 30


def fill(folder: Path, n_pages: int) -> None:
    """Leave what an earlier run of node ``owner`` would have left."""
    store = DiskStore(str(folder), DiskOptions(capacity=CAPACITY), node_id="owner", namespace="many")
    wait_recovered(store)
    namespace = Namespace("many")
    memory = np.zeros((STEP, NBYTES), np.uint8)
    for first in range(0, n_pages, STEP):
        keys = [str(i) for i in range(first, first + STEP)]
        pages.fill(memory, keys)
        sums = _native.checksum_pages(spans_of(memory).reshape(-1, 1, 2))
        tickets = np.arange(STEP, dtype=np.uint64)
        assert store.write(namespace.hash(keys), spans_of(memory), sums, tickets).all()
        assert store.flush(300)
    assert store.close(60)


def restart(folder: Path, n_pages: int) -> float:
    """Return the seconds from the start of the node to its first hit; checks pages of every age at a peer too."""
    fill(folder / "disk", n_pages)
    settings = {"namespace": "many", "join": [f"127.0.0.1:{free_port()}"], "pool_size": "4MiB"}
    with Node.start(Config.load(settings | {"node_id": "reader"}, environ={})) as reader:
        began = time.monotonic()
        disk = {"disk_path": str(folder / "disk"), "disk_size": CAPACITY}
        with Node.start(Config.load(settings | disk | {"node_id": "owner"}, environ={})) as owner:
            memory = np.zeros((100, NBYTES), np.uint8)
            other = np.zeros((100, NBYTES), np.uint8)
            owner.register_memory(memory)
            reader.register_memory(other)
            youngest = [str(n_pages - 1)]
            while not owner.fetch(youngest, memory[:1]).all():
                time.sleep(0.002)  # leave the processor to the recovery
            seconds = time.monotonic() - began
            assert pages.wrong(memory[:1], youngest, np.ones(1, np.uint8)) == []
            some = [str(i) for i in range(0, n_pages, n_pages // 100)]
            eventually(lambda: bool(reader.exists(some).all()), 60.0)
            print(f"first hit after {seconds:.2f} s, all told after {time.monotonic() - began:.2f} s")
            for node, rows in ((owner, memory), (reader, other)):
                outcomes = node.fetch(some, rows, timeout=10)
                assert outcomes.all()
                assert pages.wrong(rows, some, outcomes) == []
    return seconds


def test_a_restarted_node_serves_at_once(tmp_path: Path) -> None:
    assert restart(tmp_path, STEP) < 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restarted_node_with_a_million_pages_serves_within_two_seconds(tmp_path: Path) -> None:
    assert restart(tmp_path, 1_000_000) < 2
