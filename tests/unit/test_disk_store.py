"""The disk store, whatever its layout: what goes in comes out, and nothing else does."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from disk_pages import (
    PAGE,
    hits,
    keys_of,
    occupied,
    open_store,
    pages_of,
    read,
    spans_of,
    wait_recovered,
    write,
)
from p2pkv import Config, _native
from p2pkv.disk.store import DEFAULT_CLUSTER, LAYOUTS, ReadStatus
from p2pkv.errors import ConfigError

pytestmark = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.parametrize("allow_uring", [True, False])
@pytest.mark.parametrize("allow_direct", [True, False])
@pytest.mark.parametrize("nbytes", [8, 4096 - 64, 4096, 65536, 1 << 20])
def test_pages_come_back(
    tmp_path: Path, layout: str, allow_uring: bool, allow_direct: bool, nbytes: int
) -> None:
    store = open_store(
        tmp_path, layout=layout, allow_uring=allow_uring, allow_direct=allow_direct, capacity=64 << 20
    )
    numbers = range(20)
    assert write(store, numbers, nbytes).all()
    assert store.contains(keys_of(range(22))).tolist() == [1] * 20 + [0] * 2
    assert hits(store, range(22), nbytes) == list(numbers)
    assert (read(store, numbers, nbytes + 8) == ReadStatus.OTHER_LENGTH).all()
    assert store.close()
    assert not store.contains(keys_of([1])).any()
    assert read(store, [1], nbytes).tolist() == [ReadStatus.MISS]


@pytest.mark.parametrize("fsync", ["never", "seal", "batch"])
def test_pages_survive_a_restart_and_are_handed_out(tmp_path: Path, layout: str, fsync: str) -> None:
    numbers = range(700)
    store = open_store(tmp_path, layout=layout, fsync=fsync)
    assert write(store, numbers).all()
    assert store.close()
    store = open_store(tmp_path, layout=layout, fsync=fsync)
    wait_recovered(store)
    keys, lengths, checksums = store.drain_recovered(10_000, 0.0)
    assert {bytes(key) for key in keys} == {bytes(key) for key in keys_of(numbers)}
    assert (lengths == PAGE).all()
    memory = pages_of(numbers)
    expected = dict(
        zip(
            map(bytes, keys_of(numbers)),
            _native.checksum_pages(spans_of(memory).reshape(-1, 1, 2)),
            strict=True,
        )
    )
    assert [expected[bytes(key)] for key in keys] == checksums.tolist()
    assert hits(store, numbers) == list(numbers)
    assert write(store, range(700, 720)).all()
    assert hits(store, range(690, 720)) == list(range(690, 720))
    assert store.close()


def test_the_oldest_go_first_and_their_keys_are_handed_out(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout, capacity=8 << 20)
    for start in range(0, 3000, 100):
        write(store, range(start, start + 100))
    present = [int(i) for i in np.flatnonzero(store.contains(keys_of(range(3000))))]
    assert present == list(range(present[0], 3000))
    assert len(present) * PAGE > 4 << 20
    dropped = {bytes(key) for key in store.drain_dropped(10_000, 0.0)}
    assert dropped == {bytes(key) for key in keys_of(range(present[0]))}
    assert store.stats()["evicted_pages"] == present[0]
    assert hits(store, present) == present
    assert store.close()


def test_what_was_read_stays_when_the_least_recently_read_goes_first(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout, capacity=8 << 20, eviction="least_recently_read")
    favourite = [0]
    for start in range(0, 3000, 50):
        write(store, range(start, start + 50))
        assert hits(store, favourite) == favourite
    assert store.stats()["evicted_pages"] > 0
    assert store.close()


def test_the_folder_never_exceeds_its_capacity(tmp_path: Path, layout: str) -> None:
    capacity = 8 << 20
    most = 0
    store = open_store(tmp_path, layout=layout, capacity=capacity)
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            began = time.monotonic()
            most = max(most, occupied(tmp_path))
            is_over.wait(
                1.5 * (time.monotonic() - began)
            )  # else the store would get half of a processor less

    watcher = threading.Thread(target=watch)
    watcher.start()
    for restart in range(3):
        for start in range(restart * 2000, restart * 2000 + 2000, 50):
            write(store, range(start, start + 50), flush=False)
            if start % 1000 == 0:
                assert hits(store, range(start, start + 10)) is not None
        assert store.close()
        orphan = tmp_path / "segments" / "0000000000000001.seg.new"
        if layout == "bucket":
            orphan.write_bytes(bytes(65536))
        store = open_store(tmp_path, layout=layout, capacity=capacity)
        assert not orphan.exists()
        wait_recovered(store)
    is_over.set()
    watcher.join()
    assert store.stats()["used"] <= capacity
    assert store.close()
    assert capacity // 2 < most <= capacity


def test_a_smaller_capacity_after_a_restart_holds_too(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout, capacity=32 << 20, bucket_size=1 << 20)
    write(store, range(3000))
    assert store.close()
    store = open_store(tmp_path, layout=layout, capacity=8 << 20, bucket_size=1 << 20)
    wait_recovered(store)
    write(store, range(5000, 5020))
    assert occupied(tmp_path) <= 8 << 20
    assert hits(store, range(5000, 5020)) == list(range(5000, 5020))
    read(store, range(3000))
    assert store.close()


def test_bytes_that_changed_while_they_waited_are_not_written(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout)
    memory = pages_of([1, 2])
    checksums = _native.checksum_pages(spans_of(memory).reshape(-1, 1, 2))
    memory = memory.copy()
    memory[0, 5] ^= 1
    store.write(keys_of([1, 2]), spans_of(memory), checksums, np.arange(2, dtype=np.uint64))
    assert store.flush(10)
    assert store.drain_released(10, 0.0).tolist() == [0, 1]
    assert hits(store, [1, 2]) == [2]
    assert store.stats()["changed_pages"] == 1
    assert store.close()


def test_a_queue_that_is_full_refuses_and_never_waits(tmp_path: Path, layout: str) -> None:
    faults = _native.FaultyFiles()
    store = open_store(tmp_path, layout=layout, faults=faults, queue_size=100 * PAGE)
    wait_recovered(store)
    faults.hang(_native.FileCall.WRITE)
    memory = pages_of(range(1000))
    checksums = _native.checksum_pages(spans_of(memory).reshape(-1, 1, 2))
    tickets = np.arange(1000, dtype=np.uint64)
    n_accepted = int(store.write(keys_of(range(1000)), spans_of(memory), checksums, tickets).sum())
    assert n_accepted == 100
    assert store.stats()["refused_pages"] == 900
    faults.heal()
    assert store.flush(10)
    assert sorted(store.drain_released(1000, 0.0).tolist()) == list(range(100))
    assert store.close()


def test_a_page_that_can_never_fit_is_refused(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout, capacity=8 << 20, read_buffer=2 << 20)
    assert write(store, [1], 3 << 20).tolist() == [0]
    assert store.close()


def test_a_second_store_on_the_folder_is_refused(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout)
    with pytest.raises(ConfigError, match="in use by this process"):
        open_store(tmp_path, layout=layout)
    assert store.close()
    assert open_store(tmp_path, layout=layout).close()


def test_strangers_folders_are_refused_with_a_reason(tmp_path: Path, layout: str) -> None:
    home = tmp_path / "home"
    assert open_store(home, layout=layout).close()
    with pytest.raises(ConfigError, match="node 'n1', not 'n2'"):
        open_store(home, layout=layout, node_id="n2")
    with pytest.raises(ConfigError, match="namespace 'ns', not 'other%0a'"):
        open_store(home, layout=layout, namespace="other\n")
    other = LAYOUTS[LAYOUTS.index(layout) - 1]
    with pytest.raises(ConfigError, match=f"layout '{layout}', not '{other}'"):
        open_store(home, layout=other)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_store(full, layout=layout)
    assert (full / "thesis.tex").exists()


def test_another_clusters_folder_is_refused(tmp_path: Path, layout: str) -> None:
    named, unnamed = tmp_path / "named", tmp_path / "unnamed"
    assert open_store(named, layout=layout, cluster="grün").close()
    assert "\ncluster=gr%c3%bcn\n" in (named / "store").read_text()
    assert open_store(named, layout=layout, cluster="grün").close()
    with pytest.raises(ConfigError, match="is the store of cluster 'gr%c3%bcn', not 'p2pkv'"):
        open_store(named, layout=layout)
    # one that names none, as all did, is the default cluster's
    assert open_store(unnamed, layout=layout).close()
    assert "cluster" not in (unnamed / "store").read_text()
    assert Config().cluster == DEFAULT_CLUSTER
    with pytest.raises(ConfigError, match="is the store of cluster 'p2pkv', not 'blue'"):
        open_store(unnamed, layout=layout, cluster="blue")


def test_a_folder_of_another_user_or_with_others_writing_is_refused(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    for mode in (0o777, 0o1777, 0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:04o}, so others .* chmod go-w {folder}"):
            open_store(folder, layout=layout)
    assert os.listdir(folder) == []
    folder.chmod(0o755)  # of what lies there others may see no more than the names
    assert open_store(folder, layout=layout).close()
    assert [path.stat().st_mode & 0o077 for path in folder.rglob("*")] == [0] * len(list(folder.rglob("*")))
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 65534, 65534)
    with pytest.raises(
        ConfigError, match=r"belongs to user 65534, and this node runs as user 0.*chown it to 0"
    ):
        open_store(folder, layout=layout)


def test_a_link_of_another_user_is_no_folder(tmp_path: Path, layout: str) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    assert open_store(link, layout=layout).close()
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match="is a link of user 65534, who may have it lead elsewhere"):
        open_store(link, layout=layout)


@pytest.mark.parametrize("name", ["lock", "store.new", "recalls.new", "probe"])
def test_no_link_in_the_folder_is_followed(tmp_path: Path, layout: str, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("another file\n")
    folder = tmp_path / "disk"
    if name not in ("lock", "store.new"):
        assert open_store(folder, layout=layout).close()
        (folder / "recalls").unlink()
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / name).symlink_to(victim)
    with pytest.raises(ConfigError, match=r"cannot .*symbolic links"):
        open_store(folder, layout=layout)
    assert victim.read_text() == "another file\n"


def test_an_identity_that_is_damaged_or_of_another_version_is_refused(tmp_path: Path, layout: str) -> None:
    assert open_store(tmp_path, layout=layout).close()
    identity = tmp_path / "store"
    text = identity.read_bytes()
    identity.write_bytes(text.replace(b"node=n1", b"node=n3"))
    with pytest.raises(ConfigError, match="damaged"):
        open_store(tmp_path, layout=layout, node_id="n3")
    body = text[: text.index(b"check=")].replace(b"version=1", b"version=7")
    memory = np.frombuffer(body, np.uint8)
    check = _native.checksum(memory.ctypes.data, len(memory))
    identity.write_bytes(body + f"check={check:016x}\n".encode())
    with pytest.raises(ConfigError, match="version 7, this p2pkv reads version 1"):
        open_store(tmp_path, layout=layout)


def test_many_threads_read_while_pages_are_written_and_evicted(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout, capacity=8 << 20)
    is_over = threading.Event()
    failures: list[BaseException] = []

    def reader(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            while not is_over.is_set():
                start = int(random.integers(0, 4000))
                read(store, range(start, start + 40))
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for start in range(0, 4000, 100):
        write(store, range(start, start + 100), flush=False)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.flush(10)
    assert store.stats()["bad_records"] == 0
    assert store.close()


def test_pages_are_written_though_others_keep_coming(tmp_path: Path, layout: str) -> None:
    store = open_store(tmp_path, layout=layout)
    wait_recovered(store)
    memory = pages_of([1])
    spans, keys = spans_of(memory), keys_of(range(6000))
    sums = _native.checksum_pages(spans.reshape(-1, 1, 2))
    for number in range(len(keys)):  # the writer waits for a pause, and there is none
        ticket = np.array([number], np.uint64)
        assert store.write(keys[number : number + 1], spans, sums, ticket).all()
        if store.stats()["stored_pages"]:
            break
    assert store.flush(120)  # of files, thousands, on a device that others use
    assert store.contains(keys).sum() > 0
    assert store.close()
