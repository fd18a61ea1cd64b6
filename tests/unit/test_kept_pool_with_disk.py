"""A node that goes on with the pool of the life before and has a disk: both have what they had, and no more."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster import eventually
from kept_nodes import KEYS, LATER, adopted, config, fetch, kept_at, publish
from p2pkv import Config, ConfigError, Node
from p2pkv.disk import tier
from p2pkv.disk.store import DiskInUseError

_LOCKS = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, object]:
    return {"disk_path": str(tmp_path / "disk"), "disk_size": "64MiB"}


@pytest.fixture
def start() -> Iterator[Callable[[Config], Node]]:
    """Start nodes, and close those that a test that failed has left."""
    nodes: list[Node] = []

    def start(config: Config) -> Node:
        nodes.append(Node.start(config))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def stored(node: Node) -> float:
    return node.counters()["p2pkv_disk_stored_pages_total"]


def publish_and_store(node: Node, keys: list[str]) -> None:
    """Publish pages, as many at a time as there is room for, and wait until the disk has them."""
    before = stored(node)
    for begin in range(0, len(keys), 64):
        publish(node, keys[begin : begin + 64])
        n_stored = before + min(begin + 64, len(keys))
        eventually(lambda n_stored=n_stored: stored(node) == n_stored, 30.0)


def on_disk(node: Node) -> float:
    """Say how many pages the disk has, when all of them are known."""
    store = node._parts.caching.tier._store
    eventually(lambda: store.is_recovered, 30.0)
    return node.counters()["p2pkv_disk_pages"]


def test_a_successor_has_what_lay_in_the_pool_and_what_only_the_disk_had(
    keeper: str, disk: dict[str, object]
) -> None:
    with Node.start(config(keeper, **disk)) as first:
        publish_and_store(first, KEYS)
        publish_and_store(first, LATER)  # more than there is room for
        in_pool = first.counters()["p2pkv_pool_pages"]
        assert in_pool < len(KEYS + LATER)
    with Node.start(config(keeper, **disk)) as second:
        assert adopted(second) == in_pool
        assert on_disk(second) == len(KEYS + LATER)
        assert fetch(second, KEYS + LATER) == len(KEYS + LATER)
        eventually(lambda: second._parts.caching.tier._left_from is None, 30.0)
        assert stored(second) == 0  # what the disk has is not written once more
        # and what is promoted, published and evicted from now on is as in any other life
        publish(second, [f"new-{i}" for i in range(64)])
        assert fetch(second, KEYS) == len(KEYS)


def test_what_was_left_in_the_pool_is_written_where_the_disk_does_not_have_it(
    tmp_path: Path, disk: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "_LEFT_BATCH", 5)
    with kept_at(tmp_path) as kept:
        with Node.start(config(kept)) as first:
            publish(first, KEYS)
        with Node.start(config(kept, **disk)) as second:
            assert adopted(second) == len(KEYS)
            eventually(lambda: stored(second) == len(KEYS), 10.0)
    with Node.start(config("", **disk)) as third:  # as after a host was restarted, which ended the keeper
        assert on_disk(third) == len(KEYS)
        assert fetch(third, KEYS) == len(KEYS)


def test_what_a_second_use_would_admit_is_not_written_for_having_been_left(
    keeper: str, disk: dict[str, object]
) -> None:
    with Node.start(config(keeper, **disk, disk_admission="second_use")) as first:
        publish(first, KEYS)
    with Node.start(config(keeper, **disk, disk_admission="second_use")) as second:
        assert on_disk(second) == 0
        assert second._parts.caching.tier._left_from is None
        for _ in range(2):
            assert fetch(second, KEYS[:4]) == 4
        eventually(lambda: stored(second) == 4, 30.0)


def test_what_was_taken_back_is_found_in_neither(keeper: str, disk: dict[str, object]) -> None:
    with Node.start(config(keeper, **disk)) as first:
        publish_and_store(first, KEYS)
        assert first.retract(KEYS[:8]).all()
    with Node.start(config(keeper, **disk)) as second:
        assert on_disk(second) == len(KEYS) - 8
        assert fetch(second, KEYS[:8]) == 0
        assert fetch(second, KEYS) == len(KEYS) - 8


def test_what_a_bump_took_back_meanwhile_is_found_in_neither_and_not_written(
    keeper: str, disk: dict[str, object], start: Callable[[Config], Node]
) -> None:
    other = start(Config(node_id="other", pool_size="1MiB", deadline=20.0))
    settings = {"join": [other.address]} | disk
    with Node.start(config(keeper, **settings)) as first:
        publish_and_store(first, KEYS)
    epoch = other.bump(timeout=20.0).epoch
    with Node.start(config(keeper, **settings)) as second:
        assert second.epoch == epoch
        assert on_disk(second) == len(KEYS)  # under keys of before, by which nobody asks any more
        assert second.counters()["p2pkv_pool_pages"] == 0
        for node in (second, other):
            assert fetch(node, KEYS) == 0
        publish(second, KEYS[:3])
        eventually(lambda: stored(second) == 3, 30.0)
    with Node.start(config(keeper, **settings)) as third:
        assert fetch(third, KEYS) == 3


def test_others_and_engines_find_what_is_in_the_pool_and_what_is_on_disk_again(
    keeper: str, listen: str, disk: dict[str, object], start: Callable[[Config], Node]
) -> None:
    other = start(Config(node_id="other", pool_size="1MiB", deadline=20.0))
    settings = {"join": [other.address], "attach_listen": listen} | disk
    first = start(config(keeper, **settings))
    engine = start(Config(node_id="engine", attach=listen, deadline=20.0))
    every = [*KEYS, *LATER]
    publish_and_store(first, KEYS)
    publish_and_store(first, LATER)
    first.close()
    with Node.start(config(keeper, **settings)):
        for reader in (engine, other):
            # those on disk come into the pool for whoever asks, some at a time
            for begin in range(0, len(every), 32):
                some = every[begin : begin + 32]
                eventually(lambda reader=reader, some=some: fetch(reader, some) == len(some), 30.0)


def test_a_folder_that_a_process_is_about_to_let_go_of_is_waited_for(
    keeper: str, disk: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the predecessor's, of which the kernel has closed the pool's files first."""
    monkeypatch.setattr(tier, "_ENDED_S", 60.0)
    with Node.start(config(keeper, **disk)) as first:
        publish(first, KEYS)
    lock = f"{disk['disk_path']}/lock"
    with subprocess.Popen(
        [sys.executable, "-c", _LOCKS, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        refused = threading.Event()
        open_store = tier.DiskStore

        def watched(*arguments: object, **settings: object) -> object:
            try:
                return open_store(*arguments, **settings)  # type: ignore[arg-type]
            except DiskInUseError:
                refused.set()
                raise

        monkeypatch.setattr(tier, "DiskStore", watched)

        def let_go() -> None:
            refused.wait(60.0)
            with suppress(OSError):
                holder.stdin.close()

        ending = threading.Thread(target=let_go)
        ending.start()
        with Node.start(config(keeper, **disk)) as second:
            ending.join()
            assert refused.is_set()
            assert adopted(second) == len(KEYS)
            eventually(lambda: second.counters()["p2pkv_disk_suspended"] == 0, 30.0)


def test_a_folder_that_somebody_has_is_refused_where_nothing_was_left(
    keeper: str, disk: dict[str, object]
) -> None:
    with Node.start(config("", **disk)):
        pass
    with subprocess.Popen(
        [sys.executable, "-c", _LOCKS, f"{disk['disk_path']}/lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ConfigError, match=f"is in use by process {holder.pid}"):
            Node.start(config(keeper, **disk))
        holder.kill()
