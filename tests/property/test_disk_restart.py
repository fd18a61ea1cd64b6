"""A store with many small pages serves while it is still looking through what an earlier run left."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from disk_pages import folder_in_memory, keys_of, open_store, pages_of, spans_of, wait_recovered
from p2pkv import _native
from p2pkv.disk.store import LAYOUTS, DiskStore, ReadStatus
from p2pkv.testing.lateness import returns_within

NBYTES = 64
STEP = 20_000


def fill(store: DiskStore, n_pages: int) -> None:
    for start in range(0, n_pages, STEP):
        numbers = range(start, start + STEP)
        memory = pages_of(numbers, NBYTES)
        sums = _native.checksum_pages(spans_of(memory).reshape(-1, 1, 2))
        assert store.write(keys_of(numbers), spans_of(memory), sums, np.arange(STEP, dtype=np.uint64)).all()
        assert store.flush(300)


def first_hit(store: DiskStore, number: int) -> None:
    out = np.zeros((1, NBYTES), np.uint8)
    keys, spans = keys_of([number]), spans_of(out)
    while store.read(keys, spans, 1.0)[0] != ReadStatus.HIT:
        time.sleep(0.002)  # misses are instant: leave the processor to the recovery
    assert (out == pages_of([number], NBYTES)).all()


def make(folder: Path, layout: str, n_pages: int, capacity: int) -> None:
    store = open_store(folder, layout=layout, capacity=capacity)
    wait_recovered(store)
    fill(store, n_pages)
    assert store.stats()["pages"] == n_pages
    assert store.close(60.0)


def restart(folder: Path, layout: str, n_pages: int, capacity: int) -> None:
    """Demand the first hit within two seconds, and every page in the end."""
    began = time.monotonic()
    with returns_within(2.0) as first:
        store = open_store(folder, layout=layout, capacity=capacity)
        first_hit(store, n_pages - 1)
    wait_recovered(store)
    total = time.monotonic() - began
    assert store.stats()["recovered_pages"] == n_pages
    first_hit(store, 0)
    assert store.close()
    print(f"{layout}: {n_pages} pages, first hit after {first.seconds:.2f} s, all found after {total:.2f} s")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restart_serves_at_once(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "store"
    if layout == "file":
        # A device takes a minute to be given so many files one by one, and seconds where they are a copy.
        with folder_in_memory(tmp_path, STEP * 8192) as quick:
            make(quick, layout, STEP, 256 << 20)
            shutil.copytree(quick, folder)
        os.sync()
    else:
        make(folder, layout, STEP, 256 << 20)
    restart(folder, layout, STEP, 256 << 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restart_with_a_million_pages_serves_within_two_seconds(tmp_path: Path) -> None:
    make(tmp_path, "bucket", 1_000_000, 1 << 30)
    restart(tmp_path, "bucket", 1_000_000, 1 << 30)
