"""What was taken back stays so: after a restart, while the disk takes no writes, and before it has answered."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from disk_pages import PAGE, keys_of, spans_of
from p2pkv import Config
from p2pkv._native import FaultyFiles, FetchBatch, FileCall, checksum_pages
from p2pkv.disk.store import LAYOUTS
from p2pkv.disk.tier import DiskTier
from p2pkv.pool import Pool

N = 16
KEYS = keys_of(range(N))

pytestmark = pytest.mark.parametrize("layout", LAYOUTS)


class Tiered:
    def __init__(self, folder: Path, layout: str, faults: FaultyFiles) -> None:
        config = Config(
            node_id="n1", namespace="ns", disk_path=str(folder), disk_size="64MiB", disk_layout=layout
        )
        self.pool = Pool(128 * PAGE, granule=4096, owner=7, boot=9)
        self.tier = DiskTier(config, self.pool, own_key=7, boot=9, faults=faults)

    def publish(self, value: int) -> None:
        memory = np.full((N, PAGE), value, np.uint8)
        self.pool.publish(KEYS, spans_of(memory).reshape(-1, 1, 2))
        self.tier.note_published(KEYS)

    def write(self, value: int) -> None:
        self.publish(value)
        assert self.tier.flush(30)

    def take_back(self, how: str) -> None:
        for _ in range(2):  # as the cache does it
            if how == "retract":
                self.tier.forget(KEYS)
                self.pool.retract(KEYS)
            else:
                self.tier.clear()
                self.pool.purge()

    def on_disk(self) -> list[int]:
        """The values of the pages that can be read from disk, each once."""
        out = np.zeros((N, PAGE), np.uint8)
        batch = FetchBatch(KEYS, spans_of(out).reshape(-1, 1, 2), np.zeros((N, 1), np.int32))
        batch.take_from_disk(self.tier.native, 30.0)
        return sorted(set(out[batch.outcomes().astype(bool)][:, 0].tolist()))

    def recovered(self) -> bool:
        return self.tier._store is not None and self.tier._store.is_recovered


@contextmanager
def started(folder: Path, layout: str, faults: FaultyFiles | None = None) -> Iterator[Tiered]:
    one = Tiered(folder / "disk", layout, faults or FaultyFiles())
    try:
        yield one
    finally:
        one.tier.close()
        one.pool.close()


def next_run(folder: Path, layout: str) -> list[int]:
    with started(folder, layout) as one:
        eventually(one.recovered, 30.0)
        return one.on_disk()


@pytest.mark.parametrize("how", ["retract", "clear"])
def test_the_next_run_does_not_find_it(tmp_path: Path, layout: str, how: str) -> None:
    with started(tmp_path, layout) as one:
        one.write(1)
        one.take_back(how)
    assert next_run(tmp_path, layout) == []
    assert next_run(tmp_path, layout) == []


@pytest.mark.parametrize("how", ["retract", "clear"])
def test_the_next_run_finds_what_was_published_again(tmp_path: Path, layout: str, how: str) -> None:
    with started(tmp_path, layout) as one:
        one.write(1)
        one.take_back(how)
        one.write(2)
        assert one.on_disk() == [2]
    assert next_run(tmp_path, layout) == [2]


@pytest.mark.parametrize("how", ["retract", "clear"])
def test_it_holds_though_the_disk_takes_no_writes(tmp_path: Path, layout: str, how: str) -> None:
    faults = FaultyFiles()
    with started(tmp_path, layout, faults) as one:
        one.write(1)
        faults.fail(FileCall.WRITE, errno.ENOSPC)
        one.take_back(how)
        assert one.on_disk() == []
    assert next_run(tmp_path, layout) == []


@pytest.mark.parametrize("how", ["retract", "clear"])
def test_it_holds_for_a_disk_that_answers_later(tmp_path: Path, layout: str, how: str) -> None:
    with started(tmp_path, layout) as one:
        one.write(1)
    faults = FaultyFiles()
    faults.hang(FileCall.OPEN)
    with started(tmp_path, layout, faults) as one:
        one.take_back(how)
        faults.heal()
        eventually(one.recovered, 30.0)
        assert one.on_disk() == []
    assert next_run(tmp_path, layout) == []


@pytest.mark.parametrize("how", ["retract", "clear"])
def test_it_holds_for_a_disk_that_answers_while_the_node_closes(
    tmp_path: Path, layout: str, how: str
) -> None:
    with started(tmp_path, layout) as one:
        one.write(1)
    faults = FaultyFiles()
    faults.hang(FileCall.OPEN)
    with started(tmp_path, layout, faults) as one:
        one.take_back(how)
        closing = one.tier._closing
        healer = threading.Thread(target=lambda: closing.wait(60) and faults.heal())
        healer.start()
    healer.join()
    assert next_run(tmp_path, layout) == []


def test_of_two_versions_the_next_run_finds_the_younger(tmp_path: Path, layout: str) -> None:
    """Also where nothing says that the older one was taken back: the process was killed before that was written."""
    with started(tmp_path, layout) as one:
        eventually(one.recovered, 30.0)
        assert one.tier._store is not None
        for value in (1, 2):
            memory = np.full((N, PAGE), value, np.uint8)
            sums = checksum_pages(spans_of(memory).reshape(-1, 1, 2))
            assert one.tier._store.write(KEYS, spans_of(memory), sums, np.zeros(N, np.uint64)).all()
            assert one.tier.flush(30)
            assert one.on_disk() == [value]
    assert next_run(tmp_path, layout) == [2]


def test_damage_to_what_was_taken_back_leaves_nothing(tmp_path: Path, layout: str) -> None:
    with started(tmp_path, layout) as one:
        one.write(1)
    with started(tmp_path, layout) as one:
        eventually(one.recovered, 30.0)
        assert one.on_disk() == [1]
    path = tmp_path / "disk" / "recalls"
    damaged = bytearray(path.read_bytes())
    damaged[20] ^= 1
    path.write_bytes(bytes(damaged))
    assert next_run(tmp_path, layout) == []
