"""A tier whose disk hangs, fails or can't be opened: memory goes on, nobody waits, one warning, and it comes back."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from disk_pages import PAGE, keys_of, pages_of, spans_of
from p2pkv import Config, Node
from p2pkv._native import FaultyFiles, FetchBatch, FileCall
from p2pkv.disk.tier import DiskTier, default_disk_path
from p2pkv.errors import ConfigError
from p2pkv.pool import Pool, PoolStatus
from p2pkv.testing.lateness import returns_within

N = 16
OWNER, BOOT = 7, 9


class Tiered:
    """A pool of 128 pages with a tier below it."""

    def __init__(self, folder: Path, faults: FaultyFiles) -> None:
        config = Config(node_id="n1", namespace="ns", disk_path=str(folder), disk_size="64MiB")
        self.pool = Pool(128 * PAGE, granule=4096, owner=OWNER, boot=BOOT)
        self.tier = DiskTier(config, self.pool, own_key=OWNER, boot=BOOT, faults=faults)

    def publish(self, first: int) -> None:
        numbers = range(first, first + N)
        memory = pages_of(numbers)
        keys = keys_of(numbers)
        statuses, *_ = self.pool.publish(keys, spans_of(memory).reshape(-1, 1, 2))
        assert (statuses == PoolStatus.STORED).all()
        self.tier.note_published(keys)

    def fetch(self, first: int, timeout: float = 5.0) -> int:
        """Read from disk what the pool lacks; return the hits. A wrong byte fails."""
        numbers = range(first, first + N)
        out = np.zeros((N, PAGE), np.uint8)
        batch = FetchBatch(keys_of(numbers), spans_of(out).reshape(-1, 1, 2), np.zeros((N, 1), np.int32))
        batch.take_from_disk(self.tier.native, timeout)
        hits = batch.outcomes().astype(bool)
        assert (out[hits] == pages_of(numbers)[hits]).all()
        return int(hits.sum())


@pytest.fixture
def faults() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def start(tmp_path: Path, faults: FaultyFiles) -> Iterator[Callable[[], Tiered]]:
    started: list[Tiered] = []

    def begin() -> Tiered:
        started.append(Tiered(tmp_path / "disk", faults))
        return started[-1]

    yield begin
    faults.heal()
    for one in started:
        one.tier.close()
        one.pool.close()


def reading(one: Tiered, name: str) -> float:
    return one.tier.readings()[name]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_hanging_disk_makes_no_publish_and_no_read_wait(
    start: Callable[[], Tiered], faults: FaultyFiles
) -> None:
    one = start()
    one.publish(0)
    assert one.tier.flush(10)
    faults.hang(FileCall.WRITE)
    faults.hang(FileCall.READ)
    with returns_within(2.0):
        for first in range(N, 50 * N, N):
            one.publish(first)
    with returns_within(0.3 + 0.1):
        assert one.fetch(0, timeout=0.3) == 0
    stats = one.pool.stats()
    assert stats["pinned_bytes"] <= stats["capacity"] / 4
    faults.heal()
    eventually(lambda: one.fetch(0) == N, 20.0)


def test_a_disk_that_hangs_holds_up_neither_start_nor_close(
    start: Callable[[], Tiered], faults: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    faults.hang(FileCall.OPEN)
    with returns_within(2.0 + 1.0):
        one = start()
    assert "was not opened within" in warnings(caplog)[0]
    one.publish(0)
    assert one.fetch(0) == 0
    faults.heal()
    eventually(lambda: reading(one, "p2pkv_disk_suspended") == 0, 10.0)
    one.publish(N)
    assert one.tier.flush(10)
    assert one.fetch(N) == N

    one.tier.close()
    faults.hang(FileCall.OPEN)
    other = start()
    with returns_within(5.0 + 1.0):
        other.tier.close()
    assert "the disk hangs" in warnings(caplog)[-1]


def test_a_failing_disk_warns_once_and_comes_back(
    start: Callable[[], Tiered], faults: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    one = start()
    faults.fail(FileCall.WRITE, errno.EIO)
    first = iter(range(0, 10**6, N))

    def publish_until_suspended() -> bool:
        one.publish(next(first))
        return reading(one, "p2pkv_disk_suspended") == 1

    eventually(publish_until_suspended, 20.0)
    for _ in range(5):
        one.publish(next(first))
    assert len(warnings(caplog)) == 1
    assert "suspended" in warnings(caplog)[0]
    faults.heal()
    eventually(lambda: reading(one, "p2pkv_disk_suspended") == 0, 20.0)
    again = next(first)
    one.publish(again)
    assert one.tier.flush(10)
    assert one.fetch(again) == N


def test_a_disk_that_cannot_be_opened_is_tried_again(
    start: Callable[[], Tiered], faults: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    faults.fail(FileCall.OPEN, errno.EROFS)
    one = start()
    assert len(warnings(caplog)) == 1
    assert reading(one, "p2pkv_disk_suspended") == 1
    assert reading(one, "p2pkv_disk_failed_opens_total") >= 1
    one.publish(0)
    assert one.fetch(0) == 0
    faults.heal()
    eventually(lambda: reading(one, "p2pkv_disk_suspended") == 0, 20.0)
    one.publish(N)
    assert one.tier.flush(10)
    assert one.fetch(N) == N


def test_a_folder_of_another_node_is_refused(start: Callable[[], Tiered], tmp_path: Path) -> None:
    one = start()
    config = Config(node_id="n2", namespace="ns", disk_path=str(tmp_path / "disk"), disk_size="64MiB")
    with pytest.raises(ConfigError, match="in use by this process"):
        DiskTier(config, one.pool, own_key=OWNER, boot=BOOT)
    one.tier.close()
    with pytest.raises(ConfigError, match="is the store of node 'n1', not 'n2'"):
        DiskTier(config, one.pool, own_key=OWNER, boot=BOOT)


def test_the_directory_is_told_what_was_seen_last(start: Callable[[], Tiered]) -> None:
    one = start()
    one.publish(0)
    assert one.tier.flush(10)
    keys = keys_of(range(N))
    found, where = one.tier.locate(keys)
    assert found.all()
    assert (where["flags"] == 1).all()
    one.pool.purge()
    found, where = one.tier.locate(keys)
    assert found.all()
    assert (where["flags"] == 0).all()
    assert (where["owner"] == OWNER).all()
    assert (where["boot"] == BOOT).all()
    assert (where["length"] == PAGE).all()
    one.tier.native.warm(keys)
    eventually(lambda: bool((one.tier.locate(keys)[1]["flags"] == 1).all()), 10.0)
    assert {bytes(key) for key in one.tier.drain_changed(100)} == {bytes(key) for key in keys}
    one.tier.forget(keys)
    one.pool.purge()
    assert not one.tier.locate(keys)[0].any()
    assert {bytes(key) for key in one.tier.drain_changed(100)} == {bytes(key) for key in keys}


def test_who_tells_the_directory_is_woken_by_what_the_disk_evicts(start: Callable[[], Tiered]) -> None:
    one = start()
    one.publish(0)
    assert one.tier.flush(10)
    keys = keys_of(range(N))
    one.tier.drain_changed(100)
    one.pool.drain_evicted(100, 0.0)
    has_looked, is_over = threading.Event(), threading.Event()
    told: set[bytes] = set()

    def wait_for_news() -> None:
        while True:
            told.update(bytes(key) for key in one.tier.drain_changed(100))
            has_looked.set()
            if len(told) == N or is_over.is_set():
                break
            one.pool.drain_evicted(100, 600.0)
        is_over.set()

    thread = threading.Thread(target=wait_for_news)
    thread.start()
    assert has_looked.wait(60.0)
    one.tier.forget(keys)  # the pool evicts nothing meanwhile
    is_over.wait(60.0)
    is_over.set()
    one.pool.close()
    thread.join()
    assert told == {bytes(key) for key in keys}


def test_the_default_folder_is_one_a_node_and_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = {default_disk_path(node, space) for node in ("a", "a/b", "a_b", "..") for space in ("x", "y")}
    assert len(folders) == 8
    assert {folder.parent for folder in folders} == {tmp_path / "p2pkv" / "disk"}
    assert default_disk_path("a", "x") == default_disk_path("a", "x")


def test_a_cluster_does_not_find_what_anothers_node_of_the_same_name_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = {default_disk_path("a", "x", cluster) for cluster in ("p2pkv", "blue", "tenant-0123")}
    # an id that is put together like the text that another cluster's is made from
    folders |= {default_disk_path("blue1:ax", "", "p2pkv"), default_disk_path("a", "x", "blue1:a")}
    assert len(folders) == 5

    def began(cluster: str) -> str:
        config = Config(node_id="a", namespace="x", cluster=cluster, disk_size="64MiB")
        pool = Pool(128 * PAGE, granule=4096, owner=OWNER, boot=BOOT)
        tier = DiskTier(config, pool, own_key=OWNER, boot=BOOT)
        tier.close()
        pool.close()
        return tier.path

    assert began("p2pkv") == str(default_disk_path("a", "x"))
    assert caplog.text == ""
    assert began("blue") == str(default_disk_path("a", "x", "blue"))
    assert f"the pages in {default_disk_path('a', 'x')} count as those of cluster p2pkv" in caplog.text
    caplog.clear()
    assert began("blue") == str(default_disk_path("a", "x", "blue"))
    assert caplog.text == ""


@pytest.mark.parametrize("slash", ["", "/", "//", "/."])
def test_a_slash_at_the_end_of_disk_path_leads_to_the_same_folder(tmp_path: Path, slash: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)  # empty, as a fresh mount
    config = Config(node_id="n1", disk_path=f"{folder}{slash}", disk_size="64MiB", pool_size="8MiB")
    for _ in range(2):
        Node.start(config).close()
    assert sorted(os.listdir(tmp_path)) == ["disk", "disk.boot"]
    assert "store" in os.listdir(folder)
    assert ".boot" not in os.listdir(folder)


def burst(one: Tiered, faults: FaultyFiles) -> None:
    """Publish as much as the pool takes while the disk hangs, which is four times the disk's queue."""
    faults.hang(FileCall.WRITE)
    for first in range(0, 8 * N, N):
        one.publish(first)
    assert reading(one, "p2pkv_disk_behind_pages") >= 4 * N
    assert reading(one, "p2pkv_disk_skipped_pages_total") >= 4 * N


