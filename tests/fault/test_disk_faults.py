"""A disk that is full, read-only, broken, slow or gone: the store says so once, goes on, and comes back by itself."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cluster import eventually
from disk_pages import PAGE, hits, keys_of, open_store, pages_of, read, spans_of, wait_recovered, write
from p2pkv import _native
from p2pkv._native import FaultyFiles, FileCall
from p2pkv.disk.store import LAYOUTS, DiskStore, ReadStatus
from p2pkv.errors import ConfigError
from p2pkv.testing.lateness import returns_within

SLACK = 0.1
"""What a call may take above its deadline."""

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def write_until_suspended(store: DiskStore, first: int) -> None:
    """Write pages until the store notices that it can't; returns when it has said so."""
    for start in range(first, first + 100_000, 50):
        write(store, range(start, start + 50), flush=False)
        if store.check_health():
            return
    raise AssertionError("the store never noticed")


@layouts
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (FileCall.WRITE, errno.EIO),
        (FileCall.WRITE, errno.ENOSPC),
        (FileCall.OPEN, errno.EROFS),
        (FileCall.ALLOCATE, errno.ENOSPC),
    ],
)
def test_a_failing_write_suspends_with_one_warning_and_passes(
    tmp_path: Path, layout: str, call: FileCall, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    if (layout, call) in {
        ("offset", FileCall.OPEN),
        ("offset", FileCall.ALLOCATE),
        ("file", FileCall.ALLOCATE),
    }:
        pytest.skip(f"layout {layout} does not make this call while it writes")
    faults = FaultyFiles()
    store = open_store(tmp_path, layout=layout, faults=faults)
    write(store, range(10))
    faults.fail(call, error)
    write_until_suspended(store, 1000)
    assert not write(store, [5]).any()
    if call != FileCall.OPEN:  # a page's file has to be opened to be read
        assert hits(store, range(10)) == list(range(10))
    assert store.check_health() != ""
    assert len(warnings(caplog)) == 1
    assert os.strerror(error) in warnings(caplog)[0]
    faults.heal()
    eventually(lambda: store.check_health() == "", 10)
    assert write(store, range(50_000, 50_010)).all()
    assert hits(store, range(50_000, 50_010)) == list(range(50_000, 50_010))
    assert store.stats()["suspensions"] == 1
    assert store.close()


@layouts
def test_a_sector_that_cannot_be_read_is_a_miss_and_dropped(tmp_path: Path, layout: str) -> None:
    faults = FaultyFiles()
    store = open_store(tmp_path, layout=layout, faults=faults)
    write(store, range(20))
    faults.fail(FileCall.READ, errno.EIO, 1)
    assert read(store, [3]).tolist() == [ReadStatus.MISS]
    assert not store.contains(keys_of([3])).any()
    assert store.drain_dropped(10, 0.0).tobytes() == keys_of([3]).tobytes()
    assert hits(store, range(20)) == [i for i in range(20) if i != 3]
    assert store.check_health() == ""
    assert store.close()


@layouts
def test_a_disk_that_cannot_be_read_is_left_alone_until_it_can(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    faults = FaultyFiles()
    store = open_store(tmp_path, layout=layout, faults=faults)
    write(store, range(200))
    faults.fail(FileCall.READ, errno.EIO)
    read(store, range(100))
    assert store.check_health() != ""
    assert not store.contains(keys_of(range(200))).any()
    faults.heal()
    eventually(lambda: store.check_health() == "", 10)
    assert hits(store, range(100, 200)) == list(range(100, 200))
    assert len(warnings(caplog)) == 1
    assert store.close()


@layouts
def test_a_read_returns_by_its_deadline_and_leaves_the_memory_alone(tmp_path: Path, layout: str) -> None:
    faults = FaultyFiles()
    store = open_store(tmp_path, layout=layout, faults=faults, stall_seconds=0.2)
    write(store, range(20))
    faults.hang(FileCall.READ)
    memory = np.zeros((20, PAGE), np.uint8)
    with returns_within(0.3 + SLACK):
        statuses = store.read(keys_of(range(20)), spans_of(memory), 0.3)
    assert (statuses == ReadStatus.TIMED_OUT).all()
    # while that read hangs, others don't queue behind it
    with returns_within(SLACK):
        assert (read(store, range(20), timeout=5.0) == ReadStatus.MISS).all()
    faults.heal()
    eventually(lambda: hits(store, range(20)) == list(range(20)), 10)
    assert not memory.any()
    assert store.close()


@layouts
def test_a_hanging_write_keeps_nobody_waiting(tmp_path: Path, layout: str) -> None:
    faults = FaultyFiles()
    store = open_store(tmp_path, layout=layout, faults=faults)
    write(store, range(20))
    faults.hang(FileCall.WRITE)
    with returns_within(SLACK):
        memory = pages_of(range(100, 120))
        store.write(
            keys_of(range(100, 120)),
            spans_of(memory),
            np.zeros(20, np.uint64),
            np.arange(20, dtype=np.uint64),
        )
        memory2 = pages_of(range(200, 220))
        sums = _native.checksum_pages(spans_of(memory2).reshape(-1, 1, 2))
        store.write(keys_of(range(200, 220)), spans_of(memory2), sums, np.arange(20, dtype=np.uint64))
    assert hits(store, range(20)) == list(range(20))
    assert not store.flush(0.2)
    with returns_within(0.2 + 2.0 + SLACK):  # threads get a second each to notice
        assert not store.close(0.2)
    with pytest.raises(ConfigError, match="in use"):
        open_store(tmp_path, layout=layout)
    faults.heal()
    eventually(lambda: store.close(1.0), 10)


def delete(folder: Path) -> None:
    """Delete a folder at once: file by file, its store would make new ones in it meanwhile."""
    shutil.rmtree(folder.rename(folder.with_name("deleted")))


@layouts
def test_a_folder_deleted_underneath_is_made_again(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    store = open_store(home, layout=layout)
    write(store, range(50))
    delete(home)
    eventually(lambda: store.stats()["suspensions"] == 1, 10)
    eventually(lambda: store.check_health() == "", 10)
    assert not store.contains(keys_of(range(50))).any()
    assert len(store.drain_dropped(100, 0.0)) == 50
    assert write(store, range(100, 150)).all()
    assert hits(store, range(100, 150)) == list(range(100, 150))
    assert store.close()
    store = open_store(home, layout=layout)
    wait_recovered(store)
    assert hits(store, range(100, 150)) == list(range(100, 150))
    assert store.close()


SECOND = """
import sys
from disk_pages import open_store, write
from p2pkv.errors import ConfigError
try:
    store = open_store(sys.argv[1], layout=sys.argv[2])
except ConfigError as error:
    print(error)
else:
    write(store, range(200, 210))
    print("opened", flush=True)
    sys.stdin.read()
    assert store.close()
"""


def second(folder: Path, layout: str) -> subprocess.Popen[str]:
    """Have another process open the same store; its first line says what became of that. It closes after its input."""
    here = str(Path(__file__).parents[1] / "support")
    return subprocess.Popen(
        [sys.executable, "-c", SECOND, str(folder), layout],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((here, os.environ.get("PYTHONPATH", "")))},
    )


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@layouts
@pytest.mark.parametrize("what", ["folder", "lock"])
def test_what_was_deleted_underneath_is_locked_again(tmp_path: Path, layout: str, what: str) -> None:
    home = tmp_path / "home"
    store = open_store(home, layout=layout)
    write(store, range(50))
    if what == "folder":
        delete(home)
    else:
        (home / "lock").unlink()
    eventually(lambda: store.stats()["suspensions"] == 1, 10)
    eventually(lambda: store.check_health() == "", 10)
    with second(home, layout) as process:
        assert "is in use by process" in answer(process)
        process.communicate()
    with pytest.raises(ConfigError, match="in use by this process"):
        open_store(home, layout=layout)
    # others may have had it in between, and nobody knows what they took back
    assert hits(store, range(50)) == []
    assert store.close()


@layouts
@pytest.mark.parametrize("what", ["folder", "lock"])
def test_a_folder_that_somebody_else_has_by_now_is_left_to_him(
    tmp_path: Path, layout: str, what: str
) -> None:
    home = tmp_path / "home"
    store = open_store(home, layout=layout, retry_seconds=2.0)  # long enough for the other one to be first
    write(store, range(50))
    if what == "folder":
        delete(home)
    else:
        (home / "lock").unlink()
    process = second(home, layout)
    assert answer(process) == "opened\n"
    eventually(lambda: store.stats()["suspensions"] == 1, 20)
    eventually(lambda: "in use by process" in store.check_health(), 20)
    assert not store.write(
        keys_of([1]), spans_of(pages_of([1])), np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    ).any()
    assert store.close()
    process.communicate("")
    assert process.returncode == 0
    other = open_store(home, layout=layout)
    wait_recovered(other)
    assert hits(other, range(200, 210)) == list(range(200, 210))
    assert other.close()


@layouts
def test_a_folder_that_is_another_nodes_by_now_is_left_alone(tmp_path: Path, layout: str) -> None:
    home = tmp_path / "home"
    store = open_store(home, layout=layout, retry_seconds=1.0)
    write(store, range(50))
    delete(home)
    other = open_store(home, layout=layout, node_id="n2")
    write(other, range(60))
    assert other.close()
    eventually(lambda: "is the store of somebody else by now" in store.check_health(), 20)
    other = open_store(home, layout=layout, node_id="n2")  # nor is it locked
    wait_recovered(other)
    assert hits(other, range(60)) == list(range(60))
    assert store.close()
    assert hits(other, range(60)) == list(range(60))
    assert other.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill_disk(hog: Path) -> None:
    with hog.open("wb", buffering=0) as file:
        written = 1
        while written:
            try:
                written = file.write(bytes(1 << 16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                written = 0


@layouts
def test_a_disk_that_somebody_else_fills_suspends_until_there_is_room(small_disk: Path, layout: str) -> None:
    if layout == "offset":
        pytest.skip("layout offset has reserved its room")
    store = open_store(small_disk / "store", layout=layout, capacity=11 << 20, bucket_size=1 << 20)
    write(store, range(100))
    hog = small_disk / "hog"
    fill_disk(hog)
    write_until_suspended(store, 1000)
    assert hits(store, range(100)) == list(range(100))
    hog.unlink()
    eventually(lambda: store.check_health() == "", 10)
    write(store, range(90_000, 90_100))
    assert hits(store, range(90_000, 90_100)) == list(range(90_000, 90_100))
    assert store.close()


def test_offset_asks_for_its_room_at_once(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match="No space left"):
        open_store(small_disk / "store", layout="offset", capacity=64 << 20)


@layouts
def test_files_that_may_not_grow_suspend_until_they_may(tmp_path: Path, layout: str) -> None:
    if layout == "offset":
        pytest.skip("layout offset has reserved its room")
    store = open_store(tmp_path, layout=layout)
    write(store, range(50))
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        write_until_suspended(store, 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    eventually(lambda: store.check_health() == "", 10)
    assert write(store, range(90_000, 90_050)).all()
    assert hits(store, range(90_000, 90_050)) == list(range(90_000, 90_050))
    assert store.close()


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    code = f"from disk_pages import open_store; open_store({str(tmp_path)!r})"
    tests = Path(__file__).parents[1] / "support"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tests, capture_output=True, text=True, check=False, timeout=300
    )
    assert f"in use by process {os.getpid()}" in done.stderr
    assert store.close()