def wait_caught_up(one: Tiered) -> None:
    eventually(lambda: reading(one, "p2pkv_disk_behind_pages") == 0, 20.0)
    assert one.tier.flush(20.0)


def test_what_a_burst_left_out_is_written_when_the_disk_has_time(
    start: Callable[[], Tiered], faults: FaultyFiles
) -> None:
    one = start()
    burst(one, faults)
    faults.heal()
    wait_caught_up(one)
    assert [one.fetch(first) for first in range(0, 8 * N, N)] == 8 * [N]
    assert reading(one, "p2pkv_disk_caught_up_pages_total") >= 4 * N
    assert one.pool.stats()["pinned_bytes"] == 0


def test_what_was_left_out_and_is_gone_meanwhile_is_not_written(
    start: Callable[[], Tiered], faults: FaultyFiles
) -> None:
    one = start()
    burst(one, faults)
    retracted = keys_of(range(6 * N, 7 * N))
    one.tier.forget(retracted)
    one.pool.retract(retracted)
    one.tier.forget(retracted)
    faults.heal()
    wait_caught_up(one)
    assert [one.fetch(first) for first in range(0, 8 * N, N)] == [*6 * [N], 0, N]


def test_what_was_left_out_and_is_published_anew_is_written_as_it_is_now(
    start: Callable[[], Tiered], faults: FaultyFiles
) -> None:
    one = start()
    burst(one, faults)
    keys, others = keys_of(range(6 * N, 7 * N)), pages_of(range(1000, 1000 + N))
    one.tier.forget(keys)
    one.pool.retract(keys)
    one.tier.forget(keys)
    one.pool.publish(keys, spans_of(others).reshape(-1, 1, 2))
    one.tier.note_published(keys)
    faults.heal()
    wait_caught_up(one)
    out = np.zeros((N, PAGE), np.uint8)
    batch = FetchBatch(keys, spans_of(out).reshape(-1, 1, 2), np.zeros((N, 1), np.int32))
    batch.take_from_disk(one.tier.native, 5.0)
    assert batch.outcomes().all()
    assert (out == others).all()


def test_what_was_left_out_is_forgotten_when_all_is_taken_back(
    start: Callable[[], Tiered], faults: FaultyFiles
) -> None:
    one = start()
    burst(one, faults)
    one.tier.clear()
    one.pool.purge()
    one.tier.clear()
    eventually(lambda: reading(one, "p2pkv_disk_behind_pages") == 0, 20.0)
    faults.heal()
    wait_caught_up(one)
    assert reading(one, "p2pkv_disk_pages") == 0
    one.publish(0)
    assert one.tier.flush(20.0)
    assert one.fetch(0) == N
